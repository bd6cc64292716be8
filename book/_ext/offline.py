"""Sphinx extension: pages that need no other host, and the list of the third-party scripts they carry."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import vendor
from doctables import Cell, table_node, text_cell


def _script_key(script: Any) -> tuple[str, str]:
    attributes = getattr(script, "attributes", None) or {}
    return str(getattr(script, "filename", script) or ""), attributes.get("body") or ""


def keep_own_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Drop sphinx-thebe, which calls other hosts, and the second copy of each inline script."""
    kept: dict[tuple[str, str], Any] = {}
    for script in context.get("script_files", []):
        key = _script_key(script)
        if "thebe" not in "".join(key).lower():
            kept.setdefault(key, script)
    context["script_files"][:] = kept.values()
    styles = context.get("css_files", [])
    styles[:] = [style for style in styles if "thebe" not in str(getattr(style, "filename", style))]


def license_cell(package: vendor.Package) -> Cell:
    """The licence's name, linked to its text. The page that lists them lies one folder below the root."""
    text = next(dest for source, dest in package.files if source.startswith("LICENSE"))
    return [nodes.paragraph("", "", nodes.reference("", package.license, refuri=f"../vendor/{text}"))]


class Vendored(SphinxDirective):
    """`{third-party}`: a table of the fetched packages, from the list that fetches them."""

    def run(self) -> list[nodes.Node]:
        rows = [
            [text_cell(p.name), text_cell(p.version), license_cell(p), text_cell(p.purpose)]
            for p in vendor.PACKAGES
        ]
        return [table_node(["Package", "Version", "Licence", "What it does here"], rows)]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", keep_own_scripts, priority=900)  # after the theme has added its own
    app.add_directive("third-party", Vendored)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
