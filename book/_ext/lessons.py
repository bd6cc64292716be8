"""Sphinx extension: how long the notebooks took when they were last run.

`{lessons}` lists them all with their minutes; {run-time}`this page` within a lesson says its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from doctables import Cell, table_node, text_cell


def title(notebook: dict[str, Any]) -> str:
    """The first heading of a notebook."""
    for cell in notebook["cells"]:
        for line in "".join(cell["source"]).splitlines():
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line[2:].strip()
    return "Untitled"


def minutes(notebook: dict[str, Any]) -> str:
    seconds = notebook["metadata"].get("swin_lessons", {}).get("seconds")
    if seconds is None:
        return "not run yet"
    return "under 1" if seconds < 60 else f"{seconds / 60:.0f}"


def run_time(notebook: dict[str, Any]) -> str:
    """ "51 seconds", or "3.8 minutes" from two minutes on."""
    seconds = notebook["metadata"].get("swin_lessons", {}).get("seconds")
    if seconds is None:
        return "a time not yet measured"
    return f"{seconds} seconds" if seconds < 120 else f"{seconds / 60:.1f} minutes"


class RunTime(SphinxRole):
    """The time of the lesson that it stands in."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        path = Path(self.env.doc2path(self.env.docname))
        return [nodes.Text(run_time(json.loads(path.read_text(encoding="utf-8"))))], []


def link(docname: str, text: str) -> Cell:
    reference = addnodes.pending_xref(
        "", nodes.inline("", text), refdomain="std", reftype="doc", reftarget=f"/{docname}", refexplicit=True
    )
    return [nodes.paragraph("", "", reference)]


class Lessons(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        folder = Path(self.env.srcdir) / "notebooks"
        rows = [self.row(path) for path in sorted(folder.glob("[0-9]*.ipynb"))]
        if not rows:
            return [nodes.paragraph("", "The first lessons are being written.")]
        return [table_node(["Lesson", "Title", "Minutes"], rows)]

    def row(self, path: Path) -> list[Cell]:
        self.env.note_dependency(str(path))
        notebook = json.loads(path.read_text(encoding="utf-8"))
        number = str(int(path.stem.split("_")[0]))
        return [
            text_cell(number),
            link(f"notebooks/{path.stem}", title(notebook)),
            text_cell(minutes(notebook)),
        ]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("lessons", Lessons)
    app.add_role("run-time", RunTime())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
