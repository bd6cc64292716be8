"""Links of the built site, checked without a browser or a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from links import problems, read_pages
from pages import PAGES, ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import lessons

CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
REPOSITORY = CONFIG["repository"]["url"]


def test_no_broken_links(site: Path) -> None:
    assert problems(site) == []


def test_the_site_has_the_pages_of_the_contents_and_no_other(site: Path) -> None:
    found = {str(path.relative_to(site.resolve())) for path in read_pages(site.resolve())}
    assert found == {*PAGES, "index.html"}


def test_links_into_the_repository_name_files_that_exist(site: Path) -> None:
    """Colab, edit and source buttons: `.../blob/main/notebooks/x.ipynb` must be a file here."""
    owner_and_name = REPOSITORY.removeprefix("https://github.com/")
    starts = [f"{REPOSITORY}/{kind}/main/" for kind in ("edit", "blob")]
    starts.append(f"{CONFIG['launch_buttons']['colab_url']}/github/{owner_and_name}/blob/main/")
    paths = {
        link.removeprefix(start).split("#")[0].split("?")[0]
        for page in read_pages(site).values()
        for link in page.links
        for start in starts
        if link.startswith(start)
    }
    assert "book/index.md" in paths
    assert sorted(path for path in paths if not (ROOT / path).is_file()) == []


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ('<a href="gone.html">x</a>', "no such file"),
        ('<a href="#gone">x</a>', "no such anchor"),
        ('<script src="//cdn.example/x.js"></script>', "from outside"),
        ('<link rel="stylesheet" href="https://cdn.example/x.css">', "from outside"),
        ("<img src='missing.png'>", "no such file"),
    ],
)
def test_the_checker_sees_a_fault(tmp_path: Path, html: str, expected: str) -> None:
    (tmp_path / "index.html").write_text(f"<p id='here'><a href='#here'>ok</a>{html}</p>")
    found = problems(tmp_path)
    assert len(found) == 1
    assert expected in found[0]


def test_the_checker_sees_styles_that_load_from_outside(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text(
        "@import 'https://fonts.example/a.css'; p { background: url(//x.example/b.png) }"
    )
    assert len(problems(tmp_path)) == 2


# --- how long a lesson takes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stamp", "shown"),
    [({"seconds": 7}, "7 seconds"), ({"seconds": 226}, "3.8 minutes"), ({}, "a time not yet measured")],
)
def test_a_run_time_is_the_stamp_s(stamp: dict[str, int], shown: str) -> None:
    assert lessons.run_time({"metadata": {"swin_lessons": stamp}}) == shown


def test_lessons_show_their_own_run_time(site: Path) -> None:
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        shown = lessons.run_time(json.loads(path.read_text(encoding="utf-8")))
        words = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert f" took {shown} " in words
