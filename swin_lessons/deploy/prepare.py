"""`prepare`: from a model to its inference form."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_lessons.models.adopt import adopt
from swin_lessons.models.layers import ClassifierHead, PatchEmbed, PatchMerging
from swin_lessons.models.rows import STANDARD
from swin_lessons.models.swin import SwinStage, SwinTransformer
from swin_lessons.quantization.fake import FakeQuantize
from swin_lessons.quantization.modules import IntConv2d, IntLayer, IntLinear
from swin_lessons.quantization.observers import Observer
from swin_lessons.quantization.points import Plan

from .prepared import Layer, PreparedSwin, Product
from .products import FloatProduct, Int8Product

__all__ = ["prepare"]

KNOWN = {
    *(*STANDARD, nn.Conv2d, nn.Identity, nn.Sequential, nn.ReLU, nn.ModuleList, nn.ModuleDict),
    *(SwinTransformer, SwinStage, PatchEmbed, PatchMerging, ClassifierHead),
}
INTEGERS = {IntLinear, IntConv2d, FakeQuantize}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare(model: nn.Module, precision: str | None = None) -> PreparedSwin:
    """An equal model for inference on a CPU, with everything that can be computed once computed once.

    In fp32 the logits are the same to 1e-5 of the largest. The model itself stays as it is.

    Args:
        model: a Swin Transformer V1 or V2: ours (a pyramid too), or a classifier of timm, torchvision or transformers;
            or ours from `quantization.convert`, with fixed scales for inputs of linear layers and the patch embedding.
        precision: "fp32" or "bf16" (operands of all products, and the rows between them; sums stay fp32). None is
            "fp32", and for a quantised model "int8": integer products, with all that lies between them in fp32.

    Raises:
        TypeError: the model is no Swin Transformer that is known, or one of its layers is of an unknown kind.
        ValueError: another precision, a model that is not on the CPU, or one quantised in a way that has no fast form
            (scales found at run time, quantised attention, norms, GELUs, outputs or additions).
    """
    integer = _is_integer(model)
    precision = precision or ("int8" if integer else "fp32")
    if precision not in PRECISIONS and not (integer and precision == "int8"):
        raise ValueError(f"precision={precision!r}: choose 'fp32' or 'bf16'; 'int8' needs a converted model")
    if integer and precision != "int8":
        raise ValueError(f"precision={precision!r}: this model is quantised; leave precision out")
    _check_device(model)
    with torch.inference_mode(False), torch.no_grad():
        own = copy.deepcopy(adopt(model)).float().eval()
        _check_layers(own)
        pack = Int8Packer() if integer else FloatPacker(PRECISIONS[precision])
        return PreparedSwin(own, pack, precision)


def _is_integer(model: nn.Module) -> bool:
    plan = getattr(model, "quantization", None)
    if isinstance(plan, Plan) and not plan.integer:
        raise ValueError("this model still computes in floats: call quantization.convert(model) first")
    return isinstance(plan, Plan)


def _check_device(model: nn.Module) -> None:
    devices = {p.device.type for p in model.parameters()} - {"cpu"}
    if devices:
        raise ValueError(
            f"the model is on {', '.join(devices)}: prepare works on the CPU; call model.cpu() first"
        )


def _check_layers(model: SwinTransformer) -> None:
    """Only layers whose arithmetic is known can be replaced by another form of it."""
    for name, module in model.named_modules():
        if (hasattr(module, "input_quant") and type(module) not in INTEGERS) or "core" in module._modules:
            raise ValueError(
                f"{name} ({type(module).__name__}) is quantised; only linear layers have a fast form"
            )
        if type(module) not in KNOWN | INTEGERS and not isinstance(module, Observer):
            raise TypeError(
                f"{name} is a {type(module).__name__}, and prepare does not know what it computes"
            )
        if isinstance(module, nn.GELU) and module.approximate != "none":
            raise TypeError(
                f"{name} approximates the GELU by {module.approximate}; prepare knows the exact one"
            )
        if isinstance(module, IntLayer):
            _check_integers(name, module)


def _check_integers(name: str, layer: IntLayer) -> None:
    if layer.output_quant is not None:
        raise ValueError(
            f"{name} has a quantised output, which has no fast form; quantise by the preset 'linear'"
        )
    if layer.input_quant is None:
        return  # weight-only: a product of floats
    if layer.weight_bits != 8 or layer.weight_scale.ndim > 1 or not layer.weight_quant.grid.symmetric:
        raise ValueError(f"{name} needs symmetric weights of 8 bits, with one scale a tensor or a channel")
    if layer.x_scale is None:
        raise ValueError(f"{name} finds its scale at run time; calibrate it instead (dynamic=None)")


@dataclass(frozen=True)
class FloatPacker:
    """Products in one floating-point type; norms are folded into the layers that read them."""

    dtype: torch.dtype
    folds: bool = True

    def product(
        self, layer: Layer, bias: Tensor | None, gain: Tensor | None = None, scale: Tensor | None = None
    ) -> Product:
        """`layer` with this bias; `gain` `(K,)` multiplies what comes in, `scale` `(O,)` what comes out."""
        weight = layer.float_weight() if isinstance(layer, IntLayer) else layer.weight.detach().flatten(1)
        weight = weight if gain is None else weight * gain
        if scale is not None:
            weight, bias = weight * scale[:, None], None if bias is None else bias * scale
        return FloatProduct(weight, bias, self.dtype)


@dataclass(frozen=True)
class Int8Packer:
    """Integer products where the layer has integers, products in fp32 where it was left in float."""

    dtype: torch.dtype = torch.float32
    folds: bool = False

    def product(
        self, layer: Layer, bias: Tensor | None, gain: Tensor | None = None, scale: Tensor | None = None
    ) -> Product:
        """`layer` with this bias; `scale` `(O,)` multiplies what comes out. Gains stay in their norms."""
        if not isinstance(layer, IntLayer) or layer.x_scale is None or layer.x_zero_point is None:
            return FloatPacker(self.dtype).product(layer, bias, gain, scale)
        weight_scale = layer.weight_scale.expand(len(layer.weight))
        if scale is not None:
            weight_scale, bias = weight_scale * scale, None if bias is None else bias * scale
        zero_point = int(layer.x_zero_point) + 128  # of uint8: what VNNI multiplies with int8
        return Int8Product(layer.weight, weight_scale, bias, float(layer.x_scale), zero_point)
