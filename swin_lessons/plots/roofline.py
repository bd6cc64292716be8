"""Figures of speed: samples of a timer, rooflines, predicted and measured times, launches, memory during a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .growth import plain_logarithmic
from .style import BLACK, BLUE, CYCLE, GREY, ORANGE

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")  # a second sign beside colour
LINES = ("-", "--", "-.", ":")


def show_samples(panels: Mapping[str, Sequence[float]]) -> Figure:
    """Milliseconds of each call in order, one panel a series; a line at the median of the second half."""
    figure, axes = plt.subplots(1, len(panels), figsize=(7.4, 2.8), squeeze=False)
    for ax, (title, values) in zip(axes[0], panels.items(), strict=True):
        later = float(np.median(values[len(values) // 2 :]))
        ax.axhline(1e3 * later, color=GREY, linewidth=1)
        ax.plot(range(1, len(values) + 1), [1e3 * v for v in values], "o", markersize=4, color=BLUE)
        ax.set(xlabel=f"call: {title}", yscale="log")
        plain_logarithmic(ax.yaxis)
    axes[0, 0].set(ylabel="milliseconds")
    return figure


def show_roofline(
    bandwidth: float, rates: Mapping[str, float], points: Mapping[str, tuple[float, float]]
) -> Figure:
    """FLOP a second over FLOP a byte: the roof for each of `rates`, and `points` (intensity, FLOP a second)."""
    figure, ax = plt.subplots(figsize=(7.4, 4.0))
    x = np.geomspace(0.05, 1000, 200)
    for (name, rate), style in zip(rates.items(), LINES, strict=False):
        ax.plot(x, np.minimum(x * bandwidth, rate) / 1e9, style, color=BLACK, label=f"roof, {name}")
    for i, (name, (intensity, speed)) in enumerate(points.items()):
        place: dict[str, Any] = {"color": CYCLE[i % len(CYCLE)], "marker": MARKS[i % len(MARKS)]}
        ax.plot(intensity, speed / 1e9, linestyle="", markersize=8, label=name, **place)
    ax.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP a second")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def show_batches(
    curves: Mapping[str, Mapping[int, float]], measured: Mapping[str, Mapping[int, float]]
) -> Figure:
    """Milliseconds over the batch, both logarithmic: predicted `curves`, and points that somebody measured."""
    figure, ax = plt.subplots(figsize=(7.4, 3.2))
    for (name, curve), colour, style in zip(curves.items(), CYCLE, LINES, strict=False):
        ax.plot(list(curve), [1e3 * v for v in curve.values()], style, color=colour, label=name)
    for (name, points), mark in zip(measured.items(), MARKS, strict=False):
        ax.plot(list(points), [1e3 * v for v in points.values()], mark, color=BLACK, label=name)
    ax.set(xlabel="images in a batch", ylabel="milliseconds", xscale="log", yscale="log")
    ticks = sorted({b for curve in curves.values() for b in curve})
    ax.set_xticks(ticks, [str(b) for b in ticks])
    plain_logarithmic(ax.yaxis)
    ax.minorticks_off()
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def show_memory(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Bytes held while the backward pass goes from the last layer to the first, a panel a batch, a line a way."""
    figure, axes = plt.subplots(1, len(panels), figsize=(7.4, 2.9), squeeze=False)
    for ax, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for (name, held), colour, style in zip(curves.items(), (BLUE, ORANGE), LINES, strict=False):
            x = np.linspace(0, 1, len(held))
            ax.plot(x, [b / 1e6 for b in held], style, color=colour, label=name)
        ax.set(xlabel=f"progress of the backward pass: {title}", ylim=(0, None))
    axes[0, 0].set(ylabel="MB held")
    axes[0, 0].legend(fontsize=8)
    return figure
