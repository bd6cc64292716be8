"""Pictures of tokens on their way to windows: which row comes from where, as a figure and to play with."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .explorer import explorer
from .programs import ink
from .sliders import picture
from .style import BLACK, CYCLE, GREY, bare

Size = tuple[int, int]
CAPTION = (
    "Pick a token on the map, or a row below it: by a click, or with the arrows once a map has the focus. The line "
    "under the maps is the arithmetic of the kernel. Change the shift, and look where padding goes."
)
ALT = "Left: a padded map in the colours of its windows. Right: rows in window order, with the tokens that they hold."


def places(size: Size, window: Size, shift: Size) -> tuple[np.ndarray, np.ndarray]:
    """For each row in window order the place on the padded map: y and x, each `(windows, N)`."""
    (H, W), (h, w), (dy, dx) = size, window, shift
    down, across = -(-H // h), -(-W // w)
    row = np.arange(down * across * h * w)
    number, token = row // (h * w), row % (h * w)
    y = (number // across * h + token // w + dy) % (down * h)
    x = (number % across * w + token % w + dx) % (across * w)
    return y.reshape(-1, h * w), x.reshape(-1, h * w)


def _cell(ax: Axes, i: int, j: int, window: int, text: str) -> None:
    style: dict[str, Any] = (
        {"facecolor": CYCLE[window % len(CYCLE)]} if text else {"facecolor": "#eeeeee", "hatch": "////"}
    )
    ax.add_patch(Rectangle((j, i), 1, 1, edgecolor="white" if text else GREY, linewidth=0.8, **style))
    ax.text(
        j + 0.5, i + 0.52, text, ha="center", va="center", color=ink(CYCLE[window % len(CYCLE)]), fontsize=6.5
    )


def show_rows(size: Size, window: Size, shift: Size) -> Figure:
    """The padded map and the rows in window order; both carry the number of the token and the window's colour."""
    (H, W), (y, x) = size, places(size, window, shift)
    (windows, N), height = y.shape, y.max() + 1
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.5), width_ratios=(x.max() + 1, N))
    for i in range(windows):
        for j in range(N):
            a, b = y[i, j], x[i, j]
            text = str(a * W + b) if a < H and b < W else ""
            _cell(left, a, b, i, text)
            _cell(right, i, j, i, text)
    left.add_patch(Rectangle((0, 0), W, H, fill=False, edgecolor=BLACK, linewidth=1.6))
    bare(left, f"the map, {H} × {W}, padded").set(xlim=(-0.1, x.max() + 1.1), ylim=(height + 0.1, -0.1))
    bare(right, "rows in window order, a line a window").set(xlim=(-0.1, N + 0.1), ylim=(windows + 0.1, -0.1))
    left.set_aspect("equal")
    return figure


def rows_explorer(
    size: Size = (6, 9), window: int = 4, shift: int = 2, *, start: int = 37, id: str = "explore-rows"
) -> HTML:
    """Rows in window order and tokens on the map, with the arithmetic between them.

    Args:
        size: rows and columns of the map.
        window: tokens on a side of a window.
        shift: shown first, less than `window`.
        start: the row picked first.
        id: of the figure, its own on a page.

    Raises:
        ValueError: a shift or a row that does not exist.
    """
    rows = places(size, (window, window), (shift, shift))[0].size
    if not 0 <= shift < window or not 0 <= start < rows:
        raise ValueError(f"shift={shift}, start={start}: use 0 to {window - 1}, and 0 to {rows - 1}")
    drawn = picture(show_rows(size, (window, window), (shift, shift)))
    data = {"size": list(size), "window": window, "shift": shift, "start": start}
    return explorer("rows", data, id=id, picture=drawn, alt=ALT, caption=CAPTION)
