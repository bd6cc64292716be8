"""Every page in Chromium with all other hosts blocked: scripts, maths, pictures, names, contrast, phone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import vendor

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

# A checker for tests alone; it is never part of the site.
AXE = vendor.Package(
    name="axe-core",
    version="4.14.1",
    integrity="sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    license="MPL-2.0",
    purpose="finds controls without names and text without contrast",
    files=(("axe.min.js", "axe.min.js"),),
)

READY = "async () => { if (window.MathJax?.startup?.promise) await MathJax.startup.promise }"
FORMULAS = """() => ({
    written: document.querySelectorAll(".math").length,
    drawn: document.querySelectorAll(".math mjx-container svg").length,
    failed: document.querySelectorAll("mjx-merror, [data-mjx-error]").length,
})"""
NAMELESS = """() => [...document.querySelectorAll(".bd-article img")]
    .filter(image => !(image.getAttribute("alt") || "").trim() || /\\.(png|svg|jpe?g)$/.test(image.alt))
    .map(image => image.src.slice(0, 120))"""
EMPTY = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src.slice(0, 120))"
WIDER = """() => [...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && e.offsetParent
                 && !e.closest("[style*=overflow], pre, table, .math, .bd-sidebar, dialog"))
    .map(e => e.tagName + "." + e.className).slice(0, 5)"""
# move each figure's slider from one end to the other: its picture must change
SLIDERS = """() => [...document.querySelectorAll("figure.frame-slider")].flatMap(figure => {
    const range = figure.querySelector("input[type=range]"), image = figure.querySelector("img");
    if (!range || !image) return [];
    const seen = [range.min, range.max].map(value => {
        range.value = value; range.dispatchEvent(new Event("input", {bubbles: true})); return image.src; });
    return seen[0] === seen[1] ? [figure.id || "a figure"] : [];
})"""
AXE_RUN = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter(v => ["serious", "critical"].includes(v.impact))
    .map(v => `${v.id}: ${v.nodes.slice(0, 3).map(n => n.target.join(" ")).join(" | ")}`)"""


@dataclass
class Visit:
    """What one look at a page found."""

    outside: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    formulas: dict[str, int] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    dead_sliders: list[str] = field(default_factory=list)
    axe: dict[str, list[str]] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)
    phone_overflow: int = 0
    phone_wide: list[str] = field(default_factory=list)


def listen(page: Any, base_url: str, visit: Visit) -> None:
    local = (base_url, "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(local) else visit.outside.append(r.url))
    page.on("requestfailed", lambda r: visit.failed.append(f"{r.url} {r.failure}"))
    page.on("response", lambda r: visit.failed.append(f"{r.url} {r.status}") if r.status >= 400 else None)
    page.on("console", lambda m: visit.console.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: visit.console.append(f"page error: {e}"))


def lightness(page: Any) -> float:
    """0 (black) to 1 (white): the body's background."""
    red, green, blue = page.evaluate(
        "() => getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    )
    return (red + green + blue) / (3 * 255)


def look(page: Any, visit: Visit) -> None:
    visit.formulas = page.evaluate(FORMULAS)
    visit.nameless = page.evaluate(NAMELESS)
    visit.empty = page.evaluate(EMPTY)
    visit.dead_sliders = page.evaluate(SLIDERS)


def look_at_colours(page: Any, axe: str, visit: Visit) -> None:
    page.evaluate(axe)
    page.add_style_tag(content="* { transition: none !important }")  # a colour half way is no finding
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_function(f"() => document.documentElement.dataset.theme === '{scheme}'")
        visit.background[scheme] = lightness(page)
        visit.axe[scheme] = page.evaluate(AXE_RUN)


def look_on_a_phone(page: Any, visit: Visit) -> None:
    page.set_viewport_size(PHONE)
    visit.phone_overflow = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    visit.phone_wide = page.evaluate(WIDER)


@pytest.fixture(scope="module")
def axe() -> str:
    folder = ROOT / "_build" / "test_scripts"
    vendor.fetch(folder, (AXE,))
    return (folder / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def visit(browser: Any, base_url: str, axe: str) -> Callable[[str], Visit]:
    """Looks at a page once; later calls return what was found."""
    visits: dict[str, Visit] = {}

    def go(name: str) -> Visit:
        if name not in visits:
            visits[name] = Visit()
            page = browser.new_page(viewport=DESK, color_scheme="light", reduced_motion="reduce")
            listen(page, base_url, visits[name])
            page.goto(f"{base_url}/{name}", wait_until="load")
            page.evaluate(READY)
            look(page, visits[name])
            look_at_colours(page, axe, visits[name])
            look_on_a_phone(page, visits[name])
            page.close()
        return visits[name]

    return go


every_page = pytest.mark.parametrize("name", PAGES)


@every_page
def test_asks_no_other_host_and_misses_nothing(visit: Callable[[str], Visit], name: str) -> None:
    assert visit(name).outside == []
    assert visit(name).failed == []


@every_page
def test_scripts_run_without_an_error(visit: Callable[[str], Visit], name: str) -> None:
    assert visit(name).console == []


@every_page
def test_formulas_are_drawn(visit: Callable[[str], Visit], site: Path, name: str) -> None:
    formulas = visit(name).formulas
    written = (site / name).read_text(encoding="utf-8").count('class="math notranslate')
    assert formulas["written"] == written
    assert formulas["drawn"] >= written
    assert formulas["failed"] == 0


@every_page
def test_pictures_are_there_and_have_words(visit: Callable[[str], Visit], name: str) -> None:
    assert visit(name).nameless == []
    assert visit(name).empty == []


@every_page
def test_sliders_change_their_picture(visit: Callable[[str], Visit], name: str) -> None:
    assert visit(name).dead_sliders == []


@every_page
def test_controls_have_names_and_text_has_contrast(visit: Callable[[str], Visit], name: str) -> None:
    assert visit(name).axe == {"light": [], "dark": []}


@every_page
def test_dark_mode_is_dark(visit: Callable[[str], Visit], name: str) -> None:
    background = visit(name).background
    assert background["light"] > 0.9
    assert background["dark"] < 0.2


@every_page
def test_fits_a_phone(visit: Callable[[str], Visit], name: str) -> None:
    assert visit(name).phone_overflow <= 0, visit(name).phone_wide


def test_the_formula_check_is_not_empty(visit: Callable[[str], Visit]) -> None:
    assert visit("book/glossary.html").formulas["drawn"] > 0


def test_search_finds_pages(browser: Any, base_url: str) -> None:
    page = browser.new_page(viewport=DESK)
    page.goto(f"{base_url}/search.html?q=window")
    page.wait_for_selector("ul.search li a")
    links = page.eval_on_selector_all("ul.search li a", "links => links.map(a => a.getAttribute('href'))")
    assert any("glossary" in link for link in links)
    page.close()


def test_search_from_the_keyboard(browser: Any, base_url: str) -> None:
    page = browser.new_page(viewport=DESK)
    page.goto(f"{base_url}/book/index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("shift mask")
    page.keyboard.press("Enter")
    page.wait_for_selector("ul.search li a")
    assert "search.html" in page.url
    page.close()


def test_there_is_one_search_field(browser: Any, base_url: str) -> None:
    page = browser.new_page(viewport=DESK)
    page.goto(f"{base_url}/book/index.html")
    shown = page.eval_on_selector_all(".search-button-field", "all => all.filter(b => b.offsetParent).length")
    assert shown == 1
    page.close()
