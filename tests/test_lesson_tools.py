"""New lessons and student copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import new_lesson  # noqa: E402
import notebooks  # noqa: E402
import student  # noqa: E402

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_student_copy_and_its_solutions_are_the_lesson(path: Path) -> None:
    lesson = notebooks.read(path)
    copy, taken = student.student_copy(lesson)
    assert student.restore(copy, taken) == {cell.id: cell.source for cell in lesson.cells}
    text = "\n".join(cell.source for cell in copy.cells)
    whole = "\n".join(cell.source for cell in lesson.cells)
    exercises = whole.count("```{exercise}")
    assert text.count("```{exercise}") == exercises >= 3
    assert "{solution" not in text
    inside, kept = False, {cell.id: cell.source for cell in copy.cells}
    for cell in lesson.cells:  # code outside solutions stays, code inside does not
        if cell.cell_type == "code":
            assert (kept.get(cell.id) == cell.source) == (not inside)
            assert (taken[cell.id] is None) == (not inside)
        else:
            starts, ends = (cell.source.count(f"{{solution-{word}}}") for word in ("start", "end"))
            inside = bool(inside + starts - ends)
    assert text.count(student.STUB) >= exercises - 1  # a solution may be all words
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in copy.cells)
    assert "swin_lessons" not in copy.metadata
    nbformat.validate(copy)


def lesson_of(*sources: str) -> notebooks.Notebook:
    """A notebook of these cells; those that begin with ">" are code."""
    v4 = nbformat.v4
    cells = [v4.new_code_cell(s[1:]) if s.startswith(">") else v4.new_markdown_cell(s) for s in sources]
    return v4.new_notebook(cells=cells)


START, END = "```{solution-start} ex-a\n:class: dropdown\n```", "```{solution-end}\n```"


def test_only_what_lies_in_a_solution_is_taken_out() -> None:
    lesson = lesson_of(
        "Before.", ">a = 1", f"{START}\n\nWords.", ">b = 2", ">c = 3", f"More.\n\n{END}\n\nAfter.", ">d = 4"
    )
    copy, taken = student.student_copy(lesson)
    assert [cell.source for cell in copy.cells] == ["Before.", "a = 1", student.STUB, "After.", "d = 4"]
    assert list(taken.values()) == [
        None,
        None,
        f"{START}\n\nWords.",
        "b = 2",
        "c = 3",
        lesson.cells[5].source,
        None,
    ]
    assert list(student.restore(copy, taken).values()) == [cell.source for cell in lesson.cells]


def test_a_solution_in_one_cell_leaves_the_text_around_it() -> None:
    copy, _ = student.student_copy(lesson_of(f"Before.\n\n{START}\n\nWords.\n\n{END}\n\nAfter."))
    assert [cell.source for cell in copy.cells] == ["Before.\n\nAfter."]


@pytest.mark.parametrize(
    ("source", "message"),
    [(START, "does not end"), (END, "ends before it starts"), (f"{START}\n{START}", "starts within another")],
)
def test_solutions_must_be_well_formed(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        student.student_copy(lesson_of(source))


def test_foreign_lost_and_changed_cells_are_found() -> None:
    lesson = lesson_of("Before.", ">a = 1", ">b = 2")
    copy, taken = student.student_copy(lesson)
    copy.cells[1].source = "a = 2"
    assert student.restore(copy, taken) != {cell.id: cell.source for cell in lesson.cells}
    lost = copy.cells.pop()
    with pytest.raises(ValueError, match=f"cells {lost.id} of the lesson are lost"):
        student.restore(copy, taken)
    copy.cells.append(nbformat.v4.new_code_cell("c = 3"))
    with pytest.raises(ValueError, match="are not from this lesson"):
        student.restore(copy, taken)


def test_student_copies_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert student.main(["--out", str(tmp_path), str(LESSONS[0])]) == 0
    assert (tmp_path / LESSONS[0].name).is_file()
    assert LESSONS[0].name in capsys.readouterr().out


def test_a_new_lesson_runs_and_has_the_anatomy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_lesson.main(["7", "Towards 3 B parameters!", "--folder", str(tmp_path)]) == 0
    path = tmp_path / "07_towards_3_b_parameters.ipynb"
    assert "make run N=7" in capsys.readouterr().out
    text = "\n".join(cell.source for cell in notebooks.read(path).cells)
    for part in (
        "Before you start",
        "Say it",
        "Predict it",
        "Code it",
        "Check it",
        "Measure it",
        "Three questions",
    ):
        assert part in text
    assert notebooks.run(path, threads=1, timeout=120) == []
    assert notebooks.verify_stamp(path, threads=1, timeout=120) == []
    copy, taken = student.student_copy(notebooks.read(path))
    assert student.restore(copy, taken)


def test_a_lesson_is_never_overwritten(tmp_path: Path) -> None:
    new_lesson.create(7, "First", tmp_path)
    with pytest.raises(FileExistsError, match=r"lesson 7 is .*07_first"):
        new_lesson.create(7, "Second", tmp_path)


@pytest.mark.parametrize(("number", "title"), [(0, "Zero"), (100, "Hundred"), (5, "42"), (5, "")])
def test_a_lesson_needs_a_number_and_words(tmp_path: Path, number: int, title: str) -> None:
    with pytest.raises(ValueError, match="use 1 to 99, and words"):
        new_lesson.create(number, title, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_is_wrong() -> None:
    command = [sys.executable, str(ROOT / "book" / "_ext" / "new_lesson.py"), "3", "Again"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "lesson 3 is" in run.stderr
