"""Pictures of windows: where they cut, how the shift moves the cuts, who may attend to whom.

Images are numpy arrays `(H, W, 3)`; windows and shifts are given in px of the image, as (rows, columns).
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from .style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, bare

Size = tuple[int, int]
KIND_COLOURS = ("#ffffff", ORANGE, BLUE, PURPLE)  # inside, right, bottom, corner
SIDE_COLOURS = (
    "#dddddd",
    SKY,
    "#f0e442",
    GREEN,
)  # of the tokens: neither, columns, rows, both wrapped around
KIND_NAMES = ("inside", "right edge", "bottom edge", "corner")


def draw_cuts(ax: Axes, size: Size, window: Size, shift: Size = (0, 0), colour: str = "white") -> None:
    """Lines between windows on an image of `size`; `shift` moves them down and to the right."""
    (H, W), (h, w), (dy, dx) = size, window, shift
    ax.hlines(np.arange(dy % h or h, H, h) - 0.5, -0.5, W - 0.5, color=colour, linewidth=1.6)
    ax.vlines(np.arange(dx % w or w, W, w) - 0.5, -0.5, H - 0.5, color=colour, linewidth=1.6)


def draw_seam(ax: Axes, size: Size, shift: Size, colour: str = "white") -> None:
    """Dashed lines where the opposite edges of a rolled image meet."""
    (H, W), (dy, dx) = size, shift
    style: dict[str, Any] = {"color": colour, "linewidth": 2.0, "linestyle": (0, (3, 2))}
    if dy:
        ax.hlines(H - dy - 0.5, -0.5, W - 0.5, **style)
    if dx:
        ax.vlines(W - dx - 0.5, -0.5, H - 0.5, **style)


def window_kinds(size: Size, window: Size, shift: Size) -> np.ndarray:
    """For each pixel of a rolled image the kind of its window: 0 inside, 1 right, 2 bottom, 3 corner."""
    (H, W), (h, w), (dy, dx) = size, window, shift
    bottom = (np.arange(H) >= H - h) & (dy > 0)
    right = (np.arange(W) >= W - w) & (dx > 0)
    return 2 * bottom[:, None] + right[None, :]


def tint_kinds(ax: Axes, kinds: np.ndarray) -> None:
    """Lay the colours of the kinds over an image; windows inside stay clear."""
    ax.imshow(np.ma.masked_equal(kinds, 0), cmap=ListedColormap(KIND_COLOURS), vmin=0, vmax=3, alpha=0.45)


def show_shift(image: np.ndarray, window: Size, shift: Size) -> Figure:
    """Regular windows, shifted windows, and the rolled image that makes shifted windows regular."""
    size = image.shape[:2]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7.4, 2.7))
    bare(left, "regular windows").imshow(image)
    draw_cuts(left, size, window)
    bare(middle, "shifted windows").imshow(image)
    draw_cuts(middle, size, window, shift)
    bare(right, "rolled, then regular windows").imshow(np.roll(image, (-shift[0], -shift[1]), (0, 1)))
    tint_kinds(right, window_kinds(size, window, shift))
    draw_cuts(right, size, window)
    draw_seam(right, size, shift)
    return figure


def show_kinds(sides: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Figure:
    """The four kinds of window: where its tokens come from, and which pairs may attend.

    Args:
        sides: four maps `(h, w)`, 0 to 3: a token has not wrapped around, by columns, by rows, by both.
        masks: four boolean `(N, N)`, True where a query (row) may see a key (column).
    """
    figure, axes = plt.subplots(2, 4, figsize=(7.4, 4.0), height_ratios=(1, 1.35))
    edge = {"edgecolor": "white", "linewidth": 0.8}
    for kind, (upper, lower) in enumerate(axes.T):
        bare(upper, KIND_NAMES[kind]).set_aspect("equal")
        upper.pcolormesh(sides[kind], cmap=ListedColormap(SIDE_COLOURS), vmin=0, vmax=3, **edge)
        upper.invert_yaxis()
        lower.imshow(masks[kind], cmap=ListedColormap([BLACK, "white"]), vmin=0, vmax=1)
        lower.set(xticks=[], yticks=[], xlabel="key")
        lower.spines[:].set_visible(True)
    axes[1, 0].set_ylabel("query")
    return figure


def show_padding(image: np.ndarray, window: Size, shift: Size) -> Figure:
    """A map that windows do not tile: as it is, padded, and padded then rolled."""
    H, W = image.shape[:2]
    bottom, right = -H % window[0], -W % window[1]
    padded = np.pad(image, ((0, bottom), (0, right), (0, 0)), constant_values=255)
    size = padded.shape[:2]
    empty = np.pad(np.zeros((H, W), bool), ((0, bottom), (0, right)), constant_values=True)
    figure, axes = plt.subplots(1, 3, figsize=(7.4, 2.6), width_ratios=(W, size[1], size[1]))
    bare(axes[0], f"{H} × {W}").imshow(image, extent=(-0.5, W - 0.5, H - 0.5, -0.5))
    axes[0].set(xlim=(-0.5, W - 0.5), ylim=(size[0] - 0.5, -0.5))
    for ax, move, name in zip(axes[1:], ((0, 0), (-shift[0], -shift[1])), ("padded", "rolled"), strict=True):
        bare(ax, f"{name}: {size[0]} × {size[1]}").imshow(np.roll(padded, move, (0, 1)))
        _hatch(ax, np.roll(empty, move, (0, 1)))
        draw_cuts(ax, size, window, colour=GREY)
    tint_kinds(axes[2], window_kinds(size, window, shift))
    draw_seam(axes[2], size, shift, colour=BLACK)
    return figure


def _hatch(ax: Axes, where: np.ndarray) -> None:
    """Mark padding, which has no picture."""
    ax.contourf(where.astype(float), levels=[0.5, 1.5], colors="none", hatches=["////"])
