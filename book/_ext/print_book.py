"""Print the whole book to `_build/swin-lessons.pdf`: `python book/_ext/print_book.py`.

Chromium prints each built page, with formulas drawn and folded answers open; then the pages are joined. Links within
the book lead to pages of the PDF, and there are a table of contents, an outline and page numbers.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import yaml
from pypdf import PageObject, PdfReader, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, Fit, NameObject, NumberObject

import build_site
from chromium import REMEDY, executable

ROOT = build_site.ROOT
TARGET = ROOT / "_build" / "swin-lessons.pdf"
TITLE, AUTHOR = "Swin Lessons", "The Swin Lessons authors"
PAPER = {"format": "A4", "print_background": True}
MARGIN = {"top": "16mm", "bottom": "20mm", "left": "18mm", "right": "18mm"}
A4_HEIGHT = 842.0
SCREEN = {"width": 660, "height": 980}  # in CSS pixels what MARGIN leaves of an A4 page

# Opens what is folded and waits until all is drawn. Chromium stores the place of an element in the PDF only if a
# link of the page leads there: hidden links to all of them do.
READY = """async () => {
    const all = selector => [...document.querySelectorAll(selector)];
    all("details").forEach(fold => { fold.open = true; });
    all(".toggle-hidden").forEach(fold => fold.classList.remove("toggle-hidden"));
    const places = all(".bd-article [id]").map(place => Object.assign(
        document.createElement("a"), {href: "#" + place.id, hidden: true}));
    document.body.append(...places);
    if (window.MathJax?.startup?.promise) await MathJax.startup.promise;
    await document.fonts.ready;
    await Promise.all([...document.images].map(image => image.decode().catch(() => null)));
}"""
# Code that is a little too wide gets smaller letters; what is wider still wraps.
FIT = """() => document.querySelectorAll(".bd-article pre").forEach(code => {
    const style = getComputedStyle(code), room = code.clientWidth;
    const edges = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    Object.assign(code.style, {whiteSpace: "pre", width: "max-content"});
    const share = (room - edges - 1) / (code.clientWidth - edges);
    Object.assign(code.style, {whiteSpace: "", width: ""});
    if (share > 0.75 && share < 1) code.style.fontSize = share * parseFloat(style.fontSize) + "px";
})"""
HEADINGS = """() => {
    const text = heading => {
        const copy = heading.cloneNode(true);
        copy.querySelectorAll(".headerlink").forEach(link => link.remove());
        return copy.textContent.replace(/\\s+/g, " ").trim();
    };
    return {
        title: text(document.querySelector(".bd-article h1")),
        sections: [...document.querySelectorAll(".bd-article h2")].map(h => [h.closest("[id]").id, text(h)]),
    };
}"""

CONTENTS_STYLE = """body { font: 14px sans-serif } h1 { font-size: 32px } h2 { font-size: 15px; margin: 1.2em 0 0.3em }
a { display: flex; gap: 0.6em; padding: 0.15em 0; color: inherit; text-decoration: none; break-inside: avoid }
a.below { padding-left: 1.5em } i { flex: 1; border-bottom: 1px dotted #888; margin-bottom: 0.3em }"""
FOOTER_STYLE = """@page { margin: 0 } body { margin: 0; font: 10px sans-serif; color: #555 }
div { height: 292mm; box-sizing: border-box; padding: 284mm 18mm 0; display: flex; justify-content: space-between }
div + div { break-before: page }"""


@dataclass(frozen=True)
class Entry:
    """A page of `_toc.yml`: its name without suffix, the caption of its part, and how deep it lies there."""

    name: str
    part: str = ""
    depth: int = 0


@dataclass
class Chapter:
    """A printed page of the book. `first` is the number of its first sheet, counted from 0."""

    entry: Entry
    address: str
    title: str
    sections: list[tuple[str, str]]
    pdf: PdfReader
    first: int = 0


@dataclass(frozen=True)
class Place:
    """A sheet, counted from 0, and the height on it in points."""

    sheet: int
    top: float = A4_HEIGHT


@dataclass
class Book:
    """The sheets joined so far, and where every address of the site lies on them."""

    chapters: list[Chapter]
    writer: PdfWriter = field(default_factory=PdfWriter)
    places: dict[str, Place] = field(default_factory=dict)


# --- the order of the pages -------------------------------------------------------------------------


def _entries(node: dict[str, Any], part: str, depth: int) -> Iterator[Entry]:
    yield Entry(node["file"].removesuffix(".md").removesuffix(".ipynb"), part, depth)
    for child in node.get("sections", []):
        yield from _entries(child, part, depth + 1)


def entries(root: Path = ROOT) -> list[Entry]:
    """The pages of `_toc.yml` in the order of reading."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    found = [Entry(toc["root"])]
    for part in toc["parts"]:
        for chapter in part["chapters"]:
            found.extend(_entries(chapter, part["caption"], 0))
    return found


# --- printing ---------------------------------------------------------------------------------------


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that reaches no other host. Raises SystemExit, with the remedy, where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit('printing needs Playwright: `pip install "swin-lessons[book,test]"`') from None
    with sync_playwright() as playwright:
        path = executable(playwright)
        if path is None:
            raise SystemExit(REMEDY)
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


def sheets(page: Any, margin: dict[str, str] | None = None) -> PdfReader:
    return PdfReader(io.BytesIO(page.pdf(margin=margin or MARGIN, **PAPER)))


def print_chapter(page: Any, site: Path, entry: Entry) -> Chapter:
    page.goto((site / f"{entry.name}.html").as_uri(), wait_until="load")
    page.evaluate(READY)
    page.evaluate(FIT)
    told = page.evaluate(HEADINGS)
    return Chapter(entry, unquote(page.url), told["title"], told["sections"], sheets(page))


def number(chapters: Sequence[Chapter], start: int) -> None:
    """Give each chapter the number of its first sheet."""
    for chapter in chapters:
        chapter.first = start
        start += len(chapter.pdf.pages)


def contents_page(chapters: Sequence[Chapter]) -> str:
    lines, part = [f"<title>{TITLE}</title><style>{CONTENTS_STYLE}</style><h1>{TITLE}</h1>"], ""
    for chapter in chapters:
        if chapter.entry.part != part:
            part = chapter.entry.part
            lines.append(f"<h2>{escape(part)}</h2>")
        row = f"<span>{escape(chapter.title)}</span><i></i><span>{chapter.first + 1}</span>"
        below = "below" if chapter.entry.depth else ""
        lines.append(f'<a class="{below}" href="{escape(chapter.address)}">{row}</a>')
    return "\n".join(lines)


def print_contents(page: Any, chapters: Sequence[Chapter]) -> Chapter:
    """The table of contents; it is printed twice, for its own length moves the numbers in it."""
    length = 0
    for _ in range(2):
        number(chapters, length)
        page.set_content(contents_page(chapters))
        pdf = sheets(page)
        length = len(pdf.pages)
    return Chapter(Entry("contents"), "contents:", "Contents", [], pdf)


def print_footers(page: Any, chapters: Sequence[Chapter]) -> PdfReader:
    """One sheet with nothing but a footer for each sheet of the book."""
    titles = [c.title for c in chapters for _ in c.pdf.pages]
    rows = [f"<div><span>{escape(t)}</span><span>{n}</span></div>" for n, t in enumerate(titles, 1)]
    page.set_content(f"<style>{FOOTER_STYLE}</style>" + "".join(rows))
    footers = sheets(page, {})
    assert len(footers.pages) == len(titles), "a footer does not fit its sheet"
    return footers


# --- joining ----------------------------------------------------------------------------------------


def find_places(chapter: Chapter) -> Iterator[tuple[str, Place]]:
    """Addresses of the site and where they are on paper."""
    yield chapter.address, Place(chapter.first)
    for name, spot in chapter.pdf.named_destinations.items():
        sheet = chapter.pdf.get_destination_page_number(spot)
        if sheet is not None and spot.top is not None:
            yield f"{chapter.address}#{unquote(name[1:])}", Place(chapter.first + sheet, float(spot.top))


def address_of(link: DictionaryObject, chapter: Chapter) -> str:
    """Where a link leads: `file:...#id` within the book, another host's address, or nothing."""
    if "/Dest" in link:
        return f"{chapter.address}#{unquote(str(link['/Dest'])[1:])}"
    action = link.get("/A")
    return str(action.get_object().get("/URI", "")) if action else ""


def lead(book: Book, link: DictionaryObject, chapter: Chapter) -> bool:
    """Turn a link of the site into one of the PDF. False if it leads nowhere, such as to a file beside the site."""
    address = address_of(link, chapter)
    if not address.startswith("file:"):
        return bool(address)
    address = unquote(address)
    place = book.places.get(address) or book.places.get(urldefrag(address).url)
    link.pop("/A", None)  # the name of a folder of this machine
    if place is None:
        return False
    fit = [NameObject("/XYZ"), NumberObject(0), NumberObject(round(place.top)), NumberObject(0)]
    link[NameObject("/Dest")] = ArrayObject([book.writer.pages[place.sheet].indirect_reference, *fit])
    return True


def lead_all(book: Book, sheet: PageObject, chapter: Chapter) -> None:
    links = sheet.get("/Annots", ArrayObject())
    kept = [link for link in links if lead(book, link.get_object(), chapter)]
    sheet[NameObject("/Annots")] = ArrayObject(kept)


def bookmark(book: Book, title: str, place: Place, parent: Any) -> Any:
    return book.writer.add_outline_item(
        title=title,
        page_number=place.sheet,
        parent=parent,
        fit=Fit.xyz(0, place.top, 0),
        is_open=parent is None,  # the parts are unfolded, their pages are not
    )


def outline(book: Book) -> None:
    """Bookmarks: parts, in them the pages, in them the pages below and the sections."""
    parts: dict[str, Any] = {"": None}
    above: list[Any] = []
    for chapter in book.chapters:
        part, depth = chapter.entry.part, chapter.entry.depth
        if part not in parts:
            parts[part] = bookmark(book, part, Place(chapter.first), None)
        parent = above[depth - 1] if depth else parts[part]
        above[depth:] = [bookmark(book, chapter.title, Place(chapter.first), parent)]
        for name, text in chapter.sections:
            place = book.places.get(f"{chapter.address}#{name}", Place(chapter.first))
            bookmark(book, text, place, above[depth])


def join(chapters: list[Chapter], footers: PdfReader) -> PdfWriter:
    book = Book(chapters)
    for chapter in chapters:
        for sheet in chapter.pdf.pages:
            book.writer.add_page(sheet)
        book.places.update(find_places(chapter))
    for chapter in chapters:
        for index in range(chapter.first, chapter.first + len(chapter.pdf.pages)):
            sheet = book.writer.pages[index]
            lead_all(book, sheet, chapter)
            sheet.merge_page(footers.pages[index])
            sheet.compress_content_streams()
    outline(book)
    return book.writer


# --- the whole --------------------------------------------------------------------------------------


def write(writer: PdfWriter, target: Path) -> None:
    """The file appears whole or not at all."""
    part = target.with_suffix(".part")
    with part.open("wb") as handle:
        writer.write(handle)
    os.replace(part, target)


def print_book(browser: Any, site: Path, wanted: Sequence[Entry], target: Path) -> int:
    """Print the wanted pages of a built site into one file; the number of its sheets."""
    page = browser.new_page(viewport=SCREEN, color_scheme="light", reduced_motion="reduce")
    page.emulate_media(media="print")
    chapters = [print_chapter(page, site, entry) for entry in wanted]
    chapters.insert(0, print_contents(page, chapters))
    writer = join(chapters, print_footers(page, chapters))
    page.close()
    writer.add_metadata({"/Title": TITLE, "/Author": AUTHOR})
    writer.page_mode = "/UseOutlines"
    write(writer, target)
    return len(writer.pages)


def main() -> None:
    with chromium() as browser:  # first, for without it there is nothing to build the site for
        site = build_site.build()
        start = time.perf_counter()
        count = print_book(browser, site, entries(), TARGET)
    seconds, size = time.perf_counter() - start, TARGET.stat().st_size / 1e6
    print(f"The book is in {TARGET}: {count} pages, {size:.1f} MB, printed in {seconds:.0f} s")


if __name__ == "__main__":
    main()
