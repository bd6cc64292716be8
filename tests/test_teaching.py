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
WRITTEN = {1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13}


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
    for title, number in re.findall(r"^\| ([^|]+) \| (\d+) \| \d+ \|", PAGE, re.MULTILINE):
        found.setdefault(int(number), set()).add(title)
    return found


def sections(number: int) -> set[str]:
    """The numbers of a lesson's sections or, where it has parts, of its parts."""
    return set(re.findall(r"^## (?:Part )?(\d+)[.:] ", lesson(number), re.MULTILINE))


def table(heading: str) -> dict[int, list[str]]:
    """The cells behind the number of a lesson, in the table whose first line holds `heading`."""
    found = re.search(rf"^\| Lesson \|.*{heading}.*\n\|[-|]+\n((?:\|.+\n)+)", PAGE, re.MULTILINE)
    assert found, heading
    return {int(number): cells for number, *cells in rows(found[1])}


def entries(heading: str) -> list[tuple[str, str]]:
    """What a section of the page asks or names, each with the answer below it."""
    _, found = PAGE.split(f"\n### {heading}\n", 1)
    return re.findall(
        r"^(.+)\n: (.+)$", re.split(r"^##", found, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE
    )


def minutes(clock: str) -> int:
    hours, rest = clock.split(":")
    return 60 * int(hours) + int(rest)


def test_there_are_plans_for_three_hours_a_day_two_days_and_a_third() -> None:
    assert len(PLANS) == 5
    assert sum(int(row[1]) for row in rows(PLANS[0])) == 180
    assert [sum(int(row[1]) for row in rows(plan)) for plan in PLANS[1:]] == [465, 480, 480, 480]


def test_the_third_day_goes_through_the_lessons_on_speed_in_order() -> None:
    taught = [int(n) for n in re.findall(r"\| (\d+), (?:§|part)", PLANS[4])]
    assert taught == [8, 8, 9, 10, 10, 11, 12, 12, 13]


@pytest.mark.parametrize("plan", PLANS)
def test_each_part_starts_when_the_one_before_it_ends(plan: str) -> None:
    for (start, length, *_), (following, *_) in pairwise(rows(plan)):
        assert minutes(start) + int(length) == minutes(following)


@pytest.mark.parametrize("plan", PLANS)
def test_the_sections_of_a_plan_exist(plan: str) -> None:
    for *_, where in rows(plan):
        for number, named in re.findall(r"(\d+), (?:§|part) ([^;\[|]+)", where):
            assert set(re.findall(r"\d+", named)) <= sections(int(number))


@pytest.mark.parametrize("heading", ["Run", "Never cut", "Needs data"])
def test_the_sections_in_the_tables_of_lessons_exist(heading: str) -> None:
    for number, cells in table(heading).items():
        for cell in cells:
            for named in re.findall(r"[Ss]ections? (\d+(?:(?:, | and | to )\d+)*)", cell):
                assert set(re.findall(r"\d+", named)) <= sections(number), (number, cell)


def test_every_lesson_on_speed_has_its_goals_and_every_lesson_its_needs_questions_mistakes_and_cuts() -> None:
    assert set(table("By the end")) == set(table("Run")) == {8, 9, 10, 11, 12, 13}
    assert set(table("Needs data")) == set(table("Never cut")) == WRITTEN
    for number in WRITTEN:
        assert len(entries(f"Lesson {number}")) == 3
        assert len(entries(f"Lesson {number}: mistakes")) >= 4


@pytest.mark.parametrize("plan", PLANS)
def test_the_exercises_of_a_plan_exist(plan: str) -> None:
    known = {title for titles in graded().values() for title in titles}
    for line in plan.splitlines():
        if "xercise" in line:
            assert set(re.findall(r'"([^"]+)"', line)) - {"Run All Cells"} <= known


def test_every_exercise_of_a_written_lesson_can_be_graded() -> None:
    listed = graded()
    assert listed == {n: exercises(n) for n in WRITTEN}
