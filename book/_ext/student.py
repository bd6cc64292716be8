"""Student copies of the lessons: without solutions and outputs, with a place for one's own code.

    python book/_ext/student.py [--out FOLDER] [NOTEBOOK ...]      default: all lessons, into _build/student

What is taken out of a lesson puts it together again: `restore(*student_copy(lesson))` has the lesson's cells.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from pathlib import Path

from notebooks import read, write
from stamps import ROOT, Notebook

STUB = "# Your code here."
START = re.compile(r"```\{solution-start\}.*?\n```[ \t]*\n?", re.DOTALL)
END = re.compile(r"```\{solution-end\}\n```[ \t]*\n?")

Taken = dict[
    str, str | None
]  # the lesson's cells in order: id, and the source where the copy has another or none


def student_copy(lesson: Notebook) -> tuple[Notebook, Taken]:
    """The copy, and what was taken out of it.

    Raises:
        ValueError: a solution that does not end, or ends before it starts.
    """
    student = copy.deepcopy(lesson)
    student.cells, inside = [], False
    for cell in copy.deepcopy(lesson.cells):
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
            if inside:
                cell.source = STUB
        else:
            cell.source, inside = outside(cell.source, inside)
        if cell.source.strip() and not is_second_stub(cell, student.cells):
            student.cells.append(cell)
    if inside:
        raise ValueError("a solution starts and does not end: add {solution-end}")
    student.metadata.pop("swin_lessons", None)  # the stamp belongs to the lesson's outputs
    kept = {cell.id: cell.source for cell in student.cells}
    return student, {c.id: None if kept.get(c.id) == c.source else c.source for c in lesson.cells}


def outside(text: str, inside: bool) -> tuple[str, bool]:
    """The part of a text that is in no solution, and whether a solution goes on after it."""
    kept = []
    while text:
        pattern, other = (END, START) if inside else (START, END)
        mark, wrong = pattern.search(text), other.search(text)
        if wrong and (mark is None or wrong.start() < mark.start()):
            fault = "starts within another" if inside else "ends before it starts"
            raise ValueError(f"a solution {fault}: {text[:60]!r}")
        if not inside:
            kept.append(text[: mark.start()] if mark else text)
        text, inside = (text[mark.end() :], not inside) if mark else ("", inside)
    return re.sub(r"\n{3,}", "\n\n", "".join(kept)).strip("\n"), inside


def is_second_stub(cell: Notebook, before: list[Notebook]) -> bool:
    """A solution of several cells becomes one stub."""
    return cell.source == STUB and bool(before) and before[-1].source == STUB


def restore(student: Notebook, taken: Taken) -> dict[str, str]:
    """The lesson's cells, id and source in order: those of the copy, and where these were changed, what was taken out.

    Raises:
        ValueError: a cell of the copy is not the lesson's, or one of the lesson is lost.
    """
    kept = {cell.id: cell.source for cell in student.cells}
    if foreign := sorted(kept.keys() - taken.keys()):
        raise ValueError(f"cells {', '.join(foreign)} are not from this lesson")
    if lost := [id for id, source in taken.items() if source is None and id not in kept]:
        raise ValueError(f"cells {', '.join(lost)} of the lesson are lost")
    return {id: kept[id] if source is None else source for id, source in taken.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "student")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        write(student_copy(read(path))[0], args.out / path.name)
        print(args.out / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
