"""One look for all figures: white ground, the colours of Okabe and Ito, which colour-blind readers tell apart."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

BLACK, GREY = "#222222", "#8c8c8c"
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
HATCHES = ("", "//", "..", "xx")  # a second sign beside colour, for neighbouring bars
BLUES = LinearSegmentedColormap.from_list("swin_blues", ["#d6e9f5", "#9fd0ee", BLUE, "#06263b"])

RC: dict[Any, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=CYCLE),
    "legend.frameon": False,
}


def use_style() -> None:
    """Make matplotlib draw in the book's look from here on."""
    plt.rcParams.update(RC)


def bare(ax: Axes, title: str = "") -> Axes:
    """No ticks and no frame, a short name above: for pictures."""
    ax.set(xticks=[], yticks=[], title=title)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax
