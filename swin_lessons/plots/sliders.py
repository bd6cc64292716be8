"""A slider over frames drawn beforehand. It needs no kernel and no other file: it works on a page opened from disk.

Without JavaScript, and in print, the first frame and the caption are there and the control is not.
"""

import base64
import io
import json
from collections.abc import Sequence
from html import escape

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.figure import Figure

PAGE = """<figure id="{id}" class="frame-slider" style="margin: 1em 0">
<img src="{src}" alt="{alt}" style="max-width: 100%; background: #fff">
<div hidden style="flex-wrap: wrap; gap: 0.25em 1em; align-items: center">
<button type="button" class="btn btn-sm btn-outline-primary">Play</button>
<label for="{id}-frame">{name}</label>
<input id="{id}-frame" type="range" min="0" max="{last}" value="0" style="flex: 1 1 12em; max-width: 24em">
<output for="{id}-frame">{label}</output>
</div>
<figcaption style="color: inherit; font-weight: normal; text-align: left">{caption}</figcaption>
<script type="application/json">{data}</script>
<script>{script}</script>
</figure>"""

SCRIPT = """(() => {
  const figure = document.getElementById("ID");
  const find = (selector) => figure.querySelector(selector);
  const [image, bar, play, range, output] = ["img", "div", "button", "input", "output"].map(find);
  const frames = JSON.parse(find("script").textContent);
  const show = () => {
    const frame = frames[Number(range.value)];
    image.src = frame.src;
    image.alt = frame.alt;
    output.textContent = frame.label;
    range.setAttribute("aria-valuetext", frame.label);
  };
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const step = () => {
    range.value = (Number(range.value) + 1) % frames.length;
    show();
    if (Number(range.value) === frames.length - 1) stop();
  };
  play.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "Pause";
    step();
    timer = setInterval(step, 700);
  });
  range.addEventListener("input", () => { stop(); show(); });
  range.addEventListener("keydown", (event) => event.stopPropagation()); // JupyterLab would take the arrows
  bar.hidden = false;
  bar.style.display = "flex";
  show();
})();"""


def picture(figure: Figure, dpi: int = 80, colours: int = 64) -> bytes:
    """Draw and close a figure: a PNG with few colours, and the same bytes for the same drawing."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
    plt.close(figure)
    small = io.BytesIO()
    image = Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    image.save(small, "PNG", optimize=True)
    return small.getvalue()


def png_uri(png: bytes) -> str:
    """A PNG as an address that holds its bytes."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def png_of(image: np.ndarray, colours: int = 64) -> bytes:
    """An image `(H, W, 3)` of uint8 or of 0 to 1 as a small PNG, one pixel a pixel."""
    from PIL import Image

    if image.dtype != np.uint8:
        image = (255 * image.clip(0, 1)).round().astype(np.uint8)
    small = io.BytesIO()
    Image.fromarray(image).quantize(colours, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def frame_slider(
    frames: Sequence[bytes], labels: Sequence[str], alts: Sequence[str], *, id: str, name: str, caption: str
) -> HTML:
    """An HTML figure whose native range input chooses a frame.

    Args:
        frames: PNG files, as `picture` makes them.
        labels: what the control says beside each frame.
        alts: what each frame shows, in words.
        id: a name of its own on the page: letters, digits, hyphens.
        name: what the control chooses.
        caption: text under the figure.
    """
    if not len(frames) == len(labels) == len(alts) > 0:
        raise ValueError(
            f"{len(frames)} frames, {len(labels)} labels, {len(alts)} alts: give one of each a frame"
        )
    sources = [png_uri(frame) for frame in frames]
    data = [{"src": s, "label": t, "alt": a} for s, t, a in zip(sources, labels, alts, strict=True)]
    page = PAGE.format(
        id=escape(id),
        src=sources[0],
        alt=escape(alts[0]),
        name=escape(name),
        last=len(frames) - 1,
        label=escape(labels[0]),
        caption=escape(caption),
        data=json.dumps(data).replace("<", "\\u003c"),  # no text can end the script element
        script=SCRIPT.replace("ID", json.dumps(id)[1:-1]),
    )
    return HTML(page)
