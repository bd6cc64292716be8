"""Build a model by its name: `create_model("swin_tiny_patch4_window7_224")`."""

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import index
from typing import Any

from torch import nn

from .config import SwinConfig, pair
from .swin import SwinTransformer
from .variants import SWIN_VARIANTS
from .vit import VIT_VARIANTS, VisionTransformer, ViTConfig
from .zoo import load_pretrained


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern, sorted: `list_models("swinv2_*256")`."""
    return sorted(fnmatch.filter([*SWIN_VARIANTS, *VIT_VARIANTS], pattern))


def create_model(
    name: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    window_size: int | tuple[int, int] | None = None,
    pretrained_window_size: int | Sequence[int] | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
    drop_path_rate: float = 0.0,
    features_only: bool = False,
    out_indices: Sequence[int] | None = None,
    checkpointing: bool = False,
    attention: str = "auto",
    pretrained: bool = False,
    **overrides: Any,
) -> nn.Module:
    """Build a Swin Transformer or a DeiT, in training mode like any new module.

    Args:
        name: one of `list_models()`; timm's name where timm has the model.
        img_size: pixels, one number or (H, W). A Swin takes other sizes too; this is the one it is built for.
        window_size: tokens, one number or (h, w). Stages whose map is smaller get a smaller window.
        pretrained_window_size: V2 only. The window of pre-training, one for all stages or one a stage.
        in_chans, num_classes: None keeps the variant's own (3 and 1000 but for the micro models); 0 classes
            removes the classifier.
        drop_path_rate: of the last block; earlier blocks get less.
        features_only: return a list of `(B, C, H, W)` maps of the stages in `out_indices` (default: all).
        checkpointing: recompute blocks in the backward pass, to save memory.
        attention: "auto" picks the fastest that is exact; "reference" is explicit softmax; "sdpa" insists on
            PyTorch's fused operation; "triton" on this package's kernel (a GPU, or TRITON_INTERPRET=1).
        pretrained: load trained weights: the book's own for micro models, timm's for others (needs a network).
        overrides: any other field of `SwinConfig` (or `ViTConfig`), such as `kernels="triton"` for fused LayerNorm
            and MLP; and `out_norm` for feature pyramids.

    Raises:
        ValueError: for an unknown name, field or value; the message lists what there is.
    """
    _check_name(name)
    out_indices = _indices(out_indices)
    if not isinstance(pretrained, bool):
        raise ValueError(f"pretrained={pretrained!r} is True or False; for a file: load_weights(model, path)")
    options = {
        "img_size": img_size,
        "in_chans": in_chans,
        "num_classes": num_classes,
        "drop_path_rate": drop_path_rate,
        "checkpointing": checkpointing,
        "attention": attention,
        **overrides,
    }
    options = {key: value for key, value in options.items() if value is not None}
    if name in SWIN_VARIANTS:
        windows = {"window_size": window_size, "pretrained_window_sizes": pretrained_window_size}
        options.update({key: value for key, value in windows.items() if value is not None})
        model: nn.Module = _create_swin(name, options, features_only, out_indices)
    else:
        _refuse_windows(name, window_size, pretrained_window_size)
        model = _create_vit(name, options, features_only, out_indices)
    if pretrained:
        load_pretrained(model, name)
    return model


def _create_swin(
    name: str, options: dict[str, Any], features_only: bool, out_indices: Sequence[int] | None
) -> SwinTransformer:
    variant = SWIN_VARIANTS[name]
    out_norm = options.pop("out_norm", False)
    _check_fields(name, options, SwinConfig)
    for key in ("img_size", "window_size"):
        if key in options:
            options[key] = pair(options[key])
    for key in ("depths", "num_heads"):
        if key in options:
            options[key] = tuple(options[key])
    stages = len(options.get("depths", variant.depths))
    before = options.get("pretrained_window_sizes")
    if before is not None:
        _check_pretrained_window(name, options.get("version", variant.version))
        options["pretrained_window_sizes"] = (before,) * stages if isinstance(before, int) else tuple(before)
    elif len(variant.pretrained_window_sizes) != stages:
        options["pretrained_window_sizes"] = (0,) * stages
    config = replace(variant, **options)
    return SwinTransformer(config, features_only=features_only, out_indices=out_indices, out_norm=out_norm)


def _create_vit(
    name: str, options: dict[str, Any], features_only: bool, out_indices: Sequence[int] | None
) -> VisionTransformer:
    _check_fields(name, options, ViTConfig)
    options |= {"features_only": features_only, "out_indices": out_indices}
    config = replace(VIT_VARIANTS[name], **options)
    return VisionTransformer(config)


def _check_name(name: str) -> None:
    names = list_models()
    if name not in names:
        begun = sorted((n for n in names if name and n.startswith(str(name))), key=len)[:3]
        near = begun or difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "list_models() names them all"
        raise ValueError(f"there is no model {name!r}; {hint}")


def _indices(out_indices: Any) -> tuple[int, ...] | None:
    if out_indices is None:
        return None
    try:
        return tuple(index(i) for i in out_indices)
    except TypeError:
        raise ValueError(
            f"out_indices={out_indices!r}: give a list of whole numbers, such as [0, 1, 2, 3]"
        ) from None


def _check_fields(name: str, options: dict[str, Any], config: type) -> None:
    known = {field.name for field in fields(config)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"{name} takes no option {', '.join(unknown)}; it takes {', '.join(sorted(known))}")


def _check_pretrained_window(name: str, version: int) -> None:
    if version == 1:
        raise ValueError(
            f"{name}: pretrained_window_size belongs to V2; V1 resizes its tables (set_input_size does it)"
        )


def _refuse_windows(name: str, *sizes: Any) -> None:
    if any(size is not None for size in sizes):
        raise ValueError(f"{name} attends to the whole image: it has no window_size; leave it out")
