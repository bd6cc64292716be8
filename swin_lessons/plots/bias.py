"""The position bias of Swin V2 when windows grow: as an explorer, and as a picture for print."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML
from matplotlib.figure import Figure
from torch import Tensor

from swin_lessons.models.windows import relative_position_index

from .explorer import explorer
from .sliders import picture
from .style import CYCLE, GREY

CAPTION = (
    "Slide the window beyond the one of training, whose offsets lie in the black frame and on the grey ground. "
    "Click an offset, or use the arrows once the table has the focus: the curves follow its row. Shades are "
    "relative to the kind chosen; the curves share one scale. An offset is query minus key; biases are less the "
    "head's mean over the window of training."
)
Tables = Mapping[str, Sequence[Tensor]]  # kind of bias -> for each window: (num_heads, 2w-1, 2w-1)


def by_offset(bias: Tensor, window: int) -> Tensor:
    """A bias by query and key as a table by offset: `(num_heads, N, N)` -> `(num_heads, 2w-1, 2w-1)`, N = w²."""
    index = relative_position_index((window, window), device=bias.device)
    wide = 2 * window - 1
    table = bias.new_empty(len(bias), wide * wide)
    table[:, index.flatten()] = bias.flatten(1)  # all pairs of one offset hold the same number
    return table.reshape(-1, wide, wide)


def bias_explorer(
    tables: Tables, windows: Sequence[int], *, start: int = 0, id: str = "explore-bias"
) -> HTML:
    """The bias for every offset of windows to choose from, by several kinds of bias.

    Args:
        tables: up to four names of kinds, each with a table a window; what matters to attention are differences,
            so each head's tables are shown less its mean over the first window.
        windows: sides of windows; the first is the one of training.
        start: position in `windows` of the one shown first.
        id: of the figure, its own on a page.

    Raises:
        ValueError: a table whose size is not that of its window.
    """
    centred = {name: centre(kind, windows) for name, kind in tables.items()}
    num_heads = len(next(iter(centred.values()))[0])
    data = {
        "windows": list(windows),
        "trained": windows[0],
        "start": start,
        "heads": [str(i + 1) for i in range(num_heads)],
        "kinds": [
            {"name": name, "tables": [rounded(t) for t in kind], "ranges": extents(kind)}
            for name, kind in centred.items()
        ],
    }
    names = ", ".join(tables)
    return explorer(
        "bias",
        data,
        id=id,
        picture=picture(show_bias(centred, windows)),
        alt=f"Curves of the bias over the offset along a row, at windows of {windows[0]} and {windows[-1]}: {names}.",
        caption=CAPTION,
    )


def centre(tables: Sequence[Tensor], windows: Sequence[int]) -> list[Tensor]:
    """Tables less each head's mean over the first of them."""
    for table, w in zip(tables, windows, strict=True):
        if table.shape[1:] != (2 * w - 1, 2 * w - 1):
            raise ValueError(f"a table of {tuple(table.shape)} is not one of a window of {w}: use by_offset")
    mean = tables[0].mean(dim=(1, 2), keepdim=True)
    return [table - mean for table in tables]


def extents(tables: Sequence[Tensor]) -> list[list[float]]:
    """For each head the lowest and the highest bias over all windows, never quite the same number."""
    numbers = torch.cat([table.flatten(1) for table in tables], dim=1)
    low, high = numbers.amin(1).tolist(), numbers.amax(1).tolist()
    return [[round(a, 2), round(max(b, a + 0.01), 2)] for a, b in zip(low, high, strict=True)]


def rounded(table: Tensor) -> list[list[float]]:
    """Each head's numbers, row by row, to two digits after the point: what a page need hold."""
    return [[round(value, 2) for value in head] for head in table.flatten(1).tolist()]


def show_bias(tables: Tables, windows: Sequence[int], head: int = 0) -> Figure:
    """The row of offsets (0, dx), at the first window and at the last."""
    shown = (0, len(windows) - 1)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.8), sharey=True)
    for ax, i in zip(axes, shown, strict=True):
        reach = windows[i] - 1
        ax.axvspan(1 - windows[0], windows[0] - 1, color=GREY, alpha=0.2, linewidth=0)
        for colour, (name, kind) in zip(CYCLE, tables.items(), strict=False):
            ax.plot(range(-reach, reach + 1), kind[i][head, reach], ".-", color=colour, label=name)
        ax.set(xlabel=f"offset in tokens, window {windows[i]}")
    axes[0].set(ylabel="bias")
    axes[0].legend(fontsize=8)
    return figure
