"""Post-training quantisation: calibrate a model on batches, then turn its weights into integers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .config import QuantConfig
from .fake import FakeQuantize, is_on, quantizers
from .modules import QuantConv2d, QuantLinear, become_float, become_integer
from .points import Plan, device_of, owners, prepare


def ptq(
    model: nn.Module,
    batches: Iterable[Any],
    config: QuantConfig | None = None,
    *,
    progress: bool | None = None,
) -> nn.Module:
    """A quantised copy of `model`, calibrated on `batches`; it still computes in floats (see `convert`).

    Args:
        model: any float model; it stays as it is. Linear layers, convolutions, LayerNorms and GELUs are found by type,
            also in Swin, ViT and DeiT of timm, torchvision and transformers. Attention and residual additions are found
            in this package's models; attention also in torchvision's Swin.
        batches: images `(B, C, H, W)`, alone or as the first of a tuple. Each is used once, and no more. There may be
            none where no scale is to be found beforehand (dynamic, weight-only).
        config: what to quantise and how; the default is `QuantConfig.preset("linear")`.
        progress: show a bar; None shows it on a terminal only.

    Returns:
        The copy in evaluation mode, on the same device. Its attribute `quantization` is a `Plan`.

    Raises:
        ValueError: no batch; NaN or infinity in one; a layer that calibration never called; a layer that cannot be
            quantised. Messages have the layer's name.
    """
    quantised = prepare(model, QuantConfig() if config is None else config)
    quantised.eval()
    calibrate(quantised, batches, progress=progress)
    return quantised


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any], *, progress: bool | None = None) -> None:
    """Run a prepared model on `batches` without rounding, and set its scales to what its observers see.

    In evaluation mode, whatever mode the model is in before and after. Raises as `ptq` does.
    """
    static = [q for q in quantizers(model) if isinstance(q, FakeQuantize) and q.observer is not None]
    training, device = model.training, device_of(model)
    count, disable = 0, None if progress is None else not progress
    model.eval()
    with watching(model, static) as called:
        for batch in tqdm(batches, desc="calibrate", unit="batch", disable=disable):
            model(images_of(batch).to(device))
            count += 1
    model.train(training)
    if not count and static:
        raise ValueError("calibration got no batch: give at least one batch of images")
    if count and (idle := [name for name, _ in owners(model) if name not in called]):
        raise ValueError(
            f"calibration never called {', '.join(idle)}: the model does not need it, or reads its weight without "
            f"calling it; leave it in float, as by QuantConfig(skip={tuple(idle[:2])!r})"
        )
    for quantizer in static:
        quantizer.update()


@contextmanager
def watching(model: nn.Module, observed: list[FakeQuantize]) -> Iterator[set[str]]:
    """Observers on, rounding off; yields the names of the layers that get called."""
    called: set[str] = set()
    before = [(q, q.quantizing) for q in quantizers(model)]
    handles = [
        layer.register_forward_hook(lambda *_, name=name: called.add(name)) for name, layer in owners(model)
    ]
    for quantizer, _ in before:
        quantizer.quantizing = False
    for static in observed:
        static.observes, static.deferred = "always", True
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
        for quantizer, was_on in before:
            quantizer.quantizing = was_on
        for static in observed:
            static.observes, static.deferred = "never", False


def images_of(batch: Any) -> Tensor:
    """The images of a batch: a tensor, or the first of a tuple or list.

    Raises:
        TypeError: something else.
    """
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(images, Tensor):
        raise TypeError(f"a batch is images, or (images, labels), not {type(batch).__name__}")
    return images


def convert(model: nn.Module) -> nn.Module:
    """A copy of a calibrated model whose linear layers and convolutions hold integers and multiply them exactly.

    Their results equal those of the model bit for bit. What stands between them (LayerNorm, softmax, GELU) is computed
    in floats in both, so on the same device the whole network agrees, too. Layers whose quantisers are switched off
    become float layers again. The copy is in evaluation mode, frozen, and without observers.

    Raises:
        ValueError: a model that is not quantised, or is converted already; a scale that is no positive number.
        RuntimeError: a layer that is not calibrated. Messages have the layer's name.
    """
    plan = plan_of(model)
    if plan.integer:
        raise ValueError(f"this {type(model).__name__} is converted already")
    for quantizer in quantizers(model):
        if quantizer.quantizing and isinstance(quantizer, FakeQuantize):
            quantizer.check_scale()
    return to_integers(model)


def to_integers(model: nn.Module) -> nn.Module:
    """`convert` without its checks: also for a model that is still to be filled from a file."""
    model = copy.deepcopy(model)
    plan = plan_of(model)
    for layer in list(model.modules()):
        if isinstance(layer, (QuantLinear, QuantConv2d)):
            if is_on(layer.weight_quant):
                become_integer(layer)
            elif not any(is_on(q) for q in (layer.input_quant, layer.output_quant)):
                become_float(layer)
    for quantizer in quantizers(model):
        if isinstance(quantizer, FakeQuantize):
            quantizer.fix_scale()
            quantizer.observes, quantizer.observer = "never", None
    model.quantization = replace(plan, integer=True)  # type: ignore[assignment]
    return model.requires_grad_(False).eval()


def plan_of(model: nn.Module) -> Plan:
    """The plan of a quantised model.

    Raises:
        ValueError: a float model.
    """
    plan = getattr(model, "quantization", None)
    if not isinstance(plan, Plan):
        raise ValueError(
            f"this {type(model).__name__} is not quantised: use ptq(model, batches) or prepare_qat(model)"
        )
    return cast(Plan, plan)
