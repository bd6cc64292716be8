"""Multiply-accumulates of one call of an operation, from the shapes of its arguments and its result.

`FORMULAS` maps an operation to (kind, formula); the fused kernels' operations, which need not be loaded, stand there by
name. A formula gets the result, then the call's own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMULAS", "Formula", "formula_of"]

Formula = Callable[..., int]  # (result, *args, **kwargs of the operation) -> MACs
aten = torch.ops.aten


def matmul(out: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    """(..., N, K) @ (..., K, M): K for each element of the result."""
    return out.numel() * a.shape[-1]


def addmm(out: Tensor, bias: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    """bias + a @ b: the bias is free, as in every published count."""
    return out.numel() * a.shape[-1]


def convolution(out: Tensor, x: Tensor, weight: Tensor, *args: Any, **__: Any) -> int:
    """Each weight meets each output pixel once; in a transposed convolution, each input pixel."""
    transposed = args[4]  # after bias, stride, padding, dilation
    pixels = x if transposed else out
    return pixels.shape[0] * math.prod(pixels.shape[2:]) * weight.numel()


def attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """q @ k: (..., N, S) from d channels; attn @ v: (..., N, dv) from S tokens."""
    return q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def linear_gelu(out: Any, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """(..., K) @ (K, N); the first of two results is as large as the product."""
    return out[0].numel() * weight.shape[1]


def norm(out: Any, x: Tensor, *_: Any, **__: Any) -> int:
    """One for each normalised element."""
    return x.numel()


def windows_norm(out: Any, windows: Tensor, shortcut: Tensor, *_: Any, **__: Any) -> int:
    """`reverse_unshift`: one for each element of the map; windows hold padding too."""
    return shortcut.numel()


def windows_attention(out: Any, qkv: Tensor, bias: Tensor, *_: Any, **__: Any) -> int:
    """Scores and the sum over values: N for each of the C numbers of a token, twice."""
    return 2 * (qkv.numel() // 3) * bias.shape[-1]


def windows_attention_backward(out: Any, d_out: Tensor, qkv: Tensor, bias: Tensor, *_: Any, **__: Any) -> int:
    """Scores again, and the gradients of the probabilities, v, q and k: five products."""
    return 5 * d_out.numel() * bias.shape[-1]


FORMULAS: dict[Any, tuple[str, Formula]] = {
    aten.mm: ("linear", matmul),
    aten._int_mm: ("linear", matmul),
    aten._scaled_mm: ("linear", matmul),
    aten.linear: ("linear", matmul),
    aten.addmm: ("linear", addmm),
    aten._addmm_activation: ("linear", addmm),
    aten.bmm: ("attention", matmul),
    aten.baddbmm: ("attention", addmm),
    aten.convolution: ("conv", convolution),
    aten._scaled_dot_product_flash_attention: ("attention", attention),
    aten._scaled_dot_product_flash_attention_for_cpu: ("attention", attention),
    aten._scaled_dot_product_efficient_attention: ("attention", attention),
    aten._scaled_dot_product_cudnn_attention: ("attention", attention),
    aten._scaled_dot_product_fused_attention_overrideable: ("attention", attention),
    aten._scaled_dot_product_attention_math_for_mps: ("attention", attention),
    aten.native_layer_norm: ("norm", norm),
    aten._fused_rms_norm: ("norm", norm),
    aten.native_group_norm: ("norm", norm),
    aten.native_batch_norm: ("norm", norm),
    aten._native_batch_norm_legit_no_training: ("norm", norm),
    aten.cudnn_batch_norm: ("norm", norm),
    aten.miopen_batch_norm: ("norm", norm),
    "swin_lessons::norm": ("norm", norm),
    "swin_lessons::shift_partition": ("norm", norm),
    "swin_lessons::reverse_unshift": ("norm", windows_norm),
    "swin_lessons::linear_gelu": ("linear", linear_gelu),
    "swin_lessons::window_attention": ("attention", windows_attention),
    "swin_lessons::window_attention_backward": ("attention", windows_attention_backward),
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # oneDNN's packed linear, CPU builds of PyTorch
    FORMULAS[torch.ops.mkldnn._linear_pointwise] = ("linear", matmul)


def formula_of(
    func: Any, formulas: Mapping[Any, tuple[str, Formula]] = FORMULAS
) -> tuple[str, Formula] | None:
    """(kind, formula) of an operation that reached the dispatcher; None where it is not counted."""
    return formulas.get(func._overloadpacket) or formulas.get(func._schema.name)
