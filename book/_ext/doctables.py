"""Small helpers that make docutils tables from rows of cells."""

from __future__ import annotations

from collections.abc import Sequence

from docutils import nodes

Cell = list[nodes.Node]


def text_cell(text: str) -> Cell:
    return [nodes.paragraph("", text)]


def _row(cells: Sequence[Cell]) -> nodes.row:
    return nodes.row("", *[nodes.entry("", *cell) for cell in cells])


def table_node(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], classes: Sequence[str] = ()
) -> nodes.table:
    """A table with a head row; `classes` go to the table element."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    group += nodes.thead("", _row([text_cell(text) for text in header]))
    group += nodes.tbody("", *[_row(cells) for cells in rows])
    table = nodes.table("", group)
    table["classes"] += ["colwidths-auto", *classes]
    return table
