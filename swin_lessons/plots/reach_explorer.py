"""What a token can depend on, block by block, to click through: fields worked out from windows and shifts alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from IPython.display import HTML
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from swin_lessons.models.swin import SwinTransformer
from swin_lessons.models.windows import Size, fit_window

from .explorer import explorer
from .sliders import picture
from .style import BLUES, ORANGE, bare

Interval = tuple[int, int]  # first and last token of an axis

CAPTION = (
    "Click a token, or move with the arrows once the map has the focus. Dark: what it takes in with the block itself; "
    "the paler, the more blocks lie between. Grey lines: the windows of that block. Take the shift away, then choose "
    "later blocks."
)


@dataclass(frozen=True)
class Layer:
    """A block as the field sees it: its stage (from 1), its map in tokens, its window and shift there."""

    stage: int
    size: Size
    window: Size
    shift: Size


def layers_of(model: SwinTransformer) -> list[Layer]:
    """Every block of a Swin at its configured input size, in order."""
    layers = []
    for stage, (size, part) in enumerate(zip(model.config.grids(), model.all_stages(), strict=True), 1):
        for block in part.all_blocks():
            layers.append(
                Layer(stage, size, *fit_window(size, block.attn.window_size, block.attn.shift_size))
            )
    return layers


def cover(field: Interval, length: int, window: int, shift: int) -> Interval:
    """An interval of an axis of `length` tokens, widened to the windows that it touches."""
    first = (field[0] - shift) // window * window + shift
    last = (field[1] - shift) // window * window + shift + window - 1
    return max(first, 0), min(last, length - 1)


def fields(layers: Sequence[Layer], axis: int, token: int) -> list[Interval]:
    """What `token` behind the last of `layers` depends on before that block, before the one below it, and so on.

    Along one axis (0 rows, 1 columns), in patches of the image. A window is a rectangle, and so is a union of
    windows that touch one: the two axes do not mix.
    """
    field, found = (token, token), []
    for i in reversed(range(len(layers))):
        layer = layers[i]
        field = cover(field, layer.size[axis], layer.window[axis], layer.shift[axis])
        found.append(in_patches(field, layers, i, axis))
        if i and layers[i - 1].stage < layer.stage:  # a merged token is a pair of tokens along an axis
            field = 2 * field[0], min(2 * field[1] + 1, layers[i - 1].size[axis] - 1)
    return found


def in_patches(field: Interval, layers: Sequence[Layer], i: int, axis: int) -> Interval:
    """The patches under tokens of the map of block `i`."""
    patches = 2 ** (layers[i].stage - layers[0].stage)
    return field[0] * patches, min((field[1] + 1) * patches, layers[0].size[axis]) - 1


def reach_explorer(
    models: Sequence[SwinTransformer],
    names: Sequence[str],
    *,
    block: int = 4,
    start: tuple[float, float] = (0.45, 0.55),
    id: str = "explore-reach",
) -> HTML:
    """The receptive field of any token behind any block, with the shift and without.

    Args:
        models: Swins; only their shapes count, so the meta device will do.
        names: what to call them.
        block: the one chosen first, from 1.
        start: where the first token lies, as shares of height and width.
        id: of the figure, its own on a page.
    """
    networks = [{"name": n, "blocks": blocks_of(layers_of(m))} for n, m in zip(names, models, strict=True)]
    return explorer(
        "reach",
        {"networks": networks, "block": block - 1, "start": list(start)},
        id=id,
        picture=picture(show_fields(layers_of(models[0]), start)),
        alt=f"The patches that one token of {names[0]} depends on, behind four of its blocks: a growing rectangle.",
        caption=CAPTION,
    )


def blocks_of(layers: Sequence[Layer]) -> list[dict]:
    """Each block with the fields of its tokens: `[shift taken?][axis][token]`, flat lists of first and last."""
    still = [Layer(layer.stage, layer.size, layer.window, (0, 0)) for layer in layers]
    return [
        {
            "stage": layer.stage,
            "size": layer.size,
            "window": layer.window,
            "shift": layer.shift,
            "fields": [[all_fields(kind[:i], axis) for axis in (0, 1)] for kind in (still, layers)],
        }
        for i, layer in enumerate(layers, 1)
    ]


def all_fields(layers: Sequence[Layer], axis: int) -> list[list[int]]:
    """`fields` of every token of an axis of the last layer's map, each flat."""
    tokens = range(layers[-1].size[axis])
    return [[end for field in fields(layers, axis, token) for end in field] for token in tokens]


def show_fields(layers: Sequence[Layer], start: tuple[float, float]) -> Figure:
    """The fields of the token at `start` behind four blocks: the printed form of the explorer."""
    last = len(layers)
    figure, axes = plt.subplots(1, 4, figsize=(7.4, 2.2))
    for ax, i in zip(axes, (1, max(last // 3, 1), max(2 * last // 3, 1), last), strict=True):
        size, (H, W) = layers[i - 1].size, layers[0].size
        token = [int(share * n) for share, n in zip(start, size, strict=True)]
        rows, columns = (fields(layers[:i], axis, token[axis]) for axis in (0, 1))
        bare(ax, f"block {i}").set(xlim=(0, W), ylim=(H, 0), aspect="equal")
        ax.spines[:].set_visible(True)
        for shade, (top, bottom), (left, right) in zip(
            range(i, 0, -1), rows[::-1], columns[::-1], strict=True
        ):
            box = Rectangle((left, top), right + 1 - left, bottom + 1 - top)
            ax.add_patch(box)
            box.set(facecolor=BLUES(0.9 - 0.65 * (shade - 1) / max(i - 1, 1)), edgecolor="white")
        ax.plot(
            (token[1] + 0.5) * W / size[1],
            (token[0] + 0.5) * H / size[0],
            "x",
            color=ORANGE,
            markersize=7,
            markeredgewidth=2,
        )
    return figure
