"""A quantised model as ONNX wants it: integers between QuantizeLinear and DequantizeLinear nodes.

An engine that finds `DequantizeLinear -> MatMul` on both operands multiplies the integers themselves. So each quantised
place becomes such a pair of nodes, each int8 weight an int8 initialiser with its DequantizeLinear, stored `(K, O)` as
MatMul reads it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.quantization.fake import FakeQuantize, Quantizer
from swin_lessons.quantization.modules import IntConv2d, IntLayer, IntLinear

__all__ = ["with_qdq"]

UNSIGNED = (
    128  # codes and zero points are int8 in the package, uint8 in the file: what VNNI multiplies with int8
)


def with_qdq(model: Any) -> nn.Module:
    """A copy of a converted model whose quantised places export as ONNX nodes. It is for the exporter alone.

    Raises:
        ValueError: a model that is not converted yet; a layer with scales found at run time, or with 4-bit weights in
            groups: the message has its name.
    """
    if not model.quantization.integer:
        raise ValueError("this model still computes in floats: call quantization.convert(model) first")
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, (IntLinear, IntConv2d)):
            _replace(model, name, _layer(name, module))
    for name, module in list(model.named_modules()):
        if isinstance(module, Quantizer) and module.role != "weight":
            _replace(model, name, RoundTrip(name, module))
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _layer(name: str, layer: IntLinear | IntConv2d) -> nn.Module:
    if layer.weight_bits != 8 or layer.weight_scale.ndim > 1:
        raise ValueError(
            f"{name} has {layer.weight_bits}-bit weights, scale {tuple(layer.weight_scale.shape)}: "
            "ONNX export takes 8-bit weights with one scale a tensor or a channel"
        )
    return QdqConv2d(name, layer) if isinstance(layer, IntConv2d) else QdqLinear(name, layer)


class RoundTrip(nn.Module):
    """QuantizeLinear, DequantizeLinear: any shape -> the same.

    To the layer around it, it is a quantiser that is off: so that layer rounds nothing by itself.
    """

    quantizing = False

    scale: Tensor
    zero_point: Tensor

    def __init__(self, name: str, quantizer: Quantizer) -> None:
        super().__init__()
        if not isinstance(quantizer, FakeQuantize) or quantizer.grid.bits != 8 or quantizer.scale.ndim:
            raise ValueError(f"{name} has no fixed 8-bit scale for all that passes: ONNX export needs one")
        zero = int(quantizer.zero_point) + UNSIGNED
        self.register_buffer("scale", quantizer.scale.detach().float().reshape(()))
        self.register_buffer("zero_point", torch.tensor(zero, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        args = (self.scale, self.zero_point)
        codes = _node("QuantizeLinear", (x, *args), torch.uint8, x.shape)
        return _node("DequantizeLinear", (codes, *args), torch.float32, x.shape)


def _node(name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    return torch.onnx.ops.symbolic(name, inputs, dict(attributes), dtype=dtype, shape=shape)


class _Weight(nn.Module):
    """An int8 weight, its scales, and what comes before and after it."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def __init__(self, name: str, layer: IntLayer, weight: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        outputs = weight.shape[axis]
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("scale", layer.weight_scale.detach().float().expand(outputs).contiguous())
        self.register_buffer(
            "zero_point", layer.weight_zero_point.expand(outputs).to(torch.int8).contiguous()
        )
        self.register_buffer("bias", layer.bias)
        self.input_quant = _round_trip(f"{name}.input", layer.input_quant)
        self.output_quant = _round_trip(f"{name}.output", layer.output_quant)

    def values(self) -> Tensor:
        """fp32, of the weight's shape."""
        inputs = (self.weight, self.scale, self.zero_point)
        return _node("DequantizeLinear", inputs, torch.float32, self.weight.shape, axis=self.axis)


def _round_trip(name: str, quantizer: Quantizer | None) -> nn.Module:
    return nn.Identity() if quantizer is None else RoundTrip(name, quantizer)


class QdqLinear(_Weight):
    """`IntLinear`: `(..., K)` -> `(..., O)`."""

    def __init__(self, name: str, layer: IntLinear) -> None:
        super().__init__(name, layer, layer.weight.t(), axis=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.output_quant(self.input_quant(x) @ self.values())
        return y if self.bias is None else y + self.bias


class QdqConv2d(_Weight):
    """`IntConv2d`: `(B, C, H, W)` -> `(B, O, H', W')`."""

    def __init__(self, name: str, layer: IntConv2d) -> None:
        size = (
            -1,
            layer.weight.shape[1] // (layer.kernel_size[0] * layer.kernel_size[1]),
            *layer.kernel_size,
        )
        super().__init__(name, layer, layer.weight.view(size), axis=0)
        self.options = (layer.stride, layer.padding, layer.dilation)

    def forward(self, x: Tensor) -> Tensor:
        y = self.output_quant(F.conv2d(self.input_quant(x), self.values(), None, *self.options))
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)
