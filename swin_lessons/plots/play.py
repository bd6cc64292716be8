"""Figures to play with where a kernel runs: your own image, network, window and shift.

At each change of a control the package works everything out anew, and the book's own drawing functions draw it. A
rendered page has no kernel: there `explorers`, `bias` and `sliders` stand in their place.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from html import escape
from pathlib import Path
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from swin_lessons.data.imagefolder import MEAN, STD
from swin_lessons.data.images import convert, pillow, read_image
from swin_lessons.data.pixels import normalise, stats_to_channels
from swin_lessons.models import SwinTransformer
from swin_lessons.models.attention import WindowAttention, WindowAttentionV2
from swin_lessons.models.attention_maps import attention_maps
from swin_lessons.models.windows import (
    Size,
    cyclic_shift,
    relative_position_index,
    shift_mask,
    window_partition,
    window_reverse,
)

from .bias import by_offset, centre, show_bias
from .explorers import show_attention, show_index
from .reach import show_pair
from .sliders import picture
from .style import BLUE, ORANGE, RC, RED
from .windows import show_shift

try:
    import ipywidgets as widgets
except ImportError as error:
    raise ImportError('figures with a kernel need ipywidgets: pip install "swin-lessons[plots]"') from error

Picture = str | Path | np.ndarray  # a file, or (H, W), (H, W, 3), (H, W, 4) of uint8 or of 0 to 1
PALE, HIDDEN = to_rgba("white", 0.72), to_rgba(RED, 0.75)  # over tokens that are not attended to


class Play(widgets.VBox):
    """Controls, and below them a figure and a sentence that follow.

    Args:
        draw: gets the value of each control under its name; returns a figure and a sentence about it.
        limits: gets the same; returns the largest values that some sliders may have now.
        **controls: widgets with a `value`.

    Attributes:
        controls: the widgets by name; `play.controls["window"].value = 4` does what a hand would do.
        figure, words: what is shown.
    """

    def __init__(
        self,
        draw: Callable[..., tuple[Figure, str]],
        limits: Callable[..., Mapping[str, int]] = lambda **values: {},
        **controls: Any,
    ):
        self._shown, self._said = widgets.Image(layout={"max_width": "100%"}), widgets.HTML()
        super().__init__([*controls.values(), self._shown, self._said])
        self.controls = controls
        self._draw, self._limits, self._settling = draw, limits, False
        for control in controls.values():
            control.observe(self._follow, "value")
        self._follow()

    def _follow(self, change: Any = None) -> None:
        """Bring sliders within their limits, then draw, once."""
        if self._settling:
            return
        self._settling = True
        for name, largest in self._limits(**self._values()).items():
            self.controls[name].max = largest
        self._settling = False
        with plt.rc_context(RC):
            self.figure, self.words = self._draw(**self._values())
            self._shown.value = picture(self.figure, dpi=100, colours=256)
        self._said.value = escape(self.words)

    def _values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}


def slider(name: str, low: int, high: int, start: int) -> widgets.IntSlider:
    """Whole numbers from `low` to `high`. It tells its value when the hand lets go: drawing takes a moment."""
    style = {"description_width": "9em"}
    return widgets.IntSlider(start, low, high, description=name, continuous_update=False, style=style)


def choice(name: str, options: Sequence[Any], start: Any) -> widgets.Dropdown:
    """One of several values, or of several pairs (name, value)."""
    return widgets.Dropdown(
        options=options, value=start, description=name, style={"description_width": "9em"}
    )


# --- windows, shift and mask (lesson 1)


def play_shift(image: Picture, tokens: int = 8) -> Play:
    """Whom a token of your image attends to: in windows, in shifted windows, and after the roll.

    Args:
        image: a file or an array; the square in its middle is shown.
        tokens: on a side of the map.

    Raises:
        ValueError: no window tiles that many tokens, or not an image.
    """
    windows = [w for w in range(2, tokens) if tokens % w == 0]
    if not windows:
        raise ValueError(f"no window tiles tokens={tokens}: take a number with divisors, such as 8 or 12")
    side = max(1, 240 // tokens) * tokens  # px
    return Play(
        partial(draw_shift, fitted(image, (side, side)), tokens),
        lambda window, **others: {"shift": window - 1},
        window=choice("window", windows, windows[-1]),
        shift=slider("shift", 0, windows[-1] - 1, windows[-1] // 2),
        row=slider("token: row", 0, tokens - 1, 1),
        column=slider("token: column", 0, tokens - 1, tokens // 2 + 1),
        mask=widgets.Checkbox(True, description="mask"),
    )


def draw_shift(
    image: np.ndarray, tokens: int, window: int, shift: int, row: int, column: int, mask: bool
) -> tuple[Figure, str]:
    """`show_shift`, with the tokens pale that (row, column) does not attend to, and red those that the mask hides."""
    cell = len(image) // tokens
    figure = show_shift(image, (window * cell, window * cell), (shift * cell, shift * cell))
    for ax, cut, roll in zip(figure.axes, (0, shift, shift), (0, 0, shift), strict=True):
        together, seen = keys_of((row, column), tokens, window, cut)
        seen = seen if mask else together
        veil(ax, rolled(together, roll), rolled(seen, roll))
        frame(ax, (row - roll) % tokens, (column - roll) % tokens, cell)
    hidden = int((together & ~seen).sum())
    words = f"Token ({row}, {column}) attends to {int(seen.sum())} of the {window**2} tokens of its window."
    return figure, words + f" The mask hides {hidden} from other edges of the image." * bool(hidden)


def keys_of(token: Size, tokens: int, window: int, shift: int) -> tuple[Tensor, Tensor]:
    """Who shares a token's window after the roll, and whom of them it attends to: two boolean `(tokens, tokens)`."""
    size, place = (window, window), torch.zeros(1, tokens, tokens, 1, dtype=torch.bool)
    place[0, token[0], token[1]] = True
    query = window_partition(cyclic_shift(place, (shift, shift)), size).squeeze(-1)  # (num_windows, N)
    together = query.any(1, keepdim=True).expand_as(query)
    allowed = shift_mask(tokens, tokens, size, (shift, shift))[query][0]  # (N,): the row of the query
    maps = [window_reverse(rows[..., None], size, tokens, tokens) for rows in (together, together & allowed)]
    together, seen = (cyclic_shift(x, (-shift, -shift))[0, :, :, 0] for x in maps)
    return together, seen


def rolled(cells: Tensor, shift: int) -> Tensor:
    """A map `(H, W)` after the cyclic shift."""
    return cyclic_shift(cells[None, :, :, None], (shift, shift))[0, :, :, 0]


def veil(ax: Axes, together: Tensor, seen: Tensor) -> None:
    """Over a picture: pale outside the window, red what is in it and hidden; both boolean `(H, W)`."""
    colours = np.zeros((*together.shape, 4))
    colours[~together.numpy()] = PALE
    colours[(together & ~seen).numpy()] = HIDDEN
    ax.imshow(colours, extent=ax.images[0].get_extent(), interpolation="nearest")


def frame(ax: Axes, row: int, column: int, cell: int = 1, colour: str = ORANGE) -> None:
    """A frame around a token of `cell` px a side."""
    corner = (column * cell - 0.5, row * cell - 0.5)
    style: dict[str, Any] = {"fill": False, "linewidth": 2.5, "clip_on": False}
    ax.add_patch(Rectangle(corner, cell, cell, edgecolor=colour, **style))


# --- the relative position index (lesson 2)


def play_position(largest: int = 7) -> Play:
    """Which entry of the relative position bias table serves a query and a key, for windows of 2 to `largest`.

    Raises:
        ValueError: `largest` below 2.
    """
    if largest < 2:
        raise ValueError(f"largest={largest}: a window has 2 tokens a side at least")
    places = ("query_row", "query_column", "key_row", "key_column")
    start = min(3, largest)
    return Play(
        draw_position,
        lambda window, **others: dict.fromkeys(places, window - 1),
        window=slider("window", 2, largest, start),
        **{name: slider(name.replace("_", ": "), 0, start - 1, i % 3) for i, name in enumerate(places)},
    )


def draw_position(
    window: int, query_row: int, query_column: int, key_row: int, key_column: int
) -> tuple[Figure, str]:
    """`show_index`, with the query in orange, and in blue the key and its offset in the table."""
    query, key = (query_row, query_column), (key_row, key_column)
    index = relative_position_index((window, window))
    entry = int(index[query_row * window + query_column, key_row * window + key_column])
    figure = show_index(window, query)
    side = max(3.4, 0.27 * (2 * window - 1))  # inches: digits need room
    figure.set_size_inches(2 * side + 0.2, side)
    keys, table = figure.axes
    frame(keys, *query)
    frame(keys, *key, colour=BLUE)
    frame(table, *divmod(entry, 2 * window - 1), colour=BLUE)
    return figure, f"Query {query} and key {key} use entry {entry} of {(2 * window - 1) ** 2}."


# --- attention of a network (lesson 2)


def play_attention(model: nn.Module, images: Tensor, names: Sequence[str]) -> Play:
    """What a token takes from where, in each block and head of your network.

    Args:
        model: with window attention, such as `create_model("swin_tiny_patch4_window7_224")`.
        images: `(B, C, H, W)`, as the model wants them; `batch_of` makes them from files.
        names: B of them.

    Raises:
        ValueError: not a name an image, no window attention, or windows that do not tile a map.
    """
    if images.ndim != 4 or not len(names) == len(images) > 0:
        raise ValueError(f"{len(names)} names for images {tuple(images.shape)}: give (B, C, H, W), B names")
    maps = lru_cache(maxsize=1)(lambda i: attention_maps(model, images[i : i + 1]))
    (H, W), heads = maps(0)[0].size, [m.weights.shape[1] for m in maps(0)]
    return Play(
        lambda image, row, column, **chosen: draw_attention(
            picture_of(images[image]), maps(image), ((row + 0.5) / H, (column + 0.5) / W), **chosen
        ),
        lambda block, **others: {"head": heads[block - 1]},
        image=choice("image", [(name, i) for i, name in enumerate(names)], 0),
        block=slider("block", 1, len(heads), 1),
        head=slider("head (0: mean)", 0, heads[0], 0),
        row=slider("token: row", 0, H - 1, H // 2),
        column=slider("token: column", 0, W - 1, W // 2),
    )


def draw_attention(
    image: np.ndarray, maps: Sequence[Any], place: tuple[float, float], block: int, head: int
) -> tuple[Figure, str]:
    """`show_attention` of one block, and of one head (0: their mean), large; `place` as shares of the sides."""
    m = maps[block - 1]
    chosen = replace(m, weights=m.weights[:, head - 1 : head] if head else m.weights)
    figure = show_attention(image, [chosen], place)
    figure.set_size_inches(4, 4.2)
    figure.axes[0].set_title(f"block {block}, " + (f"head {head}" if head else "mean over heads"))
    (_, W), (row, column) = m.size, (int(s * n) for s, n in zip(place, m.size, strict=True))
    share = chosen.weights[0].mean(0)[row * W + column]  # (HW,)
    best = divmod(int(share.argmax()), W)
    words = f"Token ({row}, {column}) takes from {int((share > 0).sum())} tokens; most, {share.max():.0%}"
    return figure, f"{words}, from {best}."


# --- the position bias of V2 (lesson 5)


def play_bias(model: nn.Module) -> Play:
    """The position bias of a V2 of yours, block by block, at the window of training and at another one.

    Raises:
        ValueError: the model has no continuous position bias.
    """
    layers = [m for m in model.modules() if isinstance(m, WindowAttentionV2)]
    if not layers:
        name = type(model).__name__
        raise ValueError(
            f"{name} has no continuous position bias: take a V2, as list_models('swinv2*') names"
        )
    trained = trained_window(layers[0])
    return Play(
        lambda block, head, window: draw_bias(layers[block - 1], head, window),
        lambda block, **others: {"head": layers[block - 1].num_heads},
        block=slider("block", 1, len(layers), 1),
        head=slider("head", 1, layers[0].num_heads, 1),
        window=slider("window", 2, 4 * trained, 2 * trained),
    )


def trained_window(attn: WindowAttentionV2) -> int:
    """The side of the window whose offsets the coordinates call 1."""
    return attn.pretrained_window_size[0] or attn.window_size[0]


@torch.no_grad()
def draw_bias(attn: WindowAttentionV2, head: int, window: int) -> tuple[Figure, str]:
    """`show_bias` of one head (from 1 on), less its mean at the window of training."""
    windows = (trained_window(attn), window)
    biases = [by_offset(attn.relative_position_bias((w, w)).float().cpu(), w) for w in windows]
    tables = centre(biases, windows)
    far, seen = window - 1, windows[0] - 1
    rise = tables[1][head - 1, far, -1] - tables[1][head - 1, far, far]
    words = f"Offsets of up to {seen} were seen in training. "
    words += f"At a window of {window}, the offset (0, {far}) has {rise:+.2f} against (0, 0)."
    return show_bias({f"head {head}": tables}, windows, head - 1), words


# --- how far a token sees (lesson 3)


def play_reach(model: SwinTransformer) -> Play:
    """Which part of the image a token behind a block of your Swin depends on, with the shift and without.

    The window slider makes it the same network with other windows (`set_input_size`).
    Blocks of a fresh V2 do nothing, so tokens see no further than their patch: take a trained one.

    Raises:
        ValueError: not a Swin.
    """
    if not isinstance(model, SwinTransformer):
        raise ValueError(
            f"{type(model).__name__} is no SwinTransformer: make one with create_model('swin_...')"
        )
    patches, window = min(model.config.grids()[0]), model.config.window_size[0]
    return Play(
        partial(draw_reach_of, model),
        block=slider("behind block", 1, sum(model.config.depths), 1),
        place=slider("row and column", 0, patches - 1, patches // 2),
        window=slider("window", 2, 2 * window, window),
    )


def draw_reach_of(model: SwinTransformer, block: int, place: int, window: int) -> tuple[Figure, str]:
    """`show_pair` of the fields of the token at patch (place, place), with the shift and without."""
    model = deepcopy(model)
    model.set_input_size(model.config.img_size, window)
    fields = [field_of(model, block, place)]
    for module in model.modules():
        if isinstance(module, WindowAttention):
            module.shift_size = (0, 0)
    fields.append(field_of(model, block, place))
    figure = show_pair([field.cpu() for field in fields], ("with shift", "without"), place)
    p = model.config.patch_size
    wide, narrow = ([p * int((field > 0).any(axis).sum()) for axis in (1, 0)] for field in fields)
    words = f"With the shift it depends on {wide[0]} × {wide[1]} px, without on {narrow[0]} × {narrow[1]} px"
    return figure, f"{words}, of {' × '.join(map(str, model.config.img_size))}."


def field_of(model: SwinTransformer, block: int, place: int) -> Tensor:
    """How much each patch moves the token at patch (place, place) behind a block: `(H/p, W/p)`."""
    config, weight = model.config, next(model.parameters())
    generator = torch.Generator().manual_seed(0)  # the same image at each change
    x = torch.randn(1, config.in_chans, *config.img_size, generator=generator).to(weight).requires_grad_()
    seen: list[Tensor] = []
    blocks = [b for stage in model.all_stages() for b in stage.all_blocks()]
    handle = blocks[block - 1].register_forward_hook(lambda module, args, y: seen.append(y[0]))
    with torch.enable_grad():
        model(x)
    handle.remove()
    row = place * len(seen[0]) // config.grids()[0][0]
    column = place * seen[0].shape[1] // config.grids()[0][1]
    token = seen[0][row, column]
    (gradient,) = torch.autograd.grad(token @ torch.randn(len(token), generator=generator).to(token), x)
    return F.avg_pool2d(gradient.abs().sum(1), config.patch_size, ceil_mode=True)[0]


# --- pictures of your own


def fitted(image: Picture, size: Size, in_chans: int = 3) -> np.ndarray:
    """The middle of a picture at another size: uint8 `(H, W, in_chans)`.

    Raises:
        ValueError: an array that is no image, or a file that cannot be read.
    """
    whole = (
        from_array(image, in_chans) if isinstance(image, np.ndarray) else read_image(Path(image), in_chans)
    )
    return np.asarray(pillow().ImageOps.fit(whole, (size[1], size[0]))).reshape(*size, in_chans)


def from_array(image: np.ndarray, in_chans: int) -> Any:
    """An array as an image of Pillow's; a channel axis of 1 may be left out."""
    if image.dtype != np.uint8 and image.size and 0 <= image.min() <= image.max() <= 1:
        image = (255 * image.astype(float)).round().astype(np.uint8)
    image = image.squeeze(-1) if image.shape[2:] == (1,) else image
    shaped = image.ndim >= 2 and image.size and image.shape[2:] in ((), (3,), (4,))
    if image.dtype != np.uint8 or not shaped:
        raise ValueError(
            f"an array {image.shape} of {image.dtype} is no image: give (H, W, 3) of uint8 or of 0 to 1"
        )
    return convert(pillow().Image.fromarray(image), in_chans)


def batch_of(images: Sequence[Picture], model: nn.Module, data: Any = None) -> Tensor:
    """Pictures as the model wants them: `(B, C, H, W)`, the middle of each at the model's size, normalised.

    Args:
        images: files or arrays.
        model: one of `create_model`, whose `config` says the size and the channels.
        data: the data set that it was trained on, for its `mean` and `std`; without, ImageNet's.

    Raises:
        ValueError: no pictures, or one that is none.
    """
    if not len(images):
        raise ValueError("no pictures: give one file or array at least")
    config = cast(Any, model.config)
    arrays = np.stack([fitted(image, config.img_size, config.in_chans) for image in images])
    stats = [torch.tensor(stats_to_channels(values, config.in_chans)) for values in (MEAN, STD)]
    mean, std = (data.mean, data.std) if data is not None else stats
    batch = normalise(torch.from_numpy(arrays).permute(0, 3, 1, 2), mean.cpu(), std.cpu())
    return batch.to(next(model.parameters()))


def picture_of(x: Tensor) -> np.ndarray:
    """A model's image `(C, H, W)` to look at: `(H, W, 3)` of 0 to 1, in grey unless it has three channels."""
    x = x.detach().float().cpu()
    x = x if len(x) == 3 else x.mean(0).expand(3, -1, -1)
    low, high = x.amin(), x.amax()
    return ((x - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy()
