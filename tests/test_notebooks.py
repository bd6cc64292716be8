"""The committed lessons, without running them: whole, fresh, described, and the same code as the package.

Running them is nbval's part (`make test`) and that of `book/_ext/notebooks.py check`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest

from swin_lessons import results

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import notebooks  # noqa: E402
import stamps  # noqa: E402

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SIZE_LIMIT, TOTAL_LIMIT = 1_000_000, 15_000_000  # bytes
GOOD_LINES, MOST_LINES = 25, 45
OUTSIDE = re.compile(
    r"""<(?:script|link|img|iframe|source|video)\b[^>]{0,300}?(?:src|href)=["'](?:https?:)?//"""
)

every_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def lines(cell: Any) -> int:
    return len(cell.source.splitlines())


def html_outputs(cell: Any) -> list[str]:
    return ["".join(output.get("data", {}).get("text/html", "")) for output in cell.outputs]


# --- what is wrong with a notebook: each returns one line for each fault ----------------------------


def unrun_cells(notebook: Any) -> list[str]:
    """Cells 1..n in order: the state after "restart and run all"."""
    counts = [c.execution_count for c in stamps.code_cells(notebook) if "nbval-skip" not in tags(c)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts are {counts}"]


def bad_outputs(notebook: Any) -> list[str]:
    found = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                found.append(f"cell {number}: {output.ename}")
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"cell {number}: stderr: {output.text[:80]!r}")
    return found


def outside_loads(notebook: Any) -> list[str]:
    return [
        f"cell {number} loads from another host"
        for number, cell in enumerate(notebook.cells)
        for html in [cell.source if cell.cell_type == "markdown" else "", *html_outputs_of(cell)]
        if OUTSIDE.search(html)
    ]


def html_outputs_of(cell: Any) -> list[str]:
    return html_outputs(cell) if cell.cell_type == "code" else []


class Pictures(HTMLParser):
    """The alt texts of all <img>, and whether there is a <figcaption>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.alts: list[str] = []
        self.caption = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.alts.append(dict(attributes).get("alt") or "")
        self.caption |= tag == "figcaption"


def undescribed_figures(notebook: Any) -> list[str]:
    """Alt text and caption: in `mystnb` metadata for pictures, in the HTML or there for HTML figures."""
    found = []
    for number, cell in enumerate(stamps.code_cells(notebook)):
        about = cell.metadata.get("mystnb", {})
        caption = about.get("figure", {}).get("caption", "")
        has_picture = any(m.startswith("image/") for output in cell.outputs for m in output.get("data", {}))
        if has_picture and not about.get("image", {}).get("alt", "").strip():
            found.append(f"code cell {number}: no mystnb.image.alt")
        if has_picture and not caption.strip():
            found.append(f"code cell {number}: no mystnb.figure.caption")
        for pictures in map(Pictures, html_outputs(cell)):
            if not all(alt.strip() for alt in pictures.alts):
                found.append(f"code cell {number}: an <img> without alt")
            if pictures.alts and not (caption.strip() or pictures.caption):
                found.append(f"code cell {number}: an HTML figure without caption")
    return found


def long_cells(notebook: Any, limit: int) -> list[str]:
    cells = [cell for cell in stamps.code_cells(notebook) if lines(cell) > limit]
    return [f"{lines(cell)} lines: {cell.source.splitlines()[0]}" for cell in cells]


# --- the package's code in the lessons --------------------------------------------------------------


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
            constant = body[0].value
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                node.body = body[1:]  # type: ignore[attr-defined]
        return node


def definition(source: str, name: str) -> str | None:
    """The syntax tree, as text, of the class or function `name`, docstrings left out; comments never are in."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return ast.dump(_WithoutDocstrings().visit(node))
    return None


def package_source(dotted: str) -> tuple[str, str]:
    """The source of the module in which `module.name` is written, and the name."""
    module_name, _, name = dotted.rpartition(".")
    value = getattr(importlib.import_module(module_name), name)
    value = getattr(value, "fn", value)  # a kernel: the function inside Triton's wrapper
    value = inspect.unwrap(value)  # not its decorator
    return Path(inspect.getsourcefile(value)).read_text(encoding="utf-8"), name  # type: ignore[arg-type]


def unlike_the_package(cell: Any) -> list[str]:
    found = []
    for tag in tags(cell):
        if tag.startswith("package:"):
            source, name = package_source(tag.removeprefix("package:"))
            ours = definition(stamps.python_part(cell.source), name)
            if ours is None or ours != definition(source, name):
                found.append(f"{name} in the lesson is not {tag.removeprefix('package:')}")
    return found


# --- the lessons ------------------------------------------------------------------------------------


@every_lesson
def test_is_whole_and_light(path: Path) -> None:
    notebook = notebooks.read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < SIZE_LIMIT
    assert unrun_cells(notebook) == []
    assert bad_outputs(notebook) == []
    assert outside_loads(notebook) == []


def test_all_together_are_light() -> None:
    assert sum(path.stat().st_size for path in LESSONS) < TOTAL_LIMIT


@every_lesson
def test_outputs_are_those_of_the_code(path: Path) -> None:
    stale = stamps.stale_parts(notebooks.read(path))
    assert stale == [], "run `make notebooks` and commit the result"


@every_lesson
def test_figures_have_words(path: Path) -> None:
    assert undescribed_figures(notebooks.read(path)) == []


@every_lesson
def test_cells_are_short(path: Path) -> None:
    notebook = notebooks.read(path)
    for cell in long_cells(notebook, GOOD_LINES):
        warnings.warn(f"{path.name}: {cell}; cells should have {GOOD_LINES} lines at most", stacklevel=1)
    assert long_cells(notebook, MOST_LINES) == []


@every_lesson
def test_lesson_code_is_package_code(path: Path) -> None:
    cells = stamps.code_cells(notebooks.read(path))
    assert [fault for cell in cells for fault in unlike_the_package(cell)] == []


# --- the checks themselves --------------------------------------------------------------------------


def code(source: str, outputs: list[Any] | None = None, count: int | None = 1, **metadata: Any) -> Any:
    v4 = nbformat.v4
    return v4.new_code_cell(source, outputs=outputs or [], execution_count=count, metadata=metadata)


def book_of(*cells: Any) -> Any:
    return nbformat.v4.new_notebook(cells=list(cells))


PNG = nbformat.v4.new_output("display_data", {"image/png": "aGVsbG8="})


def test_unrun_and_failed_cells_are_seen() -> None:
    assert unrun_cells(book_of(code("1", count=2)))
    assert unrun_cells(book_of(code("1", count=None)))
    error = nbformat.v4.new_output("error", ename="KeyError", evalue="", traceback=[])
    assert bad_outputs(book_of(code("1", [error]))) == ["cell 0: KeyError"]
    assert bad_outputs(book_of(code("1", [error], tags=["raises-exception"]))) == []
    assert bad_outputs(book_of(code("1", [nbformat.v4.new_output("stream", name="stderr", text="Warning")])))


def test_figures_without_words_are_seen() -> None:
    described = {"image": {"alt": "Four windows."}, "figure": {"caption": "Windows."}}
    assert undescribed_figures(book_of(code("plot()", [PNG], mystnb=described))) == []
    assert len(undescribed_figures(book_of(code("plot()", [PNG])))) == 2
    html = nbformat.v4.new_output("display_data", {"text/html": "<img src='data:x'>"})
    assert len(undescribed_figures(book_of(code("plot()", [html])))) == 2


@pytest.mark.parametrize(
    "html", ['<script src="https://cdn.example/x.js"></script>', "<img alt='a' src='//x.example/a.png'>"]
)
def test_loads_from_other_hosts_are_seen(html: str) -> None:
    output = nbformat.v4.new_output("display_data", {"text/html": html})
    assert outside_loads(book_of(code("show()", [output])))


def test_a_retyped_function_must_be_the_package_s() -> None:
    text, tag = inspect.getsource(results.this_command), ["package:swin_lessons.results.this_command"]
    assert unlike_the_package(code(text, tags=tag)) == []
    assert (
        unlike_the_package(code(text.replace('"""', '"""Other words. ', 1) + "# a comment", tags=tag)) == []
    )
    assert unlike_the_package(code(text.replace('"__main__.py"', '"main.py"', 1), tags=tag))
    assert unlike_the_package(code("x = 1", tags=tag))


def test_a_decorated_function_is_sought_in_its_own_module() -> None:
    source, name = package_source("swin_lessons.training.precision.float32_products")  # a context manager
    assert definition(source, name) is not None


# --- stamps -----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small swin_lessons: `models` uses `models.windows`, `data` stands apart."""
    files = {
        "__init__.py": "",
        "models/__init__.py": "from .swin import build\n",
        "models/swin.py": "from swin_lessons.models import windows\n\n\ndef build():\n    return windows\n",
        "models/windows.py": '"""Windows."""\n\n\ndef cut(x):\n    """Cut."""\n    return x  # whole\n',
        "data/__init__.py": "N = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "swin_lessons" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


LESSON = book_of(code("%matplotlib inline\nfrom swin_lessons.models import build"), code("build()  # go"))


def test_the_stamp_covers_what_is_imported_and_no_more(package: Path) -> None:
    found = {
        path.relative_to(package / "swin_lessons").as_posix()
        for path in stamps.package_files(LESSON, package)
    }
    assert found == {"__init__.py", "models/__init__.py", "models/swin.py", "models/windows.py"}


def test_kernels_count_where_a_lesson_names_them(package: Path) -> None:
    """A model that could take them does not make every lesson stale when a kernel changes."""
    kernels = package / "swin_lessons" / "kernels"
    kernels.mkdir()
    (kernels / "__init__.py").write_text("from . import norm\n")
    (kernels / "norm.py").write_text("")
    (package / "swin_lessons" / "models" / "windows.py").write_text("import swin_lessons.kernels\n")
    direct = book_of(code("from swin_lessons.kernels import norm"))
    counted = {
        name: {path.parent.name + "/" + path.stem for path in stamps.package_files(lesson, package)}
        for name, lesson in (("by a model", LESSON), ("itself", direct))
    }
    assert counted["itself"] == {"swin_lessons/__init__", "kernels/__init__", "kernels/norm"}
    assert "kernels/norm" not in counted["by a model"]
    assert "models/windows" in counted["by a model"]


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("models/windows.py", "return x", "return -x", True),
        ("models/windows.py", "whole", "all of it", False),
        ("models/windows.py", '"""Cut."""', '"""Cut a map.\n\n    More words.\n    """', False),
        ("data/__init__.py", "1", "2", False),
    ],
)
def test_the_stamp_changes_with_the_code_alone(
    package: Path, file: str, old: str, new: str, changes: bool
) -> None:
    before = stamps.package_hash(LESSON, package)
    path = package / "swin_lessons" / file
    path.write_text(path.read_text().replace(old, new))
    assert (stamps.package_hash(LESSON, package) != before) == changes


def test_the_code_hash_ignores_comments_and_sees_code_and_magics() -> None:
    cells = ["%matplotlib inline\nx = '# no comment'", "y = 1  # one"]
    same = ["%matplotlib inline\nx = '# no comment'\n", "# word\ny = 1"]
    hashes = [stamps.code_hash(book_of(*map(code, sources))) for sources in (cells, same)]
    assert hashes[0] == hashes[1]
    for sources in (["%matplotlib agg\nx = '# no comment'", cells[1]], ["x = '# comment'", cells[1]]):
        assert stamps.code_hash(book_of(*map(code, sources))) != hashes[0]


# --- running and comparing --------------------------------------------------------------------------

DRAW = """import matplotlib.pyplot as plt
_ = plt.figure(figsize=(1, 1))
_ = plt.plot([0, {top}])
plt.show()"""


def write_lesson(path: Path, text: str, top: int) -> None:
    cells = [code(f"print({text!r}, object())", count=None), code(DRAW.format(top=top), count=None)]
    notebooks.write(book_of(*cells), path)


def test_run_then_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run repeats; another text and another picture are seen."""
    path = tmp_path / "01_demo.ipynb"
    write_lesson(path, "hello", top=1)
    assert notebooks.run(path, threads=1, timeout=60) == []
    stored = notebooks.read(path)
    assert unrun_cells(stored) == []
    assert stamps.stale_parts(stored) == []
    assert notebooks.check(path, threads=1, timeout=60) == []

    fresh = notebooks.read(path)
    fresh.cells[0].outputs[0].text = "hullo"
    fresh.cells[1].outputs[0].data["image/png"] = white_square()
    assert [line.split(":")[0] for line in notebooks.differences(stored, fresh)] == ["cell 0", "cell 1"]
    stored.cells[0].metadata.tags = stored.cells[1].metadata.tags = ["nbval-ignore-output"]
    assert notebooks.differences(stored, fresh) == []


def white_square() -> str:
    import base64
    import io

    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (80, 80), "white").save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def test_a_failed_run_leaves_the_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "01_demo.ipynb"
    notebooks.write(book_of(code("1 / 0", count=None)), path)
    before = path.read_bytes()
    assert notebooks.main(["run", str(path)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert path.read_bytes() == before
