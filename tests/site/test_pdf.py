"""The printed book: four pages, with all that is drawn, folded and linked on them."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, toc

sys.path.insert(0, str(ROOT / "book" / "_ext"))
from chromium import MAC_CHROME, REMEDY

pypdf = pytest.importorskip("pypdf", reason='printing needs `pip install "swin-lessons[book]"`')
print_book = pytest.importorskip("print_book")

# with tabs; with explorers and folded answers; with tables and formulas; with links to files beside the site
TABS, LESSON, *_ = PAGES = ("book/how_to_run", "notebooks/01_windows", "book/notation", "book/third_party")

# paragraphs without a formula: folded ones, and those of tabs that are not in front
FOLDED = """() => [...document.querySelectorAll(".bd-article :is(details, .dropdown) p, .sd-tab-content p")]
    .filter(p => !p.querySelector(".math")).map(p => p.textContent)"""
SHOWN = """() => [...document.querySelectorAll(".bd-article img")].length"""


def bare(text: str) -> str:
    """Without spaces and ligatures, which a PDF sets as it likes."""
    return "".join(unicodedata.normalize("NFKC", text).split())


@dataclass
class Printed:
    pdf: Any
    texts: list[str]  # of each sheet

    @property
    def text(self) -> str:
        return bare("".join(self.texts))

    def links(self) -> Iterator[Any]:
        for sheet in self.pdf.pages:
            yield from (link.get_object() for link in sheet.get("/Annots", []))


@pytest.fixture(scope="module")
def printed(browser: Any, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    target = tmp_path_factory.mktemp("pdf") / "book.pdf"
    wanted = [entry for entry in print_book.entries() if entry.name in PAGES]
    count = print_book.print_book(browser, site, wanted, target)
    assert [path.name for path in target.parent.iterdir()] == ["book.pdf"], "a temporary file was left"
    pdf = pypdf.PdfReader(target)
    assert len(pdf.pages) == count
    return Printed(pdf, [sheet.extract_text() for sheet in pdf.pages])


def on_the_site(browser: Any, site: Path, name: str, script: str) -> Any:
    page = browser.new_page()
    page.goto((site / f"{name}.html").as_uri())
    found = page.evaluate(script)
    page.close()
    return found


def bookmarks(pdf: Any, items: list[Any] | None = None, depth: int = 0) -> Iterator[tuple[int, str, int]]:
    """Depth, title and sheet of each entry of the outline."""
    for item in pdf.outline if items is None else items:
        if isinstance(item, list):
            yield from bookmarks(pdf, item, depth + 1)
        else:
            yield depth, item.title, pdf.get_destination_page_number(item)


def test_the_pages_are_those_of_the_site_in_its_order() -> None:
    assert [entry.name for entry in print_book.entries()] == toc()


def test_the_outline_has_parts_pages_and_sections(printed: Printed) -> None:
    found = list(bookmarks(printed.pdf))
    assert [title for depth, title, _ in found if depth == 0] == [
        "Contents",
        "Start here",
        "Build Swin",
        "Reference",
    ]
    assert [title for depth, title, _ in found if depth == 1][-2] == "Notation"
    assert sum(depth == 2 for depth, _, _ in found) > 20


def test_every_bookmark_leads_to_its_heading(printed: Printed) -> None:
    for depth, title, sheet in bookmarks(printed.pdf):
        if depth:
            assert bare(title) in bare(printed.texts[sheet])


def test_the_contents_and_the_footers_number_the_pages(printed: Printed) -> None:
    chapters = {title: sheet for depth, title, sheet in bookmarks(printed.pdf) if depth == 1}
    for title, sheet in chapters.items():
        assert bare(f"{title}{sheet + 1}") in bare(printed.texts[0])
    for number, text in enumerate(printed.texts, 1):
        assert bare(text).endswith(str(number))


@pytest.mark.parametrize("name", [TABS, LESSON])
def test_what_is_folded_on_the_site_is_open_on_paper(
    browser: Any, site: Path, printed: Printed, name: str
) -> None:
    folded = on_the_site(browser, site, name, FOLDED)
    assert len(folded) > 5
    assert [text for text in folded if bare(text) not in printed.text] == []


def test_pictures_stand_where_the_site_has_figures_to_play_with(
    browser: Any, site: Path, printed: Printed
) -> None:
    kinds = [
        item.get_object()["/Subtype"]
        for sheet in printed.pdf.pages
        for item in sheet["/Resources"].get("/XObject", {}).values()
    ]
    wanted = sum(on_the_site(browser, site, name, SHOWN) for name in PAGES)
    assert kinds.count("/Image") >= wanted > 0


def test_no_sheet_is_empty(printed: Printed) -> None:
    assert [number for number, text in enumerate(printed.texts, 1) if len(bare(text)) < 60] == []


def test_formulas_are_drawn(printed: Printed) -> None:
    assert [raw for raw in ("$$", "\\(", "\\[", "\\mathbb", "\\times") if raw in printed.text] == []


def test_links_stay_in_the_book_or_lead_to_other_hosts(printed: Printed) -> None:
    inside = [link for link in printed.links() if "/Dest" in link]
    outside = [link["/A"]["/URI"] for link in printed.links() if "/Dest" not in link]
    sheets = {sheet.indirect_reference.idnum for sheet in printed.pdf.pages}
    assert inside
    assert {link["/Dest"][0].idnum for link in inside} <= sheets
    assert [address for address in outside if not address.startswith("https://")] == []


def test_no_folder_of_this_machine_is_named(printed: Printed) -> None:
    """Not even by what is left of a link that no sheet has any more."""
    objects = [printed.pdf.get_object(number) for number in range(1, printed.pdf.trailer["/Size"])]
    assert [item for item in objects if "file:" in str(item)] == []


@pytest.mark.skipif(Path(MAC_CHROME).is_file(), reason="Chrome is always found here")
def test_without_a_browser_the_remedy_is_named(tmp_path: Path) -> None:
    script = "import print_book\nwith print_book.chromium(): pass"
    folders = {"PATH": "", "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)}
    folders["PYTHONPATH"] = str(ROOT / "book" / "_ext")
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | folders, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert run.stderr.strip() == REMEDY
