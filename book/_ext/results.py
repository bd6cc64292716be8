"""Sphinx extension: measured numbers from `book/results/*.json`, never typed by hand.

    {result}`fashion_mnist.best.test_accuracy|.1%`     one number; the part after | is a Python format
    ```{results-table} bench.rows                      a list of objects, a row each
    :columns: model, ours|.1f, timm|.1f
    :headers: Model, Ours (images/s), timm (images/s)
    :caption: Throughput at batch 1.
    :where: batch = 1, dtype = fp16                which rows; a value stands as str() writes it
    ```
    ```{provenance} bench                              where the numbers of a file come from
    ```

A path is the file's name (folders with /), then keys and list positions with dots. A key that is not there,
or a value that the format does not take, is a warning, and so an error of the build.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from doctables import table_node, text_cell
from swin_lessons.results import load_result

logger = logging.getLogger(__name__)


def read(env: BuildEnvironment, name: str) -> dict[str, Any]:
    path = Path(env.srcdir) / env.config.results_folder / f"{name}.json"
    env.note_dependency(str(path))
    try:
        return load_result(path)
    except FileNotFoundError:
        raise LookupError(f"no results file {env.config.results_folder}/{name}.json") from None


def step(value: Any, key: str, path: str) -> Any:
    """One key (or list position) down. Raises LookupError with what there is instead."""
    try:
        return value[int(key)] if isinstance(value, list) else value[key]
    except (LookupError, ValueError, TypeError):
        there = sorted(value) if isinstance(value, dict) else f"{type(value).__name__} of {value!r:.60}"
        raise LookupError(f"{path!r}: no {key!r}; there is {there}") from None


def look_up(env: BuildEnvironment, path: str) -> tuple[Any, dict[str, Any]]:
    """The value at `path` and the provenance of its file."""
    name, *keys = path.split(".")
    result = value = read(env, name)
    for key in keys:
        value = step(value, key, path)
    return value, result["provenance"]


def show(value: Any, spec: str) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float) and not spec:
        raise ValueError(f"{value!r} needs a format, such as |.1f")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    if isinstance(value, (dict, list)):
        raise ValueError("the path ends at a group of values, name one of them")
    return format(value, spec)


def split_format(text: str) -> tuple[str, str]:
    path, _, spec = text.partition("|")
    return path.strip(), spec.strip()


def origin(provenance: dict[str, Any]) -> str:
    """The origin of a number in one sentence."""
    hardware, versions = provenance["hardware"], provenance["versions"]
    device = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"
    return (
        f"Measured {provenance['date'][:10]} on {device}; PyTorch {versions['torch']}, "
        f"Python {versions['python']}; commit {provenance['commit']}"
    )


def origin_paragraph(provenance: dict[str, Any]) -> nodes.paragraph:
    command = nodes.literal("", provenance["command"])
    return nodes.paragraph("", "", nodes.Text(origin(provenance) + "; "), command, classes=["provenance"])


class Result(SphinxRole):
    """The number, with its origin as a tooltip."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        path, spec = split_format(self.text)
        try:
            value, provenance = look_up(self.env, path)
            text = show(value, spec)
        except (LookupError, ValueError) as error:
            logger.warning("result %s: %s", self.text, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        return [nodes.abbreviation(text, text, explanation=origin(provenance), classes=["result"])], []


class ResultsTable(SphinxDirective):
    """A table of a list of objects, or of an object of objects (column `@key` is then the outer key)."""

    required_arguments = 1
    option_spec: ClassVar = {
        "columns": directives.unchanged_required,
        "headers": directives.unchanged,
        "caption": directives.unchanged,
        "name": directives.unchanged,
        "where": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        try:
            return self.build()
        except (LookupError, ValueError) as error:
            logger.warning("results-table %s: %s", self.arguments[0], error, location=self.get_location())
            return []

    def columns(self) -> list[tuple[str, str]]:
        if "columns" not in self.options:
            raise ValueError("name the columns: `:columns: key, key|format, ...`")
        return [split_format(column) for column in re.split(r",\s+", self.options["columns"])]

    def headers(self, columns: list[tuple[str, str]]) -> list[str]:
        if "headers" not in self.options:
            return [key for key, _ in columns]
        headers = [header.strip() for header in self.options["headers"].split(",")]
        if len(headers) != len(columns):
            raise ValueError(f"{len(headers)} headers for {len(columns)} columns")
        return headers

    def build(self) -> list[nodes.Node]:
        value, provenance = look_up(self.env, self.arguments[0])
        columns = self.columns()
        rows = [self.row(item, columns) for item in chosen(items(value), self.options.get("where", ""))]
        table = table_node(self.headers(columns), rows, classes=["results"])
        if caption := self.options.get("caption"):
            children, _ = self.parse_inline(caption)
            table.insert(0, nodes.title(caption, "", *children))
        self.add_name(table)
        return [table, origin_paragraph(provenance)]

    def row(self, item: dict[str, Any], columns: list[tuple[str, str]]) -> list[list[nodes.Node]]:
        cells = []
        for key, spec in columns:
            value: Any = item
            for part in key.split("."):
                value = step(value, part, key)
            cells.append(text_cell(show(value, spec)))
        return cells


def items(value: Any) -> list[dict[str, Any]]:
    """The rows of a table: a list of objects, or an object of objects, each told its own key."""
    if isinstance(value, dict):
        value = [{"@key": key, **item} for key, item in value.items() if isinstance(item, dict)]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError("the path must end at a list of objects or an object of objects")
    return value


def chosen(rows: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Those rows whose values are all as `where` says: `key = value, key = value`; it must leave some."""
    wanted = [[part.strip() for part in condition.split("=")] for condition in where.split(",") if condition]
    for pair in wanted:
        if len(pair) != 2:
            raise ValueError(f":where: {where!r}: write `key = value, key = value`")
    rows = [row for row in rows if all(str(step(row, key, key)) == value for key, value in wanted)]
    if not rows:
        raise ValueError(f":where: {where!r} leaves no row")
    return rows


class Provenance(SphinxDirective):
    """The origin of all the numbers of one file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        try:
            return [origin_paragraph(read(self.env, self.arguments[0])["provenance"])]
        except (LookupError, ValueError) as error:
            logger.warning("provenance %s: %s", self.arguments[0], error, location=self.get_location())
            return []


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("results_folder", "book/results", "env")
    app.add_role("result", Result())
    app.add_directive("results-table", ResultsTable)
    app.add_directive("provenance", Provenance)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
