"""The reference pages: everything public is named there and described, and docstrings become proper Markdown."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import swin_lessons

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import api  # noqa: E402

PAGES = sorted((ROOT / "book" / "reference").glob("*.md"))
LISTED = [
    name for page in PAGES for name in re.findall(r"^```\{api\} (\S+)$", page.read_text(), re.MULTILINE)
]
MODULES = [module.__name__ for name in LISTED for module in api.documented_modules(name)]


def test_every_part_of_the_package_has_a_page() -> None:
    parts = {
        f"swin_lessons.{m.name}" for m in pkgutil.iter_modules(swin_lessons.__path__) if m.name != "__main__"
    }
    assert parts - {*LISTED, "swin_lessons.cli"} == set()
    assert "```{commands}" in (ROOT / "book" / "reference" / "command.md").read_text()


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_is_described(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert api.public_names(module)
    for public in api.public_names(module):
        described = getattr(module, public).__doc__ or ""
        assert described.strip(), f"{name}.{public} has no docstring"
        assert not described.startswith(f"{public}("), (
            f"{name}.{public} has the docstring that dataclass makes"
        )


@pytest.mark.parametrize("name", MODULES)
def test_sources_are_where_the_links_say(name: str) -> None:
    module = importlib.import_module(name)
    for public in api.public_names(module):
        value = getattr(module, public)
        path, _, line = api.source(value).partition("#L")
        first = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(r"@|def |class ", first), f"{name}.{public}: {path} line {line} is {first!r}"


def test_a_package_without_a_list_stands_for_its_modules() -> None:
    names = [module.__name__ for module in api.documented_modules("swin_lessons.plots")]
    assert "swin_lessons.plots.windows" in names
    assert "show_shift" in api.public_names(importlib.import_module("swin_lessons.plots.windows"))


def test_what_a_module_imports_is_not_its_own() -> None:
    module = importlib.import_module("swin_lessons.runtime")
    assert api.public_names(module) == ["profile", "by_profile", "keep_freed_memory"]


def test_sections_become_lists() -> None:
    text = """Do it.

    Args:
        a, b: two numbers,
            or none.
        **rest: more.

    Returns:
        their sum.

    Raises:
        ValueError: a text.
    """
    assert api.docstring_markdown(text) == inspect.cleandoc(
        """Do it.

        **Arguments**

        - `a`, `b`: two numbers,
            or none.
        - `**rest`: more.

        **Returns** their sum.

        **Raises**

        - `ValueError`: a text."""
    )


def test_examples_become_code() -> None:
    assert api.docstring_markdown("One.\n\n>>> 1 + 1\n2") == "One.\n\n```python\n>>> 1 + 1\n2\n```"


def test_a_colon_in_a_sentence_makes_no_entry() -> None:
    assert api.section("Arguments", "a: one of two: x or y.\n    Note: z.") == (
        "**Arguments**\n\n- `a`: one of two: x or y.\n    Note: z."
    )


class Example:
    """Something with members."""

    def said(self, word: str) -> str:
        """Describes itself."""
        return word

    def unsaid(self) -> None: ...

    @property
    def size(self) -> int:
        """How large."""
        return 1

    @classmethod
    def made(cls, size: int = 1) -> Example:
        """Made from a size."""
        return cls()


def test_members_are_those_with_words_and_lack_self() -> None:
    members = api.public_members(Example)
    assert list(members) == ["said", "size", "made"]
    assert "{py:method} said(word: str) -> str\n" in api.member_markdown("said", members["said"])
    assert "{py:method} made(size: int = 1)" in api.member_markdown("made", members["made"])
    assert "{py:property} size\n" in api.member_markdown("size", members["size"])


@dataclass
class Described:
    """A data class."""

    size: int  # in px
    names: list[str] = field(default_factory=list)  # one a class
    plain: bool = False


def test_the_comments_of_fields_describe_them() -> None:
    assert api.fields_markdown(Described) == "**Attributes**\n\n- `size`: in px\n- `names`: one a class"
    assert api.fields_markdown(Example) == ""


def test_a_class_returns_nothing_and_hides_its_factories() -> None:
    assert api.signature_text(Described) == "(size: int, names: list[str] = ..., plain: bool = False)"


def test_a_second_name_points_to_the_first() -> None:
    data = importlib.import_module("swin_lessons.data")
    assert "Another name of `LoaderBatches`" in api.name_markdown(data, "loader_batches", "")


def test_a_help_page_is_what_the_command_prints() -> None:
    page = api.help_page("train")
    assert page.startswith("usage: swin-lessons train")
    assert "--resume" in page
    assert max(map(len, page.splitlines())) <= 100
