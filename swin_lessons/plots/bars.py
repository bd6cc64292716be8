"""Numbers side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .style import BLACK, CYCLE, HATCHES


def show_bars(
    names: Sequence[str], series: Mapping[str, Sequence[float | None]], label: str, form: str = "{:.2f}"
) -> Figure:
    """Horizontal bars in groups, a group a name from top to bottom; None leaves a gap."""
    figure, ax = plt.subplots(figsize=(7.4, 0.8 + 0.17 * len(names) * (len(series) + 0.6)))
    place, height = np.arange(len(names)), 0.84 / len(series)
    for i, (name, values) in enumerate(series.items()):
        y = place + (i - (len(series) - 1) / 2) * height
        there = [value or 0 for value in values]
        look: dict[str, Any] = {"color": CYCLE[i], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
        bars = ax.barh(y, there, 0.92 * height, label=name, **look)
        labels = ["" if value is None else form.format(value) for value in values]
        ax.bar_label(bars, labels, padding=2, fontsize=8, color=BLACK)
    ax.set(yticks=place, yticklabels=names, xlabel=label)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.legend(loc="best")
    return figure
