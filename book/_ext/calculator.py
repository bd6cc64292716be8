"""Sphinx extension: `{scaling-calculator}` is the calculator of `swin_lessons.plots.scaling_explorer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
MADE_OF = ("plots/scaling_explorer.py", "plots/js/scaling.js", "plots/js/core.js", "training/scaling.py")


class ScalingCalculator(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        from swin_lessons.plots.scaling_explorer import scaling_explorer
        from swin_lessons.plots.style import use_style

        for name in MADE_OF:
            self.env.note_dependency(str(ROOT / "swin_lessons" / name))
        use_style()
        return [nodes.raw("", scaling_explorer().data, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("scaling-calculator", ScalingCalculator)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
