"""Quantised models in files: tensors as safetensors, the plan as JSON beside them; no code is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from swin_lessons.training.files import atomic_write, naming_remedy

from .fake import FakeQuantize, Quantizer, quantizers
from .points import Plan, prepare
from .ptq import plan_of, to_integers

FORMAT = "swin-lessons quantized 1"


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write a quantised model, converted or not, as one safetensors file that is whole or not there.

    Integers are stored as integers (4 bits: two in a byte), scales in fp32, all else in the model's dtype. The metadata
    hold the configuration and every quantised place, as JSON.

    Raises:
        ValueError: the model is not quantised, or a scale is no positive number.
        RuntimeError: a layer is not calibrated. Messages have the layer's name.
        OSError: the file cannot be written; the message says what to do.
    """
    plan, path = active_plan(model), Path(path)
    check_scales(model)
    metadata = {"format": FORMAT, "quantization": json.dumps(plan.to_dict()), "model": type(model).__name__}
    tensors = {name: value.detach().clone().contiguous() for name, value in kept_state(model).items()}
    with naming_remedy(path), atomic_write(path) as part:
        try:
            save_file(tensors, part, metadata)
        except SafetensorError as error:  # how it words a full disk or a missing folder
            raise OSError(str(error)) from error
    return path


def load(model: nn.Module | Callable[[], nn.Module], path: str | os.PathLike[str]) -> nn.Module:
    """The quantised model that `save` wrote, in evaluation mode.

    Args:
        model: a float model of the same architecture, which stays as it is, or a function that builds one. Its values
            do not matter.
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a damaged file, a checkpoint without scales, a file of another model, a missing or unexpected
            tensor, a number that is NaN or infinite, a scale that is not positive. Messages name the layers.
    """
    path = Path(path)
    tensors, plan = _read(path)
    built = model if isinstance(model, nn.Module) else model()
    try:
        quantised = prepare(built, plan.config, plan.points, measure=False).eval()
    except ValueError as error:
        raise ValueError(f"{path} does not fit this model: {error}") from error
    if plan.integer:
        quantised = to_integers(_blank(quantised))
    _check_names(path, kept_state(quantised), tensors)
    for name, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            layer, _, what = name.rpartition(".")
            raise ValueError(
                f"{path}: {what} of {layer} holds NaN or infinity: calibrate and save the model again"
            )
    quantised.load_state_dict(tensors, strict=False)
    check_scales(quantised)
    return quantised


@torch.no_grad()
def _blank(model: nn.Module) -> nn.Module:
    """Numbers that can become integers, to be overwritten."""
    for parameter in model.parameters():
        parameter.zero_()
    for quantizer in quantizers(model):
        if isinstance(quantizer, FakeQuantize) and quantizer.role == "weight":
            quantizer.set_range(-1.0, 1.0)
    return model


def kept_state(model: nn.Module) -> dict[str, Tensor]:
    """What a file holds: the state without what observers saw, and without quantisers that are switched off."""
    off = [name + "." for name, m in model.named_modules() if isinstance(m, Quantizer) and not m.quantizing]
    return {
        name: value
        for name, value in model.state_dict().items()
        if ".observer." not in f".{name}" and not name.startswith(tuple(off))
    }


def active_plan(model: nn.Module) -> Plan:
    """The plan without the places whose quantisers are switched off."""
    plan = plan_of(model)
    on = {(q.layer, q.kind) for q in quantizers(model) if q.quantizing}
    return replace(plan, points=tuple(p for p in plan.points if p in on))


def check_scales(model: nn.Module) -> None:
    """Raise, with the layer's name, where a quantiser is not calibrated or has a scale that is no positive number."""
    for quantizer in quantizers(model):
        if quantizer.quantizing and isinstance(quantizer, FakeQuantize):
            quantizer.check_scale()


def _read(path: Path) -> tuple[dict[str, Tensor], Plan]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is no quantised model: it has no scales. Load it into the float model, then use ptq"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, Plan.from_dict(json.loads(metadata["quantization"]))
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _check_names(path: Path, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    missing = sorted(ours.keys() - theirs.keys())
    strange = sorted(theirs.keys() - ours.keys())
    shapes = [
        f"{name} {tuple(theirs[name].shape)}, here {tuple(ours[name].shape)}"
        for name in ours
        if name in theirs and ours[name].shape != theirs[name].shape
    ]
    for words, names in (("lacks", missing), ("has, and this model lacks,", strange), ("differs in", shapes)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{path} {words} {', '.join(names[:3])}{more}: it belongs to another model")
