"""Sphinx extension: `{lessons}` lists the notebooks with the minutes that their last run took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

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
    return {"parallel_read_safe": True, "parallel_write_safe": True}
