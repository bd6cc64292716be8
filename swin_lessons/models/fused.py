"""A Swin block by fused kernels: the same parameters, the same numbers, fewer passes over memory.

Three parts can be fused, each on its own (`kernels="norm+windows"`) or all (`kernels="triton"`):

* `norm`: LayerNorm together with the residual addition beside it;
* `windows`: norm, shift and partition in one pass; reverse, un-shift, addition and norm in another;
* `mlp`: the first layer of the MLP with its bias and GELU.

`attention="triton"` fuses what lies between the two linear layers of attention. It finds its windows by index
arithmetic, so nothing is moved any more, and `windows` has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .fast import is_plain
from .windows import fit_window, pad_to_windows, shift_mask, windows_along

if TYPE_CHECKING:
    from .attention import WindowAttention
    from .blocks import SwinBlock
    from .layers import DropPath, Mlp

PARTS = ("norm", "windows", "mlp")


def kernel_parts(kernels: str) -> frozenset[str]:
    """What `SwinConfig.kernels` asks for: "torch" for nothing, "triton" for all, or some of `PARTS` with + between.

    Raises:
        ValueError: another word.
    """
    named = {"torch": (), "triton": PARTS}.get(kernels, tuple(kernels.split("+")))
    if not set(named) <= set(PARTS):
        raise ValueError(
            f"kernels={kernels!r}: choose 'torch', 'triton', or parts such as {'+'.join(PARTS)!r}"
        )
    return frozenset(named)


# --- blocks


def allowed(block: SwinBlock) -> bool:
    """May kernels stand in for this block's layers? Not where one is replaced, quantised or watched by a hook."""
    layers = (block.norm1, block.norm2, block.mlp.fc1)
    ordinary = all(type(layer) in (nn.LayerNorm, nn.Linear) for layer in layers)
    return (
        ordinary
        and block.mlp.act.approximate == "none"
        and is_plain(block, *layers, block.mlp, block.mlp.act)
    )


def runner(block: SwinBlock) -> Callable[[Tensor], Tensor]:
    """What runs a block: the block itself, or kernels where its model asks for them."""
    if not block.attn.parts or not allowed(block):
        return block
    return partial(block_v2 if hasattr(block, "norm3") else block_v1, block)


def block_v1(block: SwinBlock, x: Tensor) -> Tensor:
    """`SwinBlock.forward`: `(B, H, W, C)` -> the same."""
    x, y = _attention_v1(block, x)
    return x + block.drop_path2(mlp(block, y))


def _attention_v1(block: SwinBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    """The map behind the first residual addition, plain and normalised for the MLP."""
    if _moves_windows(block):
        from swin_lessons.kernels import reverse_unshift

        windows, window, shift = _cut_and_attend(block, x, block.norm1)
        windows = block.drop_path1(windows.reshape(len(x), -1, x.shape[-1])).reshape(windows.shape)
        return reverse_unshift(
            windows, x, window, shift, *_parameters(block.norm2), order="pre", impl="triton"
        )
    branch = block.drop_path1(block.attn(norm(block, block.norm1, x)))
    if "norm" not in block.attn.parts:
        return x + branch, block.norm2(x + branch)
    from swin_lessons.kernels import add_layer_norm

    return add_layer_norm(x, branch, *_parameters(block.norm2), impl="triton")


def block_v2(block: SwinBlock, x: Tensor) -> Tensor:
    """`SwinBlockV2.forward`: `(B, H, W, C)` -> the same."""
    x = _attention_v2(block, x)
    x = add_normed(block, x, mlp(block, x), block.norm2, block.drop_path2)
    return norm(block, block.norm3, x) if isinstance(block.norm3, nn.LayerNorm) else x


def _attention_v2(block: SwinBlock, x: Tensor) -> Tensor:
    """The map behind the first residual addition."""
    if not _moves_windows(block):
        return add_normed(block, x, block.attn(x), block.norm1, block.drop_path1)
    from swin_lessons.kernels import reverse_unshift

    windows, window, shift = _cut_and_attend(block, x)
    if not _drops(block.drop_path1):
        return reverse_unshift(
            windows, x, window, shift, *_parameters(block.norm1), order="post", impl="triton"
        )
    windows = norm(block, block.norm1, windows).reshape(len(x), -1, x.shape[-1])
    windows = block.drop_path1(windows).reshape(-1, window[0] * window[1], x.shape[-1])
    return reverse_unshift(windows, x, window, shift, impl="triton")


# --- their parts


def _moves_windows(block: SwinBlock) -> bool:
    return "windows" in block.attn.parts and block.attn.attention != "triton"


def _drops(drop_path: DropPath) -> bool:
    return drop_path.rate > 0 and drop_path.training


def _cut_and_attend(block: SwinBlock, x: Tensor, layer: nn.LayerNorm | None = None):
    """Windows behind attention, still in window order, and the window and shift that they were cut with."""
    from swin_lessons.kernels import shift_partition

    H, W = x.shape[1:3]
    window, shift = fit_window((H, W), block.attn.window_size, block.attn.shift_size)
    before = _parameters(layer) if layer else ()
    windows = shift_partition(x, window, shift, *before, impl="triton")
    mask = None
    if shift != (0, 0):
        Hp, Wp = (windows_along(size, w) * w for size, w in zip((H, W), window, strict=True))
        mask = shift_mask(Hp, Wp, window, shift, x.device).repeat(len(x), 1, 1)
    return block.attn.attend_windows(windows, window, mask), window, shift


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


def add_normed(
    block: SwinBlock, x: Tensor, branch: Tensor, layer: nn.LayerNorm, drop_path: DropPath
) -> Tensor:
    """`x + drop_path(layer(branch))`, in one pass unless images are dropped."""
    if "norm" not in block.attn.parts or _drops(drop_path):
        return x + drop_path(norm(block, layer, branch))
    from swin_lessons.kernels import add_layer_norm

    return add_layer_norm(x, branch, *_parameters(layer), order="post", impl="triton")


def mlp(block: SwinBlock, x: Tensor) -> Tensor:
    """`Mlp.forward`."""
    layers: Mlp = block.mlp
    if "mlp" not in block.attn.parts:
        return layers(x)
    from swin_lessons.kernels import linear_gelu

    hidden = linear_gelu(x, layers.fc1.weight, layers.fc1.bias, impl="triton")
    return layers.drop(layers.fc2(layers.drop(hidden)))


def norm(block: SwinBlock, layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """`nn.LayerNorm.forward`."""
    if "norm" not in block.attn.parts:
        return layer(x)
    from swin_lessons.kernels import layer_norm

    return layer_norm(x, *_parameters(layer), impl="triton")


def _parameters(layer: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return layer.weight, layer.bias, layer.eps
