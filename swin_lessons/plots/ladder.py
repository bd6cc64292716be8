"""What a batch does to the rungs of the training ladder."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .style import CYCLE

MARKERS = "os^Dvx"


def show_batches(batches: Sequence[int], series: Mapping[str, Sequence[float]], label: str) -> Figure:
    """A line for each name over the batch, both axes logarithmic."""
    figure, ax = plt.subplots(figsize=(7.4, 3.0))
    for i, (name, values) in enumerate(series.items()):
        ax.plot(batches, values, marker=MARKERS[i], color=CYCLE[i], label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xticks=batches, xticklabels=[str(b) for b in batches], xlabel="images a batch", ylabel=label)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.legend()
    return figure
