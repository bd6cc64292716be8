"""The reference pages of the built site hold every public name, with an anchor and a link to its source."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from pages import ROOT

from swin_lessons.cli import command_modules

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import api

PAGES = sorted((ROOT / "book" / "reference").glob("*.md"))


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.stem)
def test_every_public_name_is_on_its_page(site: Path, source: Path) -> None:
    html = (site / "book" / "reference" / f"{source.stem}.html").read_text(encoding="utf-8")
    for listed in re.findall(r"^```\{api\} (\S+)$", source.read_text(encoding="utf-8"), re.MULTILINE):
        for module in api.documented_modules(listed):
            for name in api.public_names(module):
                assert f'id="{module.__name__}.{name}"' in html
                value = getattr(importlib.import_module(module.__name__), name)
                assert value.__name__ != name or f"/{api.source(value)}" in html


def test_every_command_is_on_its_page(site: Path) -> None:
    html = (site / "book" / "reference" / "command.html").read_text(encoding="utf-8")
    for name in command_modules():
        assert f'id="command-{name}"' in html
        assert f"usage: swin-lessons {name}" in html
