"""Weights in and out: load any common layout into our models, save as safetensors.

    report = load_weights(model, "swin_tiny_patch4_window7_224.pth")
    print(report)

Reading, naming and resizing live in `checkpoints`. Here they are put together, checked, then applied.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .checkpoints.files import read_file, write_safetensors
from .checkpoints.layouts import State, find_anchor, translate
from .checkpoints.plan import Plan, place_dense_norms
from .checkpoints.report import LoadReport, WeightsError, short
from .checkpoints.windows import model_windows, trained_windows

__all__ = ["LoadReport", "WeightsError", "load_weights", "save_weights"]


def load_weights(
    model: nn.Module,
    checkpoint: str | os.PathLike | Mapping[str, Any],
    *,
    source: str = "auto",
    strict: bool = True,
    class_map: Sequence[int] | Tensor | None = None,
) -> LoadReport:
    """Load a checkpoint of any common layout into a Swin or DeiT (ours or timm's), all or nothing.

    Names are translated and prefixes ("module.", "backbone.", "encoder.", ...) cut off. Bias tables, position
    embeddings and the patch convolution are resized where their sizes differ. Values take the model's dtype
    and device; parameters on the meta device become real ones. V2's `pretrained_window_size` belongs to how
    the model was built: it is kept, and a note in the report tells when the checkpoint names another.

    Args:
        model: what to fill. Names must be timm's, as ours are.
        checkpoint: a state dict (maybe wrapped, as {"model": ...}), a .safetensors or .pth file, or a folder
            of transformers' `save_pretrained`. Files are read as data: no code in them is run.
        source: "auto", or the layout: "timm", "official" (Microsoft), "timm_old" (timm <= 0.6, the same),
            "simmim", "torchvision", "transformers", "openmmlab".
        strict: refuse a checkpoint with missing, unexpected or ill-shaped parameters. What is no fault of a
            whole checkpoint is skipped and reported: size-dependent buffers, a SimMIM decoder, a classifier
            that the checkpoint or the model lacks or that has other classes (the model keeps its own), output
            norms of dense backbones, stages that a features-only model leaves out.
        class_map: for other classes, the row of the checkpoint's classifier for each class of the model, as
            the authors' map from ImageNet-22K to 1K.

    Raises:
        WeightsError: the weights do not fit (lists names and shapes); the model is unchanged.
        ValueError: no weights of a known layout, a damaged file, or a pickle with code in it.
        FileNotFoundError: there is no such file.
    """
    content, metadata, origin = _open(checkpoint)
    state, layout, skipped = translate(content, source)
    backbone, target = _target(model)
    plan = Plan(backbone, target, LoadReport(layout, skipped=skipped), class_map)
    plan.make(place_dense_norms(state, target), trained_windows(metadata, content))
    plan.check(origin, strict)
    plan.note_unfilled()
    backbone.load_state_dict(plan.values, strict=False, assign=any(p.is_meta for p in target.values()))
    if plan.report.nonfinite:
        warnings.warn(f"{origin}: NaN or infinity in {short(plan.report.nonfinite)}", stacklevel=2)
    return plan.report


def save_weights(
    model: nn.Module, path: str | os.PathLike, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write the model's parameters to a .safetensors file, in one step (a reader never sees half a file).

    `metadata` is kept with the weights: strings as they are, other values as JSON. Swin's windows are added,
    so that `load_weights` can resize tables of non-square windows and tell when V2's references differ.
    """
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    windows = {key: json.dumps(value) for key, value in model_windows(model).items()}
    given = {k: v if isinstance(v, str) else json.dumps(v) for k, v in (metadata or {}).items()}
    write_safetensors(tensors, path, {"format": "pt", **windows, **given})


def _open(checkpoint: Any) -> tuple[Mapping[str, Any], dict[str, str], str]:
    """Content, metadata, and what to call it in messages."""
    if isinstance(checkpoint, Mapping):
        return checkpoint, {}, "the state dict"
    if isinstance(checkpoint, (str, os.PathLike)):
        return *read_file(checkpoint), os.fspath(checkpoint)
    raise TypeError(
        f"checkpoint is a {type(checkpoint).__name__}: pass a path or a state dict (model.state_dict())"
    )


def _target(model: nn.Module) -> tuple[nn.Module, State]:
    """The backbone inside a model (compiled, wrapped in DDP or not) and its parameters by name."""
    state = model.state_dict()
    prefix, _ = find_anchor(state)
    strangers = [name for name in state if not name.startswith(prefix)]
    if strangers:
        raise ValueError(
            f"{type(model).__name__} is more than a backbone ({short(strangers)}): "
            f"pass the backbone itself, model.{prefix.removesuffix('.')}"
        )
    return model.get_submodule(prefix.removesuffix(".")), {n[len(prefix) :]: v for n, v in state.items()}
