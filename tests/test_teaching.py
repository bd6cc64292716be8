"""The instructor's page agrees with the lessons: sections and exercises exist, and the plans add up."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")
PLANS = re.findall(r"^\| Starts .+\n\|[-|]+\n((?:\|.+\n)+)", PAGE, re.MULTILINE)


def lesson(number: int) -> str:
    """The words of a lesson; none where it is not written yet."""
    cells = [
        cell
        for path in (ROOT / "notebooks").glob(f"{number:02d}_*.ipynb")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def exercises(number: int) -> set[str]:
    return set(re.findall(r"^```\{exercise\} (.+)$", lesson(number), re.MULTILINE))


def rows(plan: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in plan.splitlines()]


def graded() -> dict[int, set[str]]:
    """The exercises in the table of grades, by lesson."""
    found: dict[int, set[str]] = {}
    for title, number in re.findall(r"^\| ([^|]+) \| (\d) \| \d+ \|", PAGE, re.MULTILINE):
        found.setdefault(int(number), set()).add(title)
    return found


def minutes(clock: str) -> int:
    hours, rest = clock.split(":")
    return 60 * int(hours) + int(rest)


def test_there_are_plans_for_three_hours_a_day_and_two_days() -> None:
    assert len(PLANS) == 4
    assert sum(int(row[1]) for row in rows(PLANS[0])) == 180


@pytest.mark.parametrize("plan", PLANS)
def test_each_part_starts_when_the_one_before_it_ends(plan: str) -> None:
    for (start, length, *_), (following, *_) in pairwise(rows(plan)):
        assert minutes(start) + int(length) == minutes(following)


@pytest.mark.parametrize("plan", PLANS)
def test_the_sections_of_a_plan_exist(plan: str) -> None:
    for *_, where in rows(plan):
        for number, sections in re.findall(r"(\d), § ([^;\[|]+)", where):
            titles = re.findall(r"^## (\d+)\. ", lesson(int(number)), re.MULTILINE)
            assert set(re.findall(r"\d+", sections)) <= set(titles) or not titles


@pytest.mark.parametrize("plan", PLANS)
def test_the_exercises_of_a_plan_exist(plan: str) -> None:
    known = {title for titles in graded().values() for title in titles}
    for line in plan.splitlines():
        if "xercise" in line:
            assert set(re.findall(r'"([^"]+)"', line)) - {"Run All Cells"} <= known


def test_every_exercise_of_a_written_lesson_can_be_graded() -> None:
    listed = graded()
    written = {number for number in listed if lesson(number)}
    assert written >= {1, 2, 3, 4}
    assert {n: listed[n] for n in written} == {n: exercises(n) for n in written}
