"""Quantised layers: `QuantLinear` and `QuantConv2d` keep the float weight, `IntLinear` and `IntConv2d` hold integers.

A layer is turned into another kind in place (`become_quantized`, `become_integer`, `become_float`): names, hooks and
sharing stay as they are. Both kinds do the same arithmetic, so their results are equal bit for bit: an exact sum of
products of integers, scaled once in fp32, then the output quantiser if any, then the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.models.fast import autocast_on

from .exact import check_depth, exact_product, integer_product, pack_int4, unpack_int4
from .fake import FakeQuantize, Quantizer, is_on, quantized, wide
from .observers import KeepsFloat32

QUANTIZERS = ("input_quant", "weight_quant", "output_quant")


class QuantLinear(nn.Linear):
    """A linear layer whose input, weight and output may be quantised: `(..., K)` -> `(..., O)`.

    Attributes:
        input_quant, weight_quant, output_quant: `Quantizer` or None. The output's stands before the bias is added, as
            FasterTransformer's "aftergemm".
    """

    input_quant: Quantizer | None
    weight_quant: FakeQuantize | None
    output_quant: Quantizer | None

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.input_quant, self.weight_quant
        if is_on(inner) and is_on(outer) and not autocast_on(x.device):
            product = fake_product(*inner.integers(inner.watch(x)), inner.grid.reach, self.weight, outer)
        else:
            product = F.linear(quantized(inner, x), quantized(outer, self.weight))
        return finish(product, self.output_quant, self.bias, x.dtype)


class QuantConv2d(nn.Conv2d):
    """A convolution whose input, weight and output may be quantised: `(B, C, H, W)` -> `(B, O, H', W')`.

    Attributes as those of `QuantLinear`.
    """

    input_quant: Quantizer | None
    weight_quant: FakeQuantize | None
    output_quant: Quantizer | None

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.input_quant, self.weight_quant
        if is_on(inner) and is_on(outer) and not autocast_on(x.device):
            whole, scale = inner.integers(inner.watch(x))
            rows, size = patches(whole, self)  # zeros at the edge are zeros: whole numbers are centred
            product = fake_product(rows, scale, inner.grid.reach, self.weight, outer)
            product = product.transpose(1, 2).unflatten(2, size)
        else:
            product = self._conv_forward(quantized(inner, x), quantized(outer, self.weight), None)
        return finish(product, self.output_quant, _column(self.bias), x.dtype)


class IntLayer(KeepsFloat32):
    """What integer layers share.

    Attributes:
        weight: int8 `(O, K)`, or uint8 `(O, ceil(K / 2))` with two 4-bit codes in a byte, the first in the low half.
        bias: fp32 `(O,)`, or None.
        weight_bits: 8 or 4.
        input_quant, output_quant: `Quantizer` or None; without the first, the layer is weight-only.
        weight_quant: the `FakeQuantize` that holds the weight's scale and zero point.
    """

    weight: Tensor
    bias: Tensor | None
    weight_bits: int
    depth: int
    input_quant: Quantizer | None
    weight_quant: FakeQuantize
    output_quant: Quantizer | None

    @property
    def weight_scale(self) -> Tensor:
        """fp32: `()`, one an output channel `(O,)`, or one a group `(O, groups)`."""
        return self.weight_quant.scale

    @property
    def weight_zero_point(self) -> Tensor:
        """int32, as `weight_scale`; zeros where it is symmetric."""
        return self.weight_quant.zero_point

    @property
    def x_scale(self) -> Tensor | None:
        """fp32 `()`; None where it is found at run time, or the layer is weight-only."""
        return getattr(self.input_quant, "scale", None)

    @property
    def x_zero_point(self) -> Tensor | None:
        """int32 `()`, as `x_scale`."""
        return getattr(self.input_quant, "zero_point", None)

    def weight_codes(self) -> Tensor:
        """int8 `(O, K)`, unpacked."""
        return unpack_int4(self.weight, self.depth) if self.weight_bits == 4 else self.weight

    def float_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`(O, K)` in `dtype`: what the codes stand for."""
        codes = self.weight_codes()
        scale, zero_point = (
            flat_scale(self.weight_quant._spread(t, codes))
            for t in (self.weight_scale, self.weight_zero_point)
        )
        exact = torch.promote_types(dtype, torch.float32)
        return ((codes.int() - zero_point).to(exact) * scale).to(dtype)  # a difference has 9 bits

    def product(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
        """int8 `(..., K)` with their scale and zero point, times the weight: `(..., O)`, before the bias."""
        weight, outer = self.weight_codes(), self.weight_quant
        offsets = None if outer.grid.symmetric else self.weight_zero_point

        def multiply(a: Tensor, b: Tensor, group: int | None) -> Tensor:
            offset = offsets if offsets is None or group is None else offsets[:, group]
            return centred_product(a, zero_point, b, offset).to(dtype)

        spread = outer._spread(self.weight_scale, weight)
        return scaled(multiply, codes, scale, weight, flat_scale(spread), outer)


class IntLinear(IntLayer):
    """A linear layer of integers: `(..., K)` -> `(..., O)` in the dtype of its input.

    `convert` makes it. It has no gradient. NaN has no integer: in a layer with a fixed scale it is lost.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.input_quant is None:
            product = F.linear(x, self.float_weight(x.dtype))
        else:
            product = self.product(*self.input_quant.codes(x), wide(x).dtype)
        return finish(product, self.output_quant, self.bias, x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.depth}, out_features={len(self.weight)}, weight_bits={self.weight_bits}"


class IntConv2d(IntLayer):
    """A convolution of integers, `(B, C, H, W)` -> `(B, O, H', W')`: one product over flattened patches.

    `weight` is flattened to `(O, C · kernel height · kernel width)`.
    """

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        if self.input_quant is None:
            weight = self.float_weight(x.dtype).unflatten(1, (-1, *self.kernel_size))
            product = F.conv2d(x, weight, None, self.stride, self.padding, self.dilation)
        else:
            codes, scale, zero_point = self.input_quant.codes(x)
            zero = 0 if zero_point is None else zero_point
            rows, size = patches(codes.float() - zero, self)  # zeros at the edge are zeros of the image
            rows = rows + zero
            product = self.product(rows.to(torch.int8), scale, zero_point, wide(x).dtype)
            product = product.transpose(1, 2).unflatten(2, size)
        return finish(product, self.output_quant, _column(self.bias), x.dtype)

    def extra_repr(self) -> str:
        return (
            f"out_channels={len(self.weight)}, kernel_size={self.kernel_size}, weight_bits={self.weight_bits}"
        )


# --- arithmetic that both kinds share


def fake_product(whole: Tensor, scale: Tensor, reach: int, weight: Tensor, outer: FakeQuantize) -> Tensor:
    """Whole numbers `(..., K)` up to `reach`, with their scale, times a weight `(O, ...)` that is quantised here.

    Gives `(..., O)`: exact, with gradients.
    """
    weight, weight_scale = outer.integers(outer.watch(weight))

    def multiply(a: Tensor, b: Tensor, _) -> Tensor:
        return exact_product(a, b.t(), reach * outer.grid.reach)

    return scaled(multiply, whole, scale, weight.flatten(1), flat_scale(weight_scale), outer)


def scaled(
    multiply: Callable[[Tensor, Tensor, Any], Tensor],
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    outer: FakeQuantize,
) -> Tensor:
    """Integers `(..., K)` and `(O, K)` -> scaled products `(..., O)`; with groups, one product a group."""
    if outer.granularity != "group":
        return multiply(x, weight, None) * (x_scale * weight_scale.flatten())
    size = outer.group_size
    total: Tensor | float = 0.0
    for i, (a, b) in enumerate(zip(x.split(size, -1), weight.split(size, -1), strict=True)):
        total = total + multiply(a, b, i) * weight_scale[:, i * size]
    return cast(Tensor, total) * x_scale


def flat_scale(scale: Tensor) -> Tensor:
    """A scale that broadcasts against a weight of any shape, as one that broadcasts against `(O, K)`."""
    return scale.flatten(1) if scale.ndim > 1 else scale


def centred_product(x: Tensor, x_zero: Tensor | None, weight: Tensor, weight_zero: Tensor | None) -> Tensor:
    """`(x − x_zero) @ (weight − weight_zero).T` in int32: int8 `(..., K)` and `(O, K)` -> `(..., O)`.

    `x_zero` broadcasts against `(..., 1)`, `weight_zero` is `()` or `(O,)`; None for 0.
    """
    total = integer_product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
    if x_zero is not None:
        total = total - x_zero * weight.sum(1, dtype=torch.int32)
    if weight_zero is not None:
        total = total - x.sum(-1, keepdim=True, dtype=torch.int32) * weight_zero
        if x_zero is not None:
            total = total + x.shape[-1] * x_zero * weight_zero
    return total


def finish(product: Tensor, output: Quantizer | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The output quantiser, then the bias, then the input's dtype; under autocast the product's own."""
    if autocast_on(product.device):
        dtype = product.dtype
    y = quantized(output, product)
    return (y if bias is None else y + bias.to(y.dtype)).to(dtype)


def patches(x: Tensor, conv: QuantConv2d | IntConv2d) -> tuple[Tensor, tuple[int, int]]:
    """What a convolution multiplies: `(B, C, H, W)` -> `(B, H' · W', C · kernel)`, and (H', W')."""
    (py, px), (ky, kx), (sy, sx), (dy, dx) = (
        cast(tuple[int, int], getattr(conv, name))
        for name in ("padding", "kernel_size", "stride", "dilation")
    )
    x = F.pad(x, (px, px, py, py))
    size = (x.shape[2] - dy * (ky - 1) - 1) // sy + 1, (x.shape[3] - dx * (kx - 1) - 1) // sx + 1
    return F.unfold(x, (ky, kx), (dy, dx), 0, (sy, sx)).transpose(1, 2), size


def _column(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[:, None, None]


# --- from one kind to another


def become_quantized(layer: nn.Linear | nn.Conv2d, name: str) -> QuantLinear | QuantConv2d:
    """Turn a float layer, in place, into a quantised one without quantisers.

    Raises:
        ValueError: a layer with a `forward` of its own, or a convolution that is grouped or pads otherwise than with
            zeros; the message has the layer's name.
    """
    if isinstance(layer, (QuantLinear, QuantConv2d)):
        return layer
    kind = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    remedy = f"leave it in float: QuantConfig(skip=({name!r},))"
    if type(layer).forward is not kind.forward or "forward" in layer.__dict__:
        raise ValueError(f"{name} is a {type(layer).__name__} with a forward of its own: {remedy}")
    if isinstance(layer, nn.Conv2d) and not _is_simple(layer):
        raise ValueError(f"{name} is a convolution with groups or special padding: {remedy}")
    check_depth(layer.weight[0].numel(), name)
    layer.__class__ = QuantConv2d if kind is nn.Conv2d else QuantLinear
    for quantizer in QUANTIZERS:
        layer.register_module(quantizer, None)
    return cast("QuantLinear | QuantConv2d", layer)


def _is_simple(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def become_float(layer: QuantLinear | QuantConv2d) -> None:
    """Turn a quantised layer, in place, back into the float layer that it was."""
    for quantizer in QUANTIZERS:
        delattr(layer, quantizer)
    layer.__class__ = nn.Conv2d if isinstance(layer, QuantConv2d) else nn.Linear  # type: ignore[assignment]


@torch.no_grad()
def become_integer(layer: QuantLinear | QuantConv2d) -> None:
    """Turn a quantised layer, in place, into an integer one. Its scales must be calibrated, unless it is on meta."""
    outer = cast(FakeQuantize, layer.weight_quant)
    codes = outer.codes(layer.weight)[0].flatten(1)
    bias = None if layer.bias is None else wide(layer.bias.detach())
    del layer.weight, layer.bias
    kind = IntConv2d if isinstance(layer, QuantConv2d) else IntLinear
    layer.__class__ = kind  # type: ignore[assignment]
    integer = cast(IntLayer, layer)
    integer.depth, integer.weight_bits = codes.shape[1], outer.grid.bits
    if outer.grid.bits == 4:
        codes = pack_int4(codes)
    integer.register_buffer("weight", codes.contiguous())
    integer.register_buffer("bias", bias)
