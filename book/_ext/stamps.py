"""Which code made the outputs of a notebook: hashes kept in its metadata, and whether they still hold.

The stamp, under `swin_lessons` in a notebook's metadata:

    code_hash      of its code cells, without comments
    package_hash   of the modules of swin_lessons that it imports, directly or through others, without
                   comments and docstrings: an edit elsewhere, or of words alone, asks for no new run
    versions, date, seconds
"""

from __future__ import annotations

import ast
import hashlib
import io
import platform
import tokenize
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "swin_lessons"
ON_REQUEST = f"{PACKAGE}.kernels"

Notebook = Any  # nbformat.NotebookNode


def without_words(source: str) -> str:
    """Python source without comments, docstrings and blank lines: the part that can change an output."""
    lines = source.splitlines(keepends=True)
    for start, end in sorted(set(_comments(source)) | set(_docstrings(source)), reverse=True):
        (row, column), (last, stop) = start, end
        lines[row - 1 : last] = [lines[row - 1][:column] + lines[last - 1][stop:]]
    return "\n".join(line.rstrip() for line in "".join(lines).splitlines() if line.strip())


Span = tuple[tuple[int, int], tuple[int, int]]  # (row from 1, column), start and end


def _comments(source: str) -> Iterator[Span]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end


def _docstrings(source: str) -> Iterator[Span]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                yield _span(first, source)


def _span(node: ast.expr | ast.stmt, source: str) -> Span:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines()

    def column(row: int, offset: int) -> int:  # ast counts bytes, we cut characters
        return len(lines[row - 1].encode()[:offset].decode())

    first, last = node.lineno, node.end_lineno
    return (first, column(first, node.col_offset)), (last, column(last, node.end_col_offset))


def python_part(source: str) -> str:
    """A cell without its IPython lines (`%magic`, `!shell`), which Python cannot parse."""
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))


def code_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def code_hash(notebook: Notebook) -> str:
    def words_off(source: str) -> str:
        magics = [line for line in source.splitlines() if line.lstrip().startswith(("%", "!"))]
        return "\n".join([*magics, without_words(python_part(source))])

    return _hash([words_off(cell.source) for cell in code_cells(notebook)])


def imported_modules(source: str, module: str = "", is_package: bool = False) -> set[str]:
    """Dotted names of swin_lessons that `source` may import; `module`: its own name, for relative ones."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # import_module("swin_lessons.x"), lazy tables of names
    return {name for name in found if name == PACKAGE or name.startswith(f"{PACKAGE}.")}


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def module_file(name: str, root: Path = ROOT) -> Path | None:
    """The file of a module, or None where the dotted name is that of a function or class."""
    path = root.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_name(path.name + ".py")):
        if file.is_file():
            return file
    return None


def package_files(notebook: Notebook, root: Path = ROOT) -> list[Path]:
    """The files of swin_lessons that the notebook imports, itself or through others, with their parents.

    Models take fused kernels on request alone: they count for a lesson that names them itself.
    """
    waiting: set[str] = set()
    for cell in code_cells(notebook):
        waiting |= imported_modules(python_part(cell.source))
    files: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = module_file(name, root)
        if name in files or file is None:
            continue
        files[name] = file
        named = imported_modules(file.read_text(encoding="utf-8"), name, file.name == "__init__.py")
        waiting |= {n for n in named if name.startswith(ON_REQUEST) or not n.startswith(ON_REQUEST)}
        if "." in name:
            waiting.add(name.rpartition(".")[0])
    return sorted(files.values())


def package_hash(notebook: Notebook, root: Path = ROOT) -> str:
    parts: list[str] = []
    for file in package_files(notebook, root):
        parts += [file.relative_to(root).as_posix(), without_words(file.read_text(encoding="utf-8"))]
    return _hash(parts)


def stamp(notebook: Notebook, seconds: float) -> dict[str, Any]:
    names = ("torch", "numpy", "matplotlib")
    return {
        "code_hash": code_hash(notebook),
        "package_hash": package_hash(notebook),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds),
    }


def stale_parts(notebook: Notebook) -> list[str]:
    """What has changed since the outputs were made: some of "never run", "its code", "the package"."""
    stored = notebook.metadata.get(PACKAGE, {})
    if "code_hash" not in stored:
        return ["never run"]
    changed = []
    if stored["code_hash"] != code_hash(notebook):
        changed.append("its code")
    if stored["package_hash"] != package_hash(notebook):
        changed.append("the package")
    return changed
