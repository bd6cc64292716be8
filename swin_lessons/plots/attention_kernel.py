"""Pictures of fused attention: what each operation moves, where it stands under a roof, who sees whom."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from .style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY


def show_traffic(
    labels: Sequence[str], megabytes: Sequence[float], large: Sequence[bool], fused: float
) -> Figure:
    """What each operation reads and writes; `large` ones touch the scores. The last bar is the one fused kernel."""
    figure, ax = plt.subplots(figsize=(7.4, 0.29 * (len(labels) + 3)))
    for there, colour, hatch, name in (
        (False, BLUE, "", "tokens only"),
        (True, ORANGE, "//", "scores, N x N"),
    ):
        y = [i for i, flag in enumerate(large) if flag == there]
        x = [megabytes[i] for i in y]
        bars = ax.barh(y, x, 0.8, color=colour, hatch=hatch, edgecolor="white", label=name)
        ax.bar_label(bars, [f" {v:.0f}" for v in x], fontsize=8)
    last = len(labels) + 0.4
    ax.bar_label(
        ax.barh([last], [fused], 0.8, color=GREEN, label="one kernel"), [f" {fused:.0f}"], fontsize=8
    )
    ax.set(
        yticks=[*range(len(labels)), last], yticklabels=[*labels, "all in one"], xlabel="MB read and written"
    )
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3)
    return figure


def show_roof(points: Mapping[str, Mapping[str, float]], bandwidth: float, rate: float, name: str) -> Figure:
    """The roof of a machine, and work under it: {group: {label: FLOP a byte}}.

    A point stands on the roof, at what its intensity allows.
    """
    figure, ax = plt.subplots(figsize=(7.4, 3.4))
    ridge = rate / bandwidth
    x = np.geomspace(1, 1000, 200)
    ax.loglog(x, np.minimum(x * bandwidth, rate) / 1e12, color=BLACK, linewidth=1.2)
    ax.axvline(ridge, color=GREY, linestyle=":", linewidth=1)
    ax.text(ridge * 1.06, bandwidth * 3.2 / 1e12, f"ridge: {ridge:.0f}", color=GREY, fontsize=9)
    for (group, members), colour, marker, lift in zip(
        points.items(), (ORANGE, BLUE, GREEN), "sov", (-13, 8, 8), strict=False
    ):
        at = list(members.values())
        roof = [min(i * bandwidth, rate) / 1e12 for i in at]
        ax.plot(at, roof, marker, color=colour, label=group, markersize=7)
        for label, i, r in zip(members, at, roof, strict=True):
            align = "right" if lift > 0 else "left"
            ax.annotate(label, (i, r), (0, lift), textcoords="offset points", ha=align, fontsize=8)
    ax.set(xlabel="FLOP a byte", ylabel="TFLOP/s at most", title=name, ylim=(0.9, rate * 2.2 / 1e12))
    ax.legend(loc="lower right")
    return figure


def show_sides(sides: ArrayLike, window: tuple[int, int]) -> Figure:
    """The two bits of every token of a rolled map, with the cuts between windows."""
    codes = np.asarray(sides)
    figure, ax = plt.subplots(figsize=(6.0, 6.0 * codes.shape[0] / codes.shape[1] + 0.3))
    colours = np.array(
        [
            [0.93, 0.93, 0.93],
            *([int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in (SKY, ORANGE, GREEN)),
        ]
    )
    ax.imshow(colours[codes])
    for (row, column), code in np.ndenumerate(codes):
        ax.text(column, row, f"{code:02b}", ha="center", va="center", fontsize=8, color=BLACK)
    for y in range(0, codes.shape[0] + 1, window[0]):
        ax.axhline(y - 0.5, color=BLACK, linewidth=1.6)
    for x in range(0, codes.shape[1] + 1, window[1]):
        ax.axvline(x - 0.5, color=BLACK, linewidth=1.6)
    ax.set(xticks=[], yticks=[])
    return figure


def show_tile(N: int, side: int, warps: int = 4, width: int = 8) -> Figure:
    """A tile of scores for N tokens: real ones and padding, the rows of each warp, the columns of one instruction."""
    figure, ax = plt.subplots(figsize=(5.2, 4.6))
    for x, y, w, h, colour, hatch, name in (
        (0, 0, N, N, SKY, "", "scores"),
        (N, 0, side - N, N, ORANGE, "//", "keys that are nothing"),
        (0, N, side, side - N, "#e6e6e6", "..", "queries that are nothing"),
    ):
        ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    for warp in range(warps):
        middle = (warp + 0.5) * side / warps
        ax.text(-1.5, middle, f"warp {warp}", ha="right", va="center", fontsize=9)
        ax.plot([0, side], [middle + side / warps / 2] * 2, color=BLACK, linewidth=0.8, linestyle=":")
    ax.add_patch(Rectangle((side - width, 0), width, side, fill=False, edgecolor=BLACK, linewidth=1.6))
    ax.set(xlim=(-0.5, side + 0.5), ylim=(side + 0.5, -0.5), yticks=[], aspect="equal", xlabel="keys")
    ax.set_xticks([0, N, side - width, side])
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, fontsize=8, columnspacing=1.0)
    return figure
