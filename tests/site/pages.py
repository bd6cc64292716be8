"""Which pages the site must have: those of _toc.yml and Sphinx's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SPHINX = ("genindex.html", "search.html")


def documents(entry: dict[str, Any]) -> Iterator[str]:
    """All `root:` and `file:` names of a table of contents, in order."""
    for key in ("root", "file"):
        if key in entry:
            yield entry[key].removesuffix(".md").removesuffix(".ipynb")
    for key in ("parts", "chapters", "sections"):
        for child in entry.get(key, []):
            yield from documents(child)


def toc(root: Path = ROOT) -> list[str]:
    return list(documents(yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))))


PAGES = [f"{name}.html" for name in toc()] + list(SPHINX)
