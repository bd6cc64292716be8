"""How far an output sees: gradients of one output token, drawn in powers of ten."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .style import BLACK, BLUES, ORANGE, bare

DECADES = (-12, -6, -5, -4, -3, -2, -1, 0)  # of the largest gradient; exact zeros stay white
NAMES = [f"$10^{{{d}}}$" for d in DECADES]


def draw_reach(ax: Axes, strength: ArrayLike, window: int = 0):
    """One map of gradient sizes `(H, W)`, relative to its largest; white where the gradient is exactly 0.

    `window` > 0 draws where windows of that side cut.
    """
    strength = np.asarray(strength)
    level = np.log10(np.maximum(strength / strength.max(), 1.1 * 10.0 ** DECADES[0]))
    level = np.ma.masked_where(strength == 0, level)
    drawn = ax.imshow(level, BLUES, BoundaryNorm(DECADES, BLUES.N))
    if window:
        cuts = np.arange(window, len(strength), window) - 0.5
        ax.hlines(cuts, -0.5, len(strength) - 0.5, color=BLACK, linewidth=0.3, alpha=0.5)
        ax.vlines(cuts, -0.5, len(strength) - 0.5, color=BLACK, linewidth=0.3, alpha=0.5)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(True)
    return drawn


def mark(ax: Axes, row: float, column: float) -> None:
    """A cross on the token whose gradient is drawn."""
    ax.plot(column, row, marker="x", color=ORANGE, markersize=7, markeredgewidth=2)


def show_reach(rows: Sequence[Sequence[ArrayLike]], names: Sequence[str], window: int, centre: int) -> Figure:
    """A grid of maps: one row a network, one column a depth of 1, 2, ... blocks."""
    columns = len(rows[0])
    size = (7.4, 0.4 + 1.75 * len(rows))
    figure, axes = plt.subplots(len(rows), columns, figsize=size, squeeze=False)
    for line, maps, name in zip(axes, rows, names, strict=True):
        line[0].set_ylabel(name)
        for ax, strength in zip(line, maps, strict=True):
            drawn = draw_reach(ax, strength, window)
            mark(ax, centre, centre)
    for depth, ax in enumerate(axes[0], 1):
        ax.set_title("1 block" if depth == 1 else f"{depth} blocks")
    _scale(figure, drawn, axes)
    return figure


def show_pair(maps: Sequence[ArrayLike], names: Sequence[str], centre: float) -> Figure:
    """Two maps side by side, as one frame of a slider."""
    figure, axes = plt.subplots(1, len(maps), figsize=(6.4, 3.0))
    for ax, strength, name in zip(axes, maps, names, strict=True):
        drawn = draw_reach(ax, strength)
        mark(ax, centre, centre)
        bare(ax, name).spines[:].set_visible(True)
    _scale(figure, drawn, axes)
    return figure


def _scale(figure: Figure, drawn, axes) -> None:
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=25, ticks=DECADES[1:], spacing="uniform")
    bar.ax.set_yticklabels(NAMES[1:])
    bar.set_label("gradient, relative to the largest")
