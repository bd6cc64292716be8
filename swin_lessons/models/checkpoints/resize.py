"""Weights of another size made to fit: bias tables, position embeddings, the patch convolution."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..swin import resize_bias_table
from ..vit import resample_pos_embed

Size = tuple[int, int]


class Misfit(ValueError):
    """A weight that cannot be made to fit; the message says why."""


def fit(name: str, value: Tensor, shape: torch.Size, model: Any, window: Size | None) -> tuple[Tensor, str]:
    """Resize the weight `name` to `shape`; return it with a word on how.

    `window` is the window that the weight was trained with, where the checkpoint names it.

    Raises:
        Misfit: nothing sensible turns one shape into the other.
    """
    if not value.is_floating_point():
        raise Misfit(f"{value.dtype} is no weight to compute with: convert it back to floating point first")
    if name.endswith("relative_position_bias_table"):
        return fit_table(value, shape, _window_of(model, name), window), "bicubic"
    if name == "absolute_pos_embed":
        return fit_absolute(value, shape, model.config.grids()[0]), "bicubic"
    if name == "pos_embed":
        return fit_vit_positions(value, shape, model), "bicubic, antialiased"
    if name == "patch_embed.proj.weight":
        return fit_patch_convolution(value, shape)
    raise Misfit("the model was built with another width, depth or layout")


def fit_table(table: Tensor, shape: torch.Size, after: Size, before: Size | None) -> Tensor:
    """V1's bias table ((2h-1)(2w-1), num_heads) for another window: bicubic, as the authors do."""
    if table.ndim != 2 or table.shape[1] != shape[1]:
        raise Misfit("another number of heads")
    before = before or square_window(table.shape[0])
    if before is None or (2 * before[0] - 1) * (2 * before[1] - 1) != table.shape[0]:
        raise Misfit(
            f"{table.shape[0]} rows are no square window's and the checkpoint does not name its window"
        )
    return resize_bias_table(table, before, after)


def square_window(rows: int) -> Size | None:
    """The side w with (2w - 1)² == rows, as (w, w); None if there is none."""
    side = math.isqrt(rows)
    return ((side + 1) // 2, (side + 1) // 2) if side * side == rows and side % 2 else None


def _window_of(model: Any, name: str) -> Size:
    return tuple(model.get_submodule(name.rpartition(".")[0]).window_size)


def fit_absolute(embed: Tensor, shape: torch.Size, grid: Size) -> Tensor:
    """Swin's absolute position embedding (1, L, C), from a square grid to `grid`, bicubic."""
    side = math.isqrt(embed.shape[1]) if embed.ndim == 3 else 0
    if embed.ndim != 3 or embed.shape[2] != shape[2] or side * side != embed.shape[1]:
        raise Misfit("a square grid of as many channels is needed")
    maps = embed.reshape(1, side, side, -1).permute(0, 3, 1, 2)  # (1, C, H, W)
    maps = F.interpolate(maps, grid, mode="bicubic", align_corners=False)
    return maps.flatten(2).transpose(1, 2)


def fit_vit_positions(embed: Tensor, shape: torch.Size, model: Any) -> Tensor:
    """DeiT's position embedding (1, P + N, C): the square grid is resized, the prefix stays."""
    config = model.config
    prefix = config.num_prefix_tokens
    side = math.isqrt(embed.shape[1] - prefix) if embed.ndim == 3 else 0
    if embed.ndim != 3 or embed.shape[2] != shape[2] or side * side != embed.shape[1] - prefix:
        raise Misfit(f"{prefix} prefix tokens and a square grid of as many channels are needed")
    return resample_pos_embed(embed, (side, side), config.grid_size, prefix)


def fit_patch_convolution(weight: Tensor, shape: torch.Size) -> tuple[Tensor, str]:
    """The patch convolution (C, in_chans, p, p) for other channels or another patch."""
    if weight.ndim != 4 or weight.shape[0] != shape[0]:
        raise Misfit("another embed_dim")
    how = []
    if weight.shape[1] != shape[1]:
        how.append(f"{weight.shape[1]} to {shape[1]} input channels")
        weight = fit_channels(weight, shape[1])
    if weight.shape[2:] != shape[2:]:
        how.append("patch resized, pseudo-inverse of bicubic")
        weight = fit_patch(weight, (shape[2], shape[3]))
    return weight, ", ".join(how)


def fit_channels(weight: Tensor, in_chans: int) -> Tensor:
    """(C, old, p, p) -> (C, in_chans, p, p), so that a grey image gives the same tokens.

    Fewer channels: old ones are summed (3 to 1: their sum). More: they are repeated and share their weight
    (1 to 3: a third each).
    """
    old = weight.shape[1]
    if in_chans < old:
        folded = weight.new_zeros(weight.shape[0], in_chans, *weight.shape[2:])
        return folded.index_add_(1, torch.arange(old, device=weight.device) % in_chans, weight)
    source = torch.arange(in_chans, device=weight.device) % old
    shares = torch.bincount(source)[source]
    return weight[:, source] / shares[:, None, None]


def fit_patch(weight: Tensor, size: Size) -> Tensor:
    """(C, in, p, p) -> (C, in, *size): a patch resized to `size` gives the same token.

    Source: FlexiViT (arXiv:2212.08013), section 3.4: w' = pinv(Bᵀ) w, B the matrix of the bicubic resize.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    old = weight.shape[2] * weight.shape[3]
    basis = torch.eye(old, dtype=wide, device=weight.device).reshape(old, 1, *weight.shape[2:])
    B = F.interpolate(basis, size, mode="bicubic", antialias=True).flatten(1).T  # (new, old)
    new = torch.linalg.pinv(B.T) @ weight.to(wide).flatten(2).transpose(1, 2)  # (C, new, in)
    return new.transpose(1, 2).unflatten(2, size).to(weight.dtype)
