/* Names for controls that the theme leaves unnamed or names differently from what they show. */
"use strict";

function nameControls() {
  // WCAG 2.5.3: the accessible name must contain the visible text
  for (const button of document.querySelectorAll("button[aria-label]")) {
    const text = button.textContent.replace(/\s+/g, " ").trim();
    const name = button.getAttribute("aria-label");
    if (text && !name.includes(text)) button.setAttribute("aria-label", `${text} (${name})`);
  }
  const sidebar = document.getElementById("pst-primary-sidebar");
  if (sidebar && !sidebar.hasAttribute("role")) {
    sidebar.setAttribute("role", "region");
    sidebar.setAttribute("aria-label", "Pages of the book");
  }
  // a wide table or formula scrolls: let the keyboard reach it
  for (const box of document.querySelectorAll(".pst-scrollable-table-container, div.math, div.highlight pre")) {
    if (box.scrollWidth > box.clientWidth && !box.hasAttribute("tabindex")) box.tabIndex = 0;
  }
}

document.addEventListener("DOMContentLoaded", nameControls);
window.addEventListener("load", nameControls);
