"""Multiply-accumulates of one call of an operation, from the shapes of its arguments and its result.

`FORMULAS` maps an operation to (kind, formula). A formula gets the result, then the call's own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMULAS", "Formula"]

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


def norm(out: Any, x: Tensor, *_: Any, **__: Any) -> int:
    """One for each normalised element."""
    return x.numel()


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
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # oneDNN's packed linear, CPU builds of PyTorch
    FORMULAS[torch.ops.mkldnn._linear_pointwise] = ("linear", matmul)
