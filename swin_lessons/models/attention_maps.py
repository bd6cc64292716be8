"""Who attends to whom in a Swin: the weights of every block, moved from windows to the whole map."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import WindowAttention
from .windows import Size, cyclic_shift, fit_window, shift_mask, window_partition


@dataclass(frozen=True)
class AttentionMap:
    """The attention of one block on one batch.

    Attributes:
        size: the map's height and width in tokens.
        window, shift: as the block used them.
        weights: `(B, num_heads, HW, HW)`, query then key, in raster order; a query's weights add up to 1.
    """

    size: Size
    window: Size
    shift: Size
    weights: Tensor


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> list[AttentionMap]:
    """Run `model` on `images` `(B, C, H, W)` and return the attention of each of its window blocks, in order.

    Raises:
        ValueError: the model has no window attention, or windows do not tile one of its maps.
    """
    with attention_inputs(model) as seen:
        model(images)
    if not seen:
        raise ValueError(f"{type(model).__name__} has no window attention to show")
    return [attention_map(attn, x) for attn, x in seen]


@contextmanager
def attention_inputs(model: nn.Module) -> Iterator[list[tuple[WindowAttention, Tensor]]]:
    """What each attention gets: a list that fills while the model runs. Hooks also choose the readable path."""
    seen: list[tuple[WindowAttention, Tensor]] = []
    layers = [m for m in model.modules() if isinstance(m, WindowAttention)]
    handles = [m.register_forward_pre_hook(lambda m, args: seen.append((m, args[0]))) for m in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def attention_map(attn: WindowAttention, x: Tensor) -> AttentionMap:
    """The weights of one attention on the map `(B, H, W, C)` that it gets.

    Raises:
        ValueError: windows do not tile the map.
    """
    B, H, W, _ = x.shape
    window, shift = fit_window((H, W), attn.window_size, attn.shift_size)
    if H % window[0] or W % window[1]:
        raise ValueError(f"windows of {window} do not tile a map of {(H, W)}: choose another image size")
    weights = _weights(attn, x, window, shift)  # (B * num_windows, num_heads, N, N)
    raster = torch.arange(H * W, device=x.device).reshape(1, H, W, 1)
    order = window_partition(cyclic_shift(raster, shift), window).squeeze(-1)  # (num_windows, N)
    weights = weights.unflatten(0, (B, len(order))).transpose(1, 2)  # (B, num_heads, num_windows, N, N)
    whole = weights.new_zeros(B, attn.num_heads, H * W, H * W)
    whole[:, :, order[:, :, None], order[:, None, :]] = weights
    return AttentionMap((H, W), window, shift, whole)


def _weights(attn: WindowAttention, x: Tensor, window: Size, shift: Size) -> Tensor:
    """The softmax within windows, as `WindowAttention.forward` works it out."""
    windows = window_partition(cyclic_shift(x, shift), window)
    n, N, C = windows.shape
    qkv = attn.project_qkv(windows).reshape(n, N, 3, attn.num_heads, C // attn.num_heads)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    q, k = attn.scale_qk(q, k)
    scores = q @ k.transpose(-2, -1) + attn.current_bias(window)
    if shift != (0, 0):
        allowed = shift_mask(x.shape[1], x.shape[2], window, shift, x.device).repeat(x.shape[0], 1, 1)
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    return scores.softmax(-1)
