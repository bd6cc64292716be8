"""Pictures of kernels: which program works on what, where a tile is padding, how partial sums meet."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import BLACK, BLUE, CYCLE, GREY, ORANGE, bare

PALE = "#f2f2f2"


def ink(colour: str) -> str:
    """White letters on dark grounds, black ones on all others."""
    return "white" if colour in (BLUE, BLACK) else BLACK


def _cell(
    ax: Axes, x: float, y: float, w: float, h: float, colour: str, hatch: str = "", edge: str = "white"
) -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor=edge, hatch=hatch, linewidth=0.8))


def _padding(ax: Axes, x: float, y: float, w: float, h: float) -> None:
    _cell(ax, x, y, w, h, PALE, "////", GREY)


def _frame(figure_size: tuple[float, float], width: float, height: float) -> tuple[Figure, Axes]:
    figure, ax = plt.subplots(figsize=figure_size)
    bare(ax).set(xlim=(-0.1, width), ylim=(height, -0.1))
    return figure, ax


def show_programs(n: int, block: int) -> Figure:
    """A vector of `n` numbers, the programs that take `block` of them each, and what the mask switches off."""
    programs = -(-n // block)
    figure, ax = _frame((7.4, 1.9), programs * block + 0.1, 3.6)
    for i in range(programs * block):
        program = i // block
        colour = CYCLE[program % len(CYCLE)]
        if i < n:
            _cell(ax, i, 0.0, 0.94, 0.8, colour)
        else:
            _padding(ax, i, 0.0, 0.94, 0.8)
        ax.text(i + 0.47, 0.4, str(i), ha="center", va="center", color=ink(colour if i < n else PALE))
        _cell(ax, i, 2.0, 0.94, 0.6, colour if i < n else PALE, "" if i < n else "////", GREY)
        ax.text(i + 0.47, 2.3, str(i % block), ha="center", va="center", color=ink(colour if i < n else PALE))
    for program in range(programs):
        middle = program * block + block / 2
        ax.annotate("", (middle, 0.9), (middle, 1.9), arrowprops={"arrowstyle": "<->", "color": GREY})
        ax.text(middle, 3.1, f"program {program}", ha="center", va="center")
    ax.text(0.0, 1.4, "place in memory", color=GREY, va="center", fontsize=9)
    return figure


def show_tiles(channels: int, rows: int, width: int) -> Figure:
    """Two tiles of rows of `channels` numbers, padded to `width`: one row, and `rows` of them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.5))
    for ax, count in ((left, 1), (right, rows)):
        for row in range(count):
            _cell(ax, 0, row, channels, 0.9, BLUE)
            _padding(ax, channels, row, width - channels, 0.9)
        title = "1 row a program" if count == 1 else f"{count} rows a program"
        bare(ax, title).set(xlim=(-1, width + 1), ylim=(rows + 1.6, -0.6))
        ax.text(channels / 2, count + 0.7, f"{channels} channels", ha="center", va="center")
        ax.text((channels + width) / 2, count + 0.7, f"{width - channels}", ha="center", va="center")
    return figure


def show_partial_sums(blocks: int, programs: int) -> Figure:
    """Blocks of rows dealt out to programs in turn, one partial sum a program, then the sum of these."""
    figure, ax = _frame((7.4, 2.7), 15.2, blocks + 1.2)
    top = (blocks - programs) / 2
    for block in range(blocks):
        program = block % programs
        _cell(ax, 0, block, 4.0, 0.86, CYCLE[program])
        ax.text(
            2.0,
            block + 0.43,
            f"rows of block {block}",
            ha="center",
            va="center",
            color=ink(CYCLE[program]),
            fontsize=8,
        )
        arrow = {"arrowstyle": "->", "color": CYCLE[program], "linewidth": 1.4}
        ax.annotate("", (6.0, top + program + 0.43), (4.1, block + 0.43), arrowprops=arrow)
    for program in range(programs):
        _cell(ax, 6.1, top + program, 3.6, 0.86, CYCLE[program])
        middle = top + program + 0.43
        ax.text(
            7.9,
            middle,
            f"partial sum {program}",
            ha="center",
            va="center",
            color=ink(CYCLE[program]),
            fontsize=8,
        )
        ax.annotate("", (11.6, blocks / 2), (9.8, middle), arrowprops={"arrowstyle": "->", "color": GREY})
    _cell(ax, 11.7, blocks / 2 - 0.43, 3.2, 0.86, BLACK)
    ax.text(13.3, blocks / 2, "dW, or dB", ha="center", va="center", color="white", fontsize=8)
    labels = ((2.0, "read once"), (7.9, "first kernel writes"), (13.3, "a small sum"))
    for x, label in labels:
        ax.text(x, blocks + 0.7, label, ha="center", va="center", color=GREY, fontsize=9)
    return figure


def show_bars(groups: dict[str, Sequence[float]], names: Sequence[str], unit: str) -> Figure:
    """Horizontal bars, a pair or more for each name; numbers at their ends, so that no axis has to be read."""
    figure, ax = plt.subplots(figsize=(7.4, 0.8 + 0.3 * len(names) * len(groups)))
    height = 0.8 / len(groups)
    places = np.arange(len(names))
    colours, hatches = (ORANGE, BLUE, GREY), ("//", "", "..")
    for i, (label, values) in enumerate(groups.items()):
        at = places + (i - (len(groups) - 1) / 2) * height
        bars = ax.barh(
            at, values, height * 0.92, label=label, color=colours[i], hatch=hatches[i], edgecolor="white"
        )
        ax.bar_label(bars, [f" {value:.4g}" for value in values], fontsize=9)
    ax.set(yticks=places, yticklabels=names, xlabel=unit)
    ax.invert_yaxis()
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(groups))
    ax.margins(x=0.12)
    return figure
