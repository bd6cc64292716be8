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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .fast import autocast_on, is_plain, is_symbolic
from .windows import Size, fit_window, pad_to_windows, shift_mask, windows_along

if TYPE_CHECKING:
    from .attention import WindowAttention
    from .blocks import SwinBlock
    from .layers import DropPath

PARTS = ("norm", "windows", "mlp")


def kernel_parts(kernels: str) -> frozenset[str]:
    """What `SwinConfig.kernels` asks for: "torch" for nothing, "triton" for all, or some of `PARTS` with + between.

    Raises:
        ValueError: another word, or no word at all.
    """
    if not isinstance(kernels, str):
        raise ValueError(f"kernels={kernels!r}: give a word, such as 'torch' or 'triton'")
    named = {"torch": (), "triton": PARTS}.get(kernels, tuple(kernels.split("+")))
    if not set(named) <= set(PARTS):
        raise ValueError(
            f"kernels={kernels!r}: choose 'torch', 'triton', or parts such as {'+'.join(PARTS)!r}"
        )
    return frozenset(named)


# --- blocks


def runner(block: SwinBlock, parts: frozenset[str], x: Tensor) -> Callable[[Tensor], Tensor]:
    """What runs a block on `x`: itself, or kernels in its place where `parts` asks for them and it allows them.

    `torch.fx` traces symbolically, without sizes or devices to launch a kernel for: it gets the block itself.
    """
    return FusedBlock(block, parts) if parts and not is_symbolic(x) and _allows(block) else block


def _allows(block: SwinBlock) -> bool:
    """May kernels stand in for this block's layers? Not where one is replaced, quantised or watched by a hook."""
    layers = (block.norm1, block.norm2, block.mlp.fc1)
    ordinary = all(type(layer) in (nn.LayerNorm, nn.Linear) for layer in layers)
    return (
        ordinary
        and block.mlp.act.approximate == "none"
        and is_plain(block, *layers, block.mlp, block.mlp.act)
    )


@dataclass(frozen=True)
class FusedBlock:
    """Calls a block's layers as the block does, the `parts` of them by kernels: `(B, H, W, C)` -> the same."""

    block: SwinBlock
    parts: frozenset[str]

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward_v2(x) if hasattr(self.block, "norm3") else self.forward_v1(x)

    def forward_v1(self, x: Tensor) -> Tensor:
        """`SwinBlock.forward`."""
        x, y = self._attention_v1(x)
        return x + self.block.drop_path2(self.mlp(y))

    def _attention_v1(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The map behind the first residual addition, plain and normalised for the MLP."""
        block, read = self.block, read_dtype(x)
        if self._moves_windows():
            from swin_lessons.kernels import reverse_unshift

            windows, window, shift = self._cut_and_attend(x, block.norm1)
            windows = block.drop_path1(windows.reshape(len(x), -1, x.shape[-1])).reshape(windows.shape)
            return reverse_unshift(
                windows, x, window, shift, *_parameters(block.norm2), order="pre", dtype=read, impl="triton"
            )
        branch = block.drop_path1(block.attn(self.norm(block.norm1, x, read)))
        if "norm" not in self.parts:
            x = x + branch
            return x, block.norm2(x)
        from swin_lessons.kernels import add_layer_norm

        return add_layer_norm(x, branch, *_parameters(block.norm2), dtype=read, impl="triton")

    def forward_v2(self, x: Tensor) -> Tensor:
        """`SwinBlockV2.forward`."""
        block = self.block
        x = self._attention_v2(x)
        x = self.add_normed(x, self.mlp(x), block.norm2, block.drop_path2)
        return self.norm(block.norm3, x) if isinstance(block.norm3, nn.LayerNorm) else x

    def _attention_v2(self, x: Tensor) -> Tensor:
        """The map behind the first residual addition."""
        block = self.block
        if not self._moves_windows():
            return self.add_normed(x, block.attn(x), block.norm1, block.drop_path1)
        from swin_lessons.kernels import reverse_unshift

        windows, window, shift = self._cut_and_attend(x)
        if not _drops(block.drop_path1):
            return reverse_unshift(
                windows, x, window, shift, *_parameters(block.norm1), order="post", impl="triton"
            )
        windows = self.norm(block.norm1, windows, x.dtype).reshape(len(x), -1, x.shape[-1])
        windows = block.drop_path1(windows).reshape(-1, window[0] * window[1], x.shape[-1])
        return reverse_unshift(windows, x, window, shift, impl="triton")

    # --- their parts

    def _moves_windows(self) -> bool:
        return "windows" in self.parts and self.block.attn.attention != "triton"

    def _cut_and_attend(self, x: Tensor, layer: nn.LayerNorm | None = None) -> tuple[Tensor, Size, Size]:
        """Windows behind attention, still in window order, and the window and shift that they were cut with."""
        from swin_lessons.kernels import shift_partition

        attn, (H, W) = self.block.attn, x.shape[1:3]
        window, shift = fit_window((H, W), attn.window_size, attn.shift_size)
        before, read = (_parameters(layer), read_dtype(x)) if layer else ((), None)
        windows = shift_partition(x, window, shift, *before, dtype=read, impl="triton")
        mask = None
        if shift != (0, 0):
            Hp, Wp = (windows_along(size, w) * w for size, w in zip((H, W), window, strict=True))
            mask = shift_mask(Hp, Wp, window, shift, x.device).repeat(len(x), 1, 1)
        return attn.attend_windows(windows, window, mask), window, shift

    def add_normed(self, x: Tensor, branch: Tensor, layer: nn.LayerNorm, drop_path: DropPath) -> Tensor:
        """`x + drop_path(layer(branch))`, in one pass unless images are dropped."""
        if "norm" not in self.parts or _drops(drop_path):
            return x + drop_path(self.norm(layer, branch, x.dtype))
        from swin_lessons.kernels import add_layer_norm

        return add_layer_norm(x, branch, *_parameters(layer), order="post", impl="triton")

    def mlp(self, x: Tensor) -> Tensor:
        """`Mlp.forward`."""
        mlp = self.block.mlp
        if "mlp" not in self.parts:
            return mlp(x)
        from swin_lessons.kernels import linear_gelu

        hidden = linear_gelu(x, mlp.fc1.weight, mlp.fc1.bias, impl="triton")
        return mlp.drop(mlp.fc2(mlp.drop(hidden)))

    def norm(self, layer: nn.LayerNorm, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`nn.LayerNorm.forward`, into `dtype` where a kernel runs it."""
        if "norm" not in self.parts:
            return layer(x)
        from swin_lessons.kernels import layer_norm

        return layer_norm(x, *_parameters(layer), dtype=dtype, impl="triton")


def read_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer would read `x` in: under autocast its dtype, so that no pass is spent on the cast."""
    return torch.get_autocast_dtype(x.device.type) if autocast_on(x.device) else x.dtype


def _drops(drop_path: DropPath) -> bool:
    return drop_path.rate > 0 and drop_path.training


def _parameters(layer: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return layer.weight, layer.bias, layer.eps


# --- attention


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
