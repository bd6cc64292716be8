"""Figures of number formats: their bits, gradients against their range, a loss scale over time, errors of products."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .growth import MARKS
from .style import BLACK, BLUE, CYCLE, GREEN, GREY, ORANGE, bare

Curves = Mapping[str, Sequence[float]]
LINES = ("-", "--", "-.", ":")


def show_bits(formats: Mapping[str, tuple[int, int]]) -> Figure:
    """A row of boxes for each format: sign, `exponent` bits, `mantissa` bits, as {name: (exponent, mantissa)}."""
    figure, ax = plt.subplots(figsize=(7.4, 0.5 + 0.55 * len(formats)))
    for row, (name, (exponent, mantissa)) in enumerate(formats.items()):
        kinds = [(1, GREY, "s"), (exponent, ORANGE, "e"), (mantissa, BLUE, "m")]
        x = 0
        for count, colour, letter in kinds:
            for _ in range(count):
                box = Rectangle((x, -row), 0.92, 0.7, facecolor=colour, edgecolor=BLACK, linewidth=0.4)
                ax.add_patch(box)
                white = "white" if colour == BLUE else BLACK
                ax.text(x + 0.46, 0.35 - row, letter, ha="center", va="center", fontsize=8, color=white)
                x += 1
        ax.text(-0.4, 0.35 - row, name, ha="right", va="center")
        ax.text(x + 0.4, 0.35 - row, f"1 + {exponent} + {mantissa}", va="center", fontsize=9)
    ax.set(xlim=(-4, 37), ylim=(-len(formats) + 0.8, 0.9))
    bare(ax)
    return figure


def show_exponents(panels: Mapping[str, Sequence[float]], lowest: int, normal: int, highest: int) -> Figure:
    """Histograms of log2 of absolute values, one above the other; grey ground where fp16 has nothing.

    Between `lowest` and `normal` fp16 has fewer digits; above `highest` it is infinite.
    """
    figure, axes = plt.subplots(len(panels), 1, figsize=(7.4, 1.5 * len(panels)), sharex=True, squeeze=False)
    bins = np.arange(-48, 28)
    for ax, (title, values), colour in zip(axes[:, 0], panels.items(), CYCLE, strict=False):
        ax.axvspan(-48, lowest, color=GREY, alpha=0.35, linewidth=0)
        ax.axvspan(lowest, normal, color=GREY, alpha=0.15, linewidth=0)
        ax.axvspan(highest, 28, color=GREY, alpha=0.35, linewidth=0)
        ax.hist(values, bins=bins, color=colour, edgecolor="white", linewidth=0.3)
        ax.set(yscale="log", ylabel="numbers", xlim=(-48, 28))
        ax.text(0.01, 0.88, title, transform=ax.transAxes, va="top", fontsize=9)
    axes[-1, 0].set(xlabel="exponent: log2 of the absolute value")
    return figure


def show_scale(scales: Sequence[float], skipped: Sequence[int], limit: Sequence[float]) -> Figure:
    """A loss scale step by step; crosses where a step was skipped; dashed: the largest scale that fits."""
    figure, ax = plt.subplots(figsize=(7.4, 2.8))
    steps = range(len(scales))
    ax.step(steps, scales, where="post", color=BLUE, label="scale")
    ax.step(steps, limit, "--", where="post", color=GREEN, linewidth=1.2, label="largest that fits")
    ax.plot(skipped, [scales[i] for i in skipped], "x", color=BLACK, label="step skipped")
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="scale")
    ax.legend(fontsize=8)
    return figure


def show_curves(curves: Curves, xlabel: str, ylabel: str) -> Figure:
    """Curves over the steps of training; each drawn thinner than the one under it, so that all can be seen."""
    figure, ax = plt.subplots(figsize=(7.4, 3.0))
    for i, ((name, values), style) in enumerate(zip(curves.items(), LINES, strict=False)):
        width = 5 - 1.6 * i
        ax.plot(range(1, len(values) + 1), values, style, color=CYCLE[i], linewidth=width, label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(fontsize=9)
    return figure


def show_errors(lengths: Sequence[int], panels: Mapping[str, Curves]) -> Figure:
    """Relative errors over the number of terms, both logarithmic, a panel a kind of factors."""
    figure, axes = plt.subplots(1, len(panels), figsize=(7.4, 3.2), sharey=True, squeeze=False)
    for ax, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for (name, values), colour, mark in zip(curves.items(), CYCLE, MARKS, strict=False):
            ax.plot(lengths, values, marker=mark, markersize=4, color=colour, label=name)
        ax.set(xlabel=f"terms K: {title}", yscale="log")
        ax.set_xscale("log", base=2)
    axes[0, 0].set(ylabel="relative error")
    axes[0, -1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
