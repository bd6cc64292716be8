"""The shape of a pyramid, and where its parameters and its arithmetic sit."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from .style import BLACK, BLUE, CYCLE, HATCHES, SKY, bare

Shape = tuple[int, int, int]  # height, width, channels


def _box(ax: Axes, x: float, height: float, width: float, depth: float, colours: Sequence[str]) -> float:
    """A box in oblique view standing on y = 0 with its front left edge at x; returns where it ends."""
    dx, dy = 0.7 * depth, 0.35 * depth
    front = [(x, 0), (x + width, 0), (x + width, height), (x, height)]
    top = [(x, height), (x + width, height), (x + width + dx, height + dy), (x + dx, height + dy)]
    side = [(x + width, 0), (x + width + dx, dy), (x + width + dx, height + dy), (x + width, height)]
    for corners, colour in zip((front, top, side), colours, strict=True):
        ax.add_patch(Polygon(corners, facecolor=colour, edgecolor="white", linewidth=0.8))
    return x + width + dx


def show_pyramid(shapes: Sequence[Shape], names: Sequence[str], notes: Sequence[str]) -> Figure:
    """Boxes whose front is a map (height, width) and whose depth stands for its channels.

    Sides are to scale among each other, depths too; the two scales differ.
    """
    largest = max(max(H, W) for H, W, _ in shapes)
    deepest = max(C for _, _, C in shapes)
    figure, ax = plt.subplots(figsize=(7.4, 2.9))
    x = 0.0
    for (H, W, C), name, note in zip(shapes, names, notes, strict=True):
        start = x
        end = _box(ax, x, 2.6 * H / largest, 2.6 * W / largest, 2.2 * C / deepest, (SKY, "#b5dcf3", BLUE))
        middle = (start + max(end, start + 1.0)) / 2
        ax.text(middle, -0.15, f"{name}\n{H} × {W} × {C}\n{note}", ha="center", va="top", fontsize=9)
        x = max(end, start + 1.6) + 0.55
    ax.set(xlim=(-0.3, x - 0.3), ylim=(-1.25, 3.3), aspect="equal")
    bare(ax)
    return figure


def show_shares(parts: Sequence[str], shares: Mapping[str, Sequence[float]], label: str) -> Figure:
    """Grouped bars: for each part of a network, its share (0 to 1) in each quantity."""
    figure, ax = plt.subplots(figsize=(7.4, 2.8))
    place, width = np.arange(len(parts)), 0.8 / len(shares)
    for i, (name, values) in enumerate(shares.items()):
        x = place + (i - (len(shares) - 1) / 2) * width
        style: dict[str, Any] = {"color": CYCLE[i], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
        bars = ax.bar(x, [100 * v for v in values], 0.95 * width, label=name, **style)
        ax.bar_label(bars, [f"{100 * v:.{int(v < 0.01)}f}" for v in values], fontsize=9, color=BLACK)
    ax.set(xticks=place, xticklabels=parts, ylabel=label)
    ax.legend()
    return figure
