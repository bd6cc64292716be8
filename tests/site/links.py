"""An offline link checker: every local link and anchor exists, nothing is loaded from another host."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# what a browser fetches by itself
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
LOADING_RELATIONS = {"stylesheet", "icon", "shortcut icon", "preload", "modulepreload"}
OUTSIDE_CSS = re.compile(r"(?:url\(\s{0,9}['\"]?|@import\s{1,9}['\"]?)((?:https?:)?//[^)'\";]{1,200})")


@dataclass
class Page(HTMLParser):
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel", "").lower() in LOADING_RELATIONS:
            self.loads.append(values.get("href", ""))
        if LOADS.get(tag) in values:
            self.loads.append(values[LOADS[tag]])


def read_pages(site: Path) -> dict[Path, Page]:
    """All pages but the templates that the theme leaves under _static."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.parts:
            pages[path] = page = Page()
            page.feed(path.read_text(encoding="utf-8"))
    return pages


def is_outside(url: str) -> bool:
    return url.startswith("//") or urlsplit(url).scheme in ("http", "https")


def target(site: Path, page: Path, url: str) -> Path:
    path = unquote(urlsplit(url).path)
    if not path:
        return page
    found = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    return found / "index.html" if found.is_dir() else found


def broken(site: Path, page: Path, url: str, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a local URL, or None."""
    if is_outside(url) or urlsplit(url).scheme in ("data", "mailto", "javascript", "blob"):
        return None
    file, anchor = target(site, page, url), unquote(urlsplit(url).fragment)
    if not file.exists():
        return "no such file"
    if anchor and file in pages and anchor not in pages[file].ids:
        return "no such anchor"
    return None


def problems(site: Path) -> list[str]:
    """One line for each broken link or anchor and for each thing that would be loaded from another host."""
    site = site.resolve()
    pages, found = read_pages(site), []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: loads {url[:160]} from outside" for url in page.loads if is_outside(url)]
        for url in dict.fromkeys(page.links + page.loads):
            if reason := broken(site, path, url, pages):
                found.append(f"{name}: {reason}: {url[:160]}")
    for path in site.rglob("*.css"):
        for match in OUTSIDE_CSS.finditer(path.read_text(encoding="utf-8", errors="ignore")):
            found.append(f"{path.relative_to(site)}: loads {match.group(1)} from outside")
    return found
