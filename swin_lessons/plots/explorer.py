"""Figures to play with that need no kernel and no other file: data, a little JavaScript, and a picture for print.

One mechanism for all: `explorer` puts `js/core.js` (controls, maps of cells, words read out) and one small script of
its kind into an HTML figure. Without JavaScript, and in print, the picture stands in its place.
"""

import json
from html import escape
from importlib.resources import files
from typing import Any

from IPython.display import HTML

from .sliders import png_uri

PAGE = """<figure id="{id}" class="explorer-figure" style="margin: 1em 0">
<style>
#{id} .explorer, #{id}.ready > img {{ display: none }}
#{id}.ready .explorer {{ display: block }}
@media print {{ #{id}.ready .explorer {{ display: none }} #{id}.ready > img {{ display: block }} }}
</style>
<img src="{picture}" alt="{alt}" style="max-width: 100%; background: #fff">
<div class="explorer"></div>
<figcaption style="color: inherit; font-weight: normal; text-align: left">{caption}</figcaption>
<script type="application/json">{data}</script>
<script>(() => {{
"use strict";
{core}{script}explorer({name}, build);
}})();</script>
</figure>"""


def explorer(kind: str, data: dict[str, Any], *, id: str, picture: bytes, alt: str, caption: str) -> HTML:
    """An HTML figure that runs `js/KIND.js` on `data`.

    Args:
        kind: name of the script: its `build(data, ui)` makes controls and returns the function that draws.
        data: what the script gets; plain JSON types.
        id: a name of its own on the page: letters, digits, hyphens.
        picture: a PNG for print and for readers without JavaScript, as `sliders.picture` makes it.
        alt: what the picture shows, in words.
        caption: text under the figure; say there what to try.

    Raises:
        ValueError: an id that a page cannot have.
    """
    if not id.replace("-", "").isalnum() or not id[0].isalpha():
        raise ValueError(f"id={id!r}: use letters, digits and hyphens, a letter first")
    return HTML(
        PAGE.format(
            id=id,
            name=json.dumps(id),
            picture=png_uri(picture),
            alt=escape(alt),
            caption=escape(caption),
            data=json.dumps(data).replace("<", "\\u003c"),  # no text can end the script element
            core=script("core"),
            script=script(kind),
        )
    )


def script(name: str) -> str:
    """The JavaScript of that name, without comment lines."""
    lines = (files("swin_lessons.plots") / "js" / f"{name}.js").read_text(encoding="utf-8").splitlines()
    return "".join(f"{line}\n" for line in lines if not line.lstrip().startswith("//"))
