"""Matrix products of a prepared model: the weight is packed once, and what follows a product happens on its way out.

oneDNN, the library behind PyTorch on x86, adds a bias, applies a GELU, adds a residual and requantises while a result
is still in registers. PyTorch reaches these fusions by private operators only. They are called in this file and nowhere
else, and each has a plain fallback with the same numbers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_lessons.models.fast import HAS_AVX512

__all__ = ["FloatProduct", "Int8Product", "quantize"]

PACK_FROM = 1 << 14  # weights; a smaller matrix does not repay oneDNN's set-up at each call
GELU: tuple[str, list, str] = ("gelu", [], "none")
NOTHING: tuple[str, list, str] = ("none", [], "")


def _has(namespace: str, *names: str) -> bool:
    """Does this PyTorch have these operators?"""
    return all(hasattr(getattr(torch.ops, namespace), name) for name in names)


def has_packed_products() -> bool:
    """Can floating-point weights be packed for oneDNN, and does it pay (x86 with AVX-512)?"""
    operators = _has("mkldnn", "_linear_pointwise", "_reorder_linear_weight")
    return bool(HAS_AVX512 and operators and torch.backends.mkldnn.enabled)


def has_int8_products() -> bool:
    """Does oneDNN multiply int8 here, without 16-bit sums on the way that could saturate (x86 with VNNI or AMX)?"""
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return bool(vnni()) and _has("onednn", "qlinear_pointwise", "qlinear_prepack")


class FloatProduct:
    """`x @ weight.T + bias` in fp32 or bf16.

    Args:
        weight: `(O, K)`.
        bias: `(O,)` or None.
        dtype: of operands and result; sums are fp32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.packed = weight.device.type == "cpu" and weight.numel() >= PACK_FROM and has_packed_products()
        self.dtype, self.out_features = dtype, weight.shape[0]
        weight = weight.to(dtype).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight
        self.bias = None if bias is None else bias.to(dtype)

    def take(self, x: Tensor) -> Tensor:
        """Bring `(M, K)` into the form that this product reads."""
        return x.to(self.dtype)

    def __call__(self, x: Tensor, gelu: bool = False, then: FloatProduct | None = None) -> Tensor:
        """`(M, K)` -> `(M, O)`, after a GELU if asked; in the form that the product `then` takes."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, *(GELU if gelu else NOTHING))
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y) if gelu else y

    def add_to(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows + x @ weight.T + bias`: `(M, O)` and `(M, K)` -> `(M, O)`."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, rows, self.weight, self.bias, "add")
        return rows + F.linear(x, self.weight, self.bias)


class Int8Product:
    """A product of 8-bit integers with 32-bit sums, dequantised on its way out.

    `y[m, o] = input_scale * weight_scale[o] * sum_k (x[m, k] - input_zero_point) * weight[o, k] + bias[o]`

    Args:
        weight: `(O, K)` int8.
        weight_scale: `(O,)`, positive.
        bias: `(O,)` fp32 or None.
        input_scale: of the activations that come in.
        input_zero_point: the integer that stands for 0; 0 with `input_dtype` int8, 0 to 255 with uint8.
        input_dtype: torch.int8 or torch.uint8.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input_scale: float,
        input_zero_point: int = 0,
        input_dtype: torch.dtype = torch.int8,
    ) -> None:
        self.packed = weight.device.type == "cpu" and has_int8_products()
        self.out_features = weight.shape[0]
        self.weight = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None) if self.packed else weight
        self.weight_scale = weight_scale.float().contiguous()
        self.weight_zero_point = torch.zeros(len(weight), dtype=torch.int32)
        self.bias = None if bias is None else bias.float()
        self.scale, self.zero_point, self.dtype = float(input_scale), int(input_zero_point), input_dtype

    def take(self, x: Tensor) -> Tensor:
        """Quantise `(M, K)` for this product."""
        return quantize(x, self.scale, self.zero_point, self.dtype)

    def __call__(self, x: Tensor, gelu: bool = False, then: Int8Product | None = None) -> Tensor:
        """Quantised `(M, K)` -> `(M, O)` after a GELU if asked: quantised for the product `then`, or in fp32."""
        out = (1.0, 0, torch.float32) if then is None else (then.scale, then.zero_point, then.dtype)
        if self.packed:
            after = GELU if gelu else NOTHING
            return torch.ops.onednn.qlinear_pointwise(*self._operands(x), self.bias, *out, *after)
        y = self._exactly(x)
        y = F.gelu(y) if gelu else y
        return y if then is None else then.take(y)

    def add_to(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows` plus the product, fp32; `rows` is overwritten."""
        if self.packed:
            out, other = (1.0, 0, torch.float32), (1.0, 0, "sum", 1.0)
            args = (*self._operands(x), rows, self.bias, *out, *other, *NOTHING)
            return torch.ops.onednn.qlinear_pointwise.binary(*args)
        return rows.add_(self._exactly(x))

    def _operands(self, x: Tensor) -> tuple[Any, ...]:
        return x, self.scale, self.zero_point, self.weight, self.weight_scale, self.weight_zero_point

    def _exactly(self, x: Tensor) -> Tensor:
        """By fp64, which holds every sum of products of bytes exactly."""
        sums = (x.double() - self.zero_point) @ self.weight.double().t()
        y = (sums * self.scale * self.weight_scale.double()).float()
        return y if self.bias is None else y + self.bias


def quantize(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """`clamp(round(x / scale) + zero_point)` to int8 or uint8; halves round to even."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and hasattr(torch, "quantize_per_tensor"):
        kind = torch.quint8 if dtype == torch.uint8 else torch.qint8
        with warnings.catch_warnings():  # it is deprecated: then the lines below take over
            warnings.simplefilter("ignore")
            return torch.quantize_per_tensor(x, scale, zero_point, kind).int_repr()
    limits = torch.iinfo(dtype)
    return (x.float() * (1 / scale)).round_().add_(zero_point).clamp_(limits.min, limits.max).to(dtype)
