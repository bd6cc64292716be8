"""What makes a Swin Transformer, as one frozen data class that refuses what cannot be built."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal, get_args

from .fused import kernel_parts
from .windows import Size, fit_window

Attention = Literal["auto", "reference", "sdpa", "triton"]
NUMBERS: dict[Any, tuple[type, str]] = {  # a field's type -> what its values must be
    int: (Integral, "a whole number"),
    tuple[int, ...]: (Integral, "whole numbers"),
    float: (Real, "a number"),
}


def pair(value: int | Sequence[int]) -> Size:
    """`7` -> `(7, 7)`; `(7, 9)` stays."""
    values = [value, value] if isinstance(value, Integral) else value
    if not isinstance(values, Sequence) or [isinstance(v, Integral) for v in values] != [True, True]:
        raise ValueError(f"a size is one whole number or (height, width), not {value!r}")
    return int(values[0]), int(values[1])


def check_numbers(config: Any) -> None:
    """Refuse a text or a fraction where a field of a data class is a whole number, and a text where it is a number.

    Raises:
        ValueError: with the field's name and value.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        kind, words = NUMBERS.get(field.type, (object, ""))
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, kind) or (kind is Integral and isinstance(number, bool)):
                raise ValueError(f"{field.name}={value!r}: give {words}")


@dataclass(frozen=True)
class SwinConfig:
    """Everything that makes a Swin Transformer. Sizes are in pixels (`img_size`) or tokens (windows)."""

    version: int = 1
    img_size: Size = (224, 224)
    patch_size: int = 4
    in_chans: int = 3
    num_classes: int = 1000
    embed_dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    window_size: Size = (7, 7)
    pretrained_window_sizes: tuple[int, ...] = (0, 0, 0, 0)  # V2: one a stage, 0 for the stage's own window
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    absolute_pos_embed: bool = False
    patch_norm: bool = True
    drop_rate: float = 0.0  # before the classifier
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    extra_norm_every: int = 0  # V2-H and V2-G: a LayerNorm on the main branch after so many blocks of a stage
    attention: Attention = "auto"
    kernels: str = "torch"
    window_chunk: int = 0
    checkpointing: bool = False

    def __post_init__(self):
        _validate(self)

    @property
    def dims(self) -> list[int]:
        """Channels of each stage."""
        return [self.embed_dim << i for i in range(len(self.depths))]

    def grids(self) -> list[Size]:
        """The map's size in each stage, in tokens; odd sizes round up."""
        grid = pair([-(-s // self.patch_size) for s in self.img_size])
        sizes = [grid]
        for _ in self.depths[1:]:
            grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
            sizes.append(grid)
        return sizes


def _validate(c: SwinConfig) -> None:
    check_numbers(c)
    if c.version not in (1, 2):
        raise ValueError(f"version={c.version}: Swin has versions 1 and 2")
    if len({len(c.depths), len(c.num_heads), len(c.pretrained_window_sizes)}) != 1:
        raise ValueError(
            f"depths={c.depths}, num_heads={c.num_heads} and pretrained_window_sizes={c.pretrained_window_sizes} "
            "must have one value a stage"
        )
    for name in ("patch_size", "in_chans", "embed_dim"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 1")
    if min(*c.img_size, *c.window_size, *c.depths, *c.num_heads) < 1:
        raise ValueError(
            f"img_size={c.img_size}, window_size={c.window_size}, depths={c.depths} and num_heads={c.num_heads} "
            "must be positive"
        )
    for dim, heads in zip(c.dims, c.num_heads, strict=True):
        if dim % heads:
            raise ValueError(
                f"{dim} channels do not divide into {heads} heads; change embed_dim or num_heads"
            )
    for name in ("drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"):
        if not 0.0 <= getattr(c, name) <= 1.0:
            raise ValueError(f"{name}={getattr(c, name)} is a probability: choose 0 to 1")
    if c.num_classes < 0:
        raise ValueError(f"num_classes={c.num_classes}: choose 0 (no classifier) or more")
    if c.window_chunk < 0:
        raise ValueError(f"window_chunk={c.window_chunk}: choose 0 (all windows at once) or more")
    if c.mlp_ratio <= 0:
        raise ValueError(f"mlp_ratio={c.mlp_ratio} must be positive")
    if c.attention not in get_args(Attention):
        raise ValueError(f"attention={c.attention!r}: choose one of {', '.join(get_args(Attention))}")
    kernel_parts(c.kernels)


def stage_config(config: SwinConfig, stage: int) -> SwinConfig:
    """The configuration as one stage sees it: a window no larger than its map."""
    window, _ = fit_window(config.grids()[stage], config.window_size, (0, 0))
    return replace(config, window_size=window)


def drop_path_rates(config: SwinConfig) -> list[list[float]]:
    """Rates that grow linearly over all blocks, from 0 to `drop_path_rate`, cut into stages."""
    total = sum(config.depths)
    rates = [config.drop_path_rate * i / max(total - 1, 1) for i in range(total)]
    starts = [sum(config.depths[:i]) for i in range(len(config.depths) + 1)]
    return [rates[a:b] for a, b in pairwise(starts)]
