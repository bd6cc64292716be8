"""The explorers of the lessons: windows with shift and mask, the relative position index, attention of a network."""

import base64
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.figure import Figure
from torch import Tensor

from swin_lessons.models.attention_maps import AttentionMap

from .explorer import explorer
from .sliders import picture, png_of, png_uri
from .style import BLUES, ORANGE, bare
from .windows import show_shift

SHIFT_CAPTION = (
    "Click a token, or reach the map with the Tab key and use the arrows. Clear tokens are those it attends to. "
    "Red ones share its window after the roll, but the mask hides them. Blue frames: what the roll brought to "
    "the other side; their inner edges are the seam."
)
POSITION_CAPTION = (
    "Each cell of the window shows which entry of the bias table serves it as a key of the orange query. "
    "The blue frame marks one key, and its offset in the table."
)

ATTENTION_CAPTION = (
    "Pick a token by a click, or with the arrows once the map has the focus. The darker the blue, the more the token "
    "takes from there. Then change the block and the head."
)


def shift_explorer(
    image: np.ndarray,
    *,
    tokens: int = 8,
    windows: Sequence[int] = (2, 4),
    shift: int = 2,
    start: tuple[int, int] = (1, 5),
    id: str = "explore-shift",
) -> HTML:
    """Whom a token attends to in windows, shifted windows, and with the mask on or off.

    Args:
        image: `(H, H, 3)` of uint8 or of 0 to 1, H a multiple of `tokens`.
        tokens: on a side of the map.
        windows: sides of windows to choose from, divisors of `tokens`; the last is shown first.
        shift: tokens, shown first.
        start: row and column of the token picked first.
        id: of the figure, its own on a page.

    Raises:
        ValueError: a window that does not tile the map.
    """
    bad = [w for w in windows if tokens % w]
    if bad or not windows:
        raise ValueError(f"windows={tuple(windows)} must divide the {tokens} tokens of a side")
    cell = len(image) // tokens
    side = windows[-1] * cell
    drawn = picture(show_shift(image, (side, side), (shift * cell, shift * cell)))
    data = {"image": png_uri(png_of(image)), "tokens": tokens, "windows": list(windows)}
    return explorer(
        "shift",
        data | {"shift": shift, "start": list(start)},
        id=id,
        picture=drawn,
        alt="An image cut into regular windows, into shifted windows, and rolled so that shifted windows are regular.",
        caption=SHIFT_CAPTION,
    )


def position_explorer(
    *, windows: Sequence[int] = (2, 3, 4, 5, 6, 7), start: int = 1, id: str = "explore-position"
) -> HTML:
    """Which entry of the relative position bias table serves a pair of tokens.

    Args:
        windows: sides of windows to choose from.
        start: position in `windows` of the one shown first.
        id: of the figure, its own on a page.
    """
    side = windows[start]
    return explorer(
        "position",
        {"windows": list(windows), "start": start},
        id=id,
        picture=picture(show_index(side)),
        alt=f"A window of {side} by {side} tokens and the table of {(2 * side - 1) ** 2} offsets that serves it.",
        caption=POSITION_CAPTION,
    )


def show_index(side: int, query: tuple[int, int] | None = None) -> Figure:
    """The entries that serve a query (row, column) of a window, and where they lie in the table.

    Without a query: the middle token's.
    """
    (row, column), wide = query or (side // 2, side // 2), 2 * side - 1
    last = np.arange(side)[::-1]  # side - 1 - key
    entries = (row + last)[:, None] * wide + (column + last)[None, :]
    table = np.arange(wide * wide).reshape(wide, wide)
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.4))
    titles = (f"keys of query ({row}, {column})", f"the table: {wide * wide} offsets")
    for ax, numbers, title in zip(axes, (entries, table), titles, strict=True):
        bare(ax, title).imshow(np.isin(numbers, entries), cmap=BLUES, alpha=0.4)
        for (row, column), number in np.ndenumerate(numbers):
            ax.text(column, row, str(number), ha="center", va="center", fontsize=8)
    return figure


def attention_explorer(
    images: Sequence[np.ndarray],
    names: Sequence[str],
    maps: Sequence[AttentionMap],
    *,
    start: tuple[float, float] = (0.6, 0.5),
    id: str = "explore-attention",
) -> HTML:
    """The attention of every block and head of a network, for a token of the reader's choice.

    Args:
        images: B pictures `(H, W, 3)`, in the order of the batch.
        names: what to call them.
        maps: `attention_maps(model, batch)`.
        start: where the first token lies, as shares of height and width.
        id: of the figure, its own on a page.
    """
    blocks = [
        {"name": str(i), "size": list(m.size), "heads": m.weights.shape[1]} for i, m in enumerate(maps, 1)
    ]
    sources = [
        {"name": name, "image": png_uri(png_of(image)), "weights": [_bytes(m.weights[b]) for m in maps]}
        for b, (name, image) in enumerate(zip(names, images, strict=True))
    ]
    data: dict[str, Any] = {"blocks": blocks, "images": sources, "start": list(start)}
    return explorer(
        "attention",
        data,
        id=id,
        picture=picture(show_attention(images[0], maps, start)),
        alt=f"{names[0]}, {len(maps)} times, once for each block, with the weights of one token's keys in blue.",
        caption=ATTENTION_CAPTION,
    )


def _bytes(weights: Tensor) -> str:
    """Weights of 0 to 1 as bytes of 0 to 255, in base64; a weight above 0 never becomes 0."""
    whole = (255 * weights).ceil().clamp(max=255).byte()
    return base64.b64encode(whole.cpu().numpy().tobytes()).decode()


def show_attention(image: np.ndarray, maps: Sequence[AttentionMap], start: tuple[float, float]) -> Figure:
    """The keys of one token in each block, mean over heads, over the first image."""
    figure, axes = plt.subplots(1, len(maps), figsize=(7.4, 2.3), squeeze=False)
    for i, (ax, m) in enumerate(zip(axes[0], maps, strict=True), 1):
        (H, W), (row, column) = m.size, (int(s * n) for s, n in zip(start, m.size, strict=True))
        share = m.weights[0].mean(0)[row * W + column].reshape(H, W).cpu().numpy()
        bare(ax, f"block {i}").imshow(image, extent=(-0.5, W - 0.5, H - 0.5, -0.5))
        ax.imshow(np.ma.masked_equal(share, 0), cmap=BLUES, alpha=0.7)
        ax.plot(column, row, marker="x", color=ORANGE, markersize=7, markeredgewidth=2)
    return figure
