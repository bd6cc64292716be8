/* Names and roles for what the theme leaves unnamed, or names differently from what it shows. */
"use strict";

// An icon in a named button is decoration: Font Awesome's own titles would be read as well.
function hideIcons(button) {
  for (const icon of button.querySelectorAll("svg")) {
    icon.setAttribute("aria-hidden", "true");
    icon.querySelector("title")?.remove();
  }
}

// WCAG 2.5.3: the accessible name contains the visible text.
function nameButton(button) {
  hideIcons(button);
  const text = button.textContent.replace(/\s+/g, " ").trim();
  const name = button.getAttribute("aria-label");
  if (!name.includes(text)) button.setAttribute("aria-label", `${text} (${name})`);
}

function nameAll() {
  document.querySelectorAll("button[aria-label]").forEach(nameButton);
  document.querySelectorAll(".citation-list > .citation").forEach((entry) => entry.setAttribute("role", "listitem"));
  const sidebar = document.getElementById("pst-primary-sidebar");
  if (sidebar && !sidebar.hasAttribute("role")) {
    sidebar.setAttribute("role", "region");
    sidebar.setAttribute("aria-label", "Pages of the book");
  }
  // arrows in the side bar open a part of the book: say which
  for (const arrow of document.querySelectorAll("#pst-primary-sidebar summary:not([aria-label])")) {
    arrow.setAttribute("aria-label", `Pages of ${arrow.closest("li").querySelector("a").textContent.trim()}`);
  }
  // Sphinx breaks a long signature into a list without terms, which is none
  document.querySelectorAll("dt.sig dl, dt.sig dd").forEach((part) => part.setAttribute("role", "none"));
  // what scrolls sideways must be reachable by keyboard
  for (const box of document.querySelectorAll(".pst-scrollable-table-container, div.math, div.highlight pre")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

document.addEventListener("DOMContentLoaded", () => {
  nameAll();
  // Font Awesome draws the icons later
  const icons = new MutationObserver((changes) => {
    const buttons = new Set(changes.map((change) => change.target.closest("button[aria-label]")));
    buttons.forEach((button) => button && hideIcons(button));
  });
  document.querySelectorAll("button[aria-label]").forEach((button) => icons.observe(button, { childList: true }));
});
window.addEventListener("load", nameAll);
