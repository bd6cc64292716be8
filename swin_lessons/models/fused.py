"""A Swin block by fused kernels: each LayerNorm beside its residual addition, attention that never moves a window.

Maps stay `(B, H, W, C)`. Windows, shift and mask exist only as index arithmetic within the attention kernel
(`attention="triton"`). `kernels="triton"` does what calling the block does, with the same parameters, by the
operations of `swin_lessons.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .windows import fit_window, pad_to_windows

if TYPE_CHECKING:
    from .attention import WindowAttention
    from .blocks import SwinBlock
    from .layers import DropPath, Mlp


def attention_map(attn: WindowAttention, x: Tensor) -> Tensor:
    """`WindowAttention.forward` by one kernel between the two linear layers: `(B, H, W, C)` -> the same."""
    from swin_lessons.kernels import window_attention

    H, W = x.shape[1:3]
    window, shift = fit_window((H, W), attn.window_size, attn.shift_size)
    dropout = attn.attn_drop if attn.training else 0.0
    out = window_attention(
        attn.project_qkv(pad_to_windows(x, window)),
        attn.current_bias(window),
        window,
        shift,
        num_heads=attn.num_heads,
        dropout=dropout,
        seed=int(torch.randint(2**31, ())) if dropout else 0,
        impl="triton",
        **attn.kernel_scale(),
    )
    return attn.proj_drop(attn.proj(out[:, :H, :W]))


def block_v1(block: SwinBlock, x: Tensor) -> Tensor:
    """`SwinBlock.forward`: the first residual addition and the second norm are one pass."""
    from swin_lessons.kernels import add_layer_norm

    branch = block.drop_path1(block.attn(norm(block.norm1, x)))
    x, y = add_layer_norm(x, branch, *_parameters(block.norm2), impl="triton")
    return x + block.drop_path2(mlp(block.mlp, y))


def block_v2(block: SwinBlock, x: Tensor) -> Tensor:
    """`SwinBlockV2.forward`: each norm and the addition behind it are one pass."""
    x = add_normed(x, block.attn(x), block.norm1, block.drop_path1)
    x = add_normed(x, mlp(block.mlp, x), block.norm2, block.drop_path2)
    return x if isinstance(block.norm3, nn.Identity) else norm(block.norm3, x)


def add_normed(x: Tensor, branch: Tensor, layer: nn.LayerNorm, drop_path: DropPath) -> Tensor:
    """`x + drop_path(layer(branch))`, in one pass unless images are dropped."""
    from swin_lessons.kernels import add_layer_norm

    if drop_path.rate and drop_path.training:
        return x + drop_path(norm(layer, branch))
    return add_layer_norm(x, branch, *_parameters(layer), order="post", impl="triton")


def mlp(layers: Mlp, x: Tensor) -> Tensor:
    """`Mlp.forward` with the first layer's bias and GELU in its product."""
    from swin_lessons.kernels import linear_gelu

    hidden = linear_gelu(x, layers.fc1.weight, layers.fc1.bias, impl="triton")
    return layers.drop(layers.fc2(layers.drop(hidden)))


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """`nn.LayerNorm.forward`."""
    from swin_lessons.kernels import layer_norm

    return layer_norm(x, *_parameters(layer), impl="triton")


def _parameters(layer: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return layer.weight, layer.bias, layer.eps
