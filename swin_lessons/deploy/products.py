"""Matrix products of a prepared model: the weight is packed once, and what follows a product happens on its way out.

oneDNN, the library behind PyTorch on x86, adds a bias, applies a GELU, adds a residual and requantises while a result
is still in registers. PyTorch reaches these fusions by private operators only. They are called in this file and nowhere
else, and each has a plain fallback with the same numbers.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_lessons.models.fast import HAS_AVX512

__all__ = ["FloatProduct", "Int8Product", "Product", "quantize"]

PACK_FROM = 1 << 14  # weights; a smaller matrix does not repay oneDNN's set-up at each call
GELU: tuple[str, list, str] = ("gelu", [], "none")
NOTHING: tuple[str, list, str] = ("none", [], "")
FP32 = (1.0, 0, torch.float32)  # scale, zero point and dtype of a result that is not quantised


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


class Product(Protocol):
    """A linear layer whose weight is packed: `FloatProduct` or `Int8Product`."""

    out_features: int

    def take(self, x: Tensor) -> Tensor:
        """Bring rows into the form that the product reads."""

    def __call__(self, x: Tensor, gelu: bool = False, then: Any = None) -> Tensor:
        """The product, in the form that `then` reads."""

    def add_to(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows` plus the product; may overwrite `rows`."""


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

    def __call__(self, x: Tensor, gelu: bool = False, then: Product | None = None) -> Tensor:
        """`(M, K)` -> `(M, O)` after a GELU if asked, in the form that `then` takes."""
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, *(GELU if gelu else NOTHING))
        else:
            y = F.linear(x, self.weight, self.bias)
            y = F.gelu(y) if gelu else y
        return y if then is None else then.take(y)

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
        input_zero_point: the uint8 that stands for 0.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input_scale: float,
        input_zero_point: int,
    ) -> None:
        self.packed = weight.device.type == "cpu" and has_int8_products()
        self.out_features = weight.shape[0]
        self.weight = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None) if self.packed else weight
        self.weight_scale = weight_scale.float().contiguous()
        self.weight_zero_point = torch.zeros(len(weight), dtype=torch.int32)
        self.bias = None if bias is None else bias.float()
        self.scale, self.zero_point = float(input_scale), int(input_zero_point)

    def take(self, x: Tensor) -> Tensor:
        """Quantise `(M, K)` for this product: uint8."""
        return quantize(x, self.scale, self.zero_point)

    def __call__(self, x: Tensor, gelu: bool = False, then: Product | None = None) -> Tensor:
        """Quantised `(M, K)` -> `(M, O)` after a GELU if asked: in fp32, or in the form that `then` takes."""
        if self.packed and isinstance(then, Int8Product):
            return self._multiply(x, gelu, then.scale, then.zero_point, torch.uint8)
        y = self._multiply(x, gelu) if self.packed else self._exactly(x, gelu)
        return y if then is None else then.take(y)

    def add_to(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows` plus the product, fp32; `rows` is overwritten."""
        if self.packed:
            args = (*self._operands(x), rows, self.bias, *FP32, 1.0, 0, "sum", 1.0, *NOTHING)
            return torch.ops.onednn.qlinear_pointwise.binary(*args)
        return rows.add_(self._exactly(x))

    def _multiply(self, x: Tensor, gelu: bool, *out: Any) -> Tensor:
        """By oneDNN; `out` is the scale, zero point and dtype of the result, fp32 by default."""
        args = (*self._operands(x), self.bias, *(out or FP32), *(GELU if gelu else NOTHING))
        return torch.ops.onednn.qlinear_pointwise(*args)

    def _operands(self, x: Tensor) -> tuple[Any, ...]:
        return x, self.scale, self.zero_point, self.weight, self.weight_scale, self.weight_zero_point

    def _exactly(self, x: Tensor, gelu: bool = False) -> Tensor:
        """By fp64, which holds every sum of products of bytes exactly."""
        sums = (x.double() - self.zero_point) @ self.weight.double().t()
        y = (sums * self.scale * self.weight_scale.double()).float()
        y = y if self.bias is None else y + self.bias
        return F.gelu(y) if gelu else y


def quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """`clamp(round(x / scale) + zero_point)` as uint8; halves round to even."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _has_quantized_tensors():
        codes = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
        plain = torch.empty(0, dtype=torch.uint8)  # the same bytes: int_repr() would copy them, slowly
        return plain.set_(codes.untyped_storage(), 0, codes.shape, codes.stride())
    return (x.float() / scale).round_().add_(zero_point).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=1)
def _has_quantized_tensors() -> bool:
    """One vectorised pass over memory, where the lines above need five; PyTorch has deprecated it and says so once."""
    if not hasattr(torch, "quantize_per_tensor"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
    return True
