"""Results files: provenance, safe writing, and the Sphinx role and table that show them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from swin_lessons import results

ROOT = Path(__file__).parents[1]
DATA = {
    "best": {"accuracy": 0.9213, "epochs": 12},
    "rows": [{"model": "swin", "speed": 10.26}, {"model": "timm", "speed": 8.0}],
}


def test_a_result_comes_back_with_its_origin(tmp_path: Path) -> None:
    path = results.save_result(tmp_path / "deep" / "demo.json", DATA, command="make demo")
    result = results.load_result(path)
    origin = result.pop("provenance")
    assert result == DATA
    assert origin.keys() == results.PROVENANCE.keys()
    assert origin["command"] == "make demo"
    assert origin["versions"]["python"].startswith("3.")
    assert [p.name for p in path.parent.iterdir()] == ["demo.json"], "no temporary file is left"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = results.save_result(tmp_path / "demo.json", DATA)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="NaN"):
        results.save_result(path, {"loss": float("nan")})
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_data_must_not_bring_its_own_provenance(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="provenance"):
        results.save_result(tmp_path / "demo.json", {"provenance": {}})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("provenance",), None, "lacks 'provenance'"),
        (("provenance", "commit"), None, "lacks 'commit'"),
        (("provenance", "hardware", "cores"), "two", "'cores' is 'two', expected int"),
        (("provenance", "versions", "torch"), None, "lacks 'torch'"),
        (("provenance", "date"), "yesterday", "ISO 8601"),
    ],
)
def test_an_incomplete_origin_is_refused(
    tmp_path: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    file = results.save_result(tmp_path / "demo.json", DATA)
    result = json.loads(file.read_text())
    table = result
    for key in path[:-1]:
        table = table[key]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    file.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=message) as caught:
        results.load_result(file)
    assert "demo.json" in str(caught.value)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("{")
    with pytest.raises(ValueError, match=r"demo\.json is not JSON"):
        results.load_result(tmp_path / "demo.json")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["/opt/env/bin/swin-lessons", "bench", "--out", "{here}/out.json"],
            "swin-lessons bench --out out.json",
        ),
        (["/x/swin_lessons/__main__.py", "train"], "python -m swin_lessons train"),
        (["{here}/tools/run.py", "a b"], "python tools/run.py 'a b'"),
        (["-c"], "python"),
    ],
)
def test_the_command_hides_this_machine_s_folders(
    argv: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert results.this_command([a.replace("{here}", str(Path.cwd())) for a in argv]) == expected


# --- in the pages -----------------------------------------------------------------------------------

CONF = """
import sys
sys.path.insert(0, {extensions!r})
extensions = ["myst_parser", "results"]
results_folder = "results"
"""


class Book:
    """A one-page Sphinx project with a results file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "conf.py").write_text(CONF.format(extensions=str(ROOT / "book" / "_ext")))
        results.save_result(folder / "results" / "demo.json", DATA, command="make demo")

    def build(self, page: str) -> tuple[str, str]:
        """The page's HTML and the warnings."""
        import io

        from sphinx.application import Sphinx
        from sphinx.util.docutils import docutils_namespace

        (self.folder / "index.md").write_text(f"# Page\n\n{page}\n")
        warnings = io.StringIO()
        out = self.folder / "out"
        with docutils_namespace():
            trees = out / "trees"
            Sphinx(self.folder, self.folder, out, trees, "html", None, None, warnings, freshenv=True).build()
        return (out / "index.html").read_text(), warnings.getvalue()


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    pytest.importorskip("sphinx", reason='needs `pip install "swin-lessons[book]"`')
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Book(tmp_path)


def test_the_role_shows_a_number_with_its_origin(book: Book) -> None:
    html, warnings = book.build("{result}`demo.best.accuracy|.1%` after {result}`demo.best.epochs` epochs")
    assert warnings == ""
    assert ">92.1%</abbr>" in html
    assert ">12</abbr>" in html
    assert 'title="Measured 20' in html


def test_the_table_shows_rows_and_their_origin(book: Book) -> None:
    table = "```{results-table} demo.rows\n:columns: model, speed|.1f\n:headers: Model, Images/s\n:caption: Speed.\n```"
    html, warnings = book.build(table)
    assert warnings == ""
    words = re.sub(r"<[^>]*>", "", html)
    for expected in ("Images/s", "swin", "10.3", "Speed.", "make demo"):
        assert expected in words


def test_where_chooses_rows(book: Book) -> None:
    html, warnings = book.build("```{results-table} demo.rows\n:columns: model\n:where: model = swin\n```")
    assert warnings == ""
    assert "<p>swin</p>" in html
    assert "<p>timm</p>" not in html


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("{result}`demo.best.accurate|.1%`", "no 'accurate'; there is ['accuracy', 'epochs']"),
        ("{result}`gone.best`", "no results file results/gone.json"),
        ("{result}`demo.best.accuracy`", "needs a format"),
        ("{result}`demo.best`", "a group of values"),
        ("{result}`demo.best.accuracy|Q`", "demo.best.accuracy|Q"),
        ("{result}`demo.rows.7`", "no '7'"),
        ("```{results-table} demo.rows\n:columns: model, watts\n```", "no 'watts'"),
        ("```{results-table} demo.rows\n```", "name the columns"),
        ("```{results-table} demo.rows\n:columns: model\n:where: model = no\n```", "leaves no row"),
        ("```{results-table} demo.rows\n:columns: model\n:where: model\n```", "write `key = value"),
        ("```{results-table} demo.best\n:columns: model\n```", "list of objects"),
        ("```{provenance} gone\n```", "no results file"),
    ],
)
def test_what_cannot_be_shown_is_a_warning(book: Book, page: str, message: str) -> None:
    _, warnings = book.build(page)
    assert message in warnings
