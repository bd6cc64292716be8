"""Figures of what grows with a network: activations by depth, logits by input size, coordinates by window."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .style import BLACK, CYCLE, GREY

MARKS = ("o", "s", "^", "D", "v", "P")  # a second sign beside colour
Curves = Mapping[str, Sequence[float]]


def plain_logarithmic(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2, 5, 10, 20, ... in plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def show_by_depth(panels: Mapping[str, Curves], ylabel: str, *, bound: Curves | None = None) -> Figure:
    """A number after each block, one panel a kind of network and one line a network, on one logarithmic scale.

    `bound` are named curves, dashed in black, in the last panel.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(7.4, 3.0), sharey=True, squeeze=False)
    for ax, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for (name, values), colour, mark in zip(curves.items(), CYCLE, MARKS, strict=False):
            blocks = range(1, len(values) + 1)
            ax.plot(blocks, values, marker=mark, markersize=3, color=colour, label=name)
        ax.set(xlabel=f"block, {title}", yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain_logarithmic(ax.yaxis)
    for name, values in (bound or {}).items():
        axes[0, -1].plot(range(1, len(values) + 1), values, "--", color=BLACK, label=name, zorder=9)
    axes[0, 0].set(ylabel=ylabel)
    axes[0, -1].legend(fontsize=8)
    return figure


def show_against_scale(
    scales: Sequence[float], panels: Mapping[str, Curves], *, most: Mapping[str, float], log: str
) -> Figure:
    """Curves over a scale that doubles from point to point, a panel a quantity.

    `most` are grey lines at the largest value that a quantity can have; `log` is the one on a logarithmic axis.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(7.4, 2.9))
    for ax, (ylabel, curves) in zip(axes, panels.items(), strict=True):
        for (name, values), colour, mark in zip(curves.items(), CYCLE, MARKS, strict=False):
            ax.plot(scales, values, marker=mark, markersize=4, color=colour, label=name)
        if ylabel in most:
            ax.axhline(most[ylabel], color=GREY, linewidth=0.8)
        ax.set(xlabel="scale of the input", ylabel=ylabel, yscale="log" if ylabel == log else "linear")
        ax.set_xscale("log", base=2)
    axes[0].legend(fontsize=8)
    return figure


def show_coordinates(offsets: Sequence[int], curves: Curves, trained: int) -> Figure:
    """Coordinates that a small network is fed, over the offset in tokens; grey ground: what training saw."""
    figure, ax = plt.subplots(figsize=(7.4, 2.9))
    ax.axvspan(-trained, trained, color=GREY, alpha=0.2, linewidth=0)
    for (name, values), colour, style in zip(curves.items(), CYCLE, ("-", "--", "-."), strict=False):
        ax.plot(offsets, values, style, marker=".", color=colour, label=name)
    ax.set(xlabel="offset in tokens", ylabel="coordinate")
    ax.legend(fontsize=8)
    return figure


def show_transfer(windows: Sequence[int], before: Curves, after: Curves) -> Figure:
    """Accuracy over the window, as moved and after fine-tuning, one line a kind of bias."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.9), sharey=True)
    for ax, curves, words in zip(axes, (before, after), ("as moved", "after fine-tuning"), strict=True):
        for (name, values), colour, mark in zip(curves.items(), CYCLE, MARKS, strict=False):
            ax.plot(windows[: len(values)], [100 * v for v in values], marker=mark, color=colour, label=name)
        ax.set(xlabel=f"window, {words}", xticks=list(windows))
    axes[0].set(ylabel="accuracy, %")
    axes[0].legend(fontsize=8)
    return figure


def show_middle_rows(panels: Mapping[str, Curves], trained: int) -> Figure:
    """Biases along the row of offset 0, a panel a target; the first curve of a panel is the right one, in black."""
    figure, axes = plt.subplots(1, len(panels), figsize=(7.4, 2.9), squeeze=False)
    for ax, (title, curves) in zip(axes[0], panels.items(), strict=True):
        (right, *others) = curves.items()
        reach = len(right[1]) // 2
        offsets = range(-reach, reach + 1)
        ax.axvspan(-trained, trained, color=GREY, alpha=0.2, linewidth=0)
        ax.plot(offsets, right[1], color=BLACK, linewidth=2.5, label=right[0])
        for (name, values), colour, mark in zip(others, CYCLE, MARKS, strict=False):
            ax.plot(offsets, values, marker=mark, markersize=3, linewidth=1, color=colour, label=name)
        ax.set(xlabel=f"offset (query minus key): {title}")
    axes[0, 0].set(ylabel="bias")
    axes[0, 0].legend(fontsize=8)
    return figure
