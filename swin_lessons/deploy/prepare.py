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

from .prepared import PreparedSwin, Product
from .products import FloatProduct

__all__ = ["prepare"]

KNOWN = {
    *(*STANDARD, nn.Conv2d, nn.Identity, nn.Sequential, nn.ReLU, nn.ModuleList, nn.ModuleDict),
    *(SwinTransformer, SwinStage, PatchEmbed, PatchMerging, ClassifierHead),
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare(model: nn.Module, precision: str = "fp32") -> PreparedSwin:
    """An equal model for inference on a CPU, with everything that can be computed once computed once.

    In fp32 the logits are the same to 1e-5 of the largest. The model itself stays as it is.

    Args:
        model: a Swin Transformer V1 or V2: ours (a pyramid too), or a classifier of timm, torchvision or transformers.
        precision: "fp32" or "bf16" (operands of all products, and the rows between them; sums stay fp32).

    Raises:
        TypeError: the model is no Swin Transformer that is known, or one of its layers was replaced.
        ValueError: another precision, a model that is not on the CPU, or one whose weights are not there (meta device).
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: choose {' or '.join(map(repr, PRECISIONS))}")
    _check_device(model)
    with torch.inference_mode(False), torch.no_grad():
        own = copy.deepcopy(adopt(model)).float().eval()
        _check_layers(own)
        return PreparedSwin(own, FloatPacker(PRECISIONS[precision]), precision)


def _check_device(model: nn.Module) -> None:
    devices = {p.device.type for p in model.parameters()} - {"cpu"}
    if devices:
        raise ValueError(
            f"the model is on {', '.join(devices)}: prepare works on the CPU; call model.cpu() first"
        )


def _check_layers(model: SwinTransformer) -> None:
    """Only layers whose arithmetic is known can be replaced by another form of it."""
    for name, module in model.named_modules():
        if type(module) not in KNOWN:
            raise TypeError(
                f"{name} is a {type(module).__name__}, and prepare does not know what it computes"
            )
        if isinstance(module, nn.GELU) and module.approximate != "none":
            raise TypeError(
                f"{name} approximates the GELU by {module.approximate}; prepare knows the exact one"
            )


@dataclass(frozen=True)
class FloatPacker:
    """Products in one floating-point type; norms are folded into the layers that read them."""

    dtype: torch.dtype
    folds: bool = True

    def product(
        self,
        layer: nn.Linear | nn.Conv2d,
        bias: Tensor | None,
        gain: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Product:
        """`layer` with this bias; `gain` `(K,)` multiplies what comes in, `scale` `(O,)` what comes out."""
        weight = layer.weight.detach().flatten(1)
        weight = weight if gain is None else weight * gain
        if scale is not None:
            weight, bias = weight * scale[:, None], None if bias is None else bias * scale
        return FloatProduct(weight, bias, self.dtype)
