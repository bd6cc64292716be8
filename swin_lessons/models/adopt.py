"""A Swin Transformer of another library as ours: what it is made of is read from its parameters and its windows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .checkpoints.layouts import translate
from .config import SwinConfig, pair
from .swin import SwinTransformer
from .weights import load_weights
from .windows import Size

__all__ = ["adopt"]

MANY_WINDOWS = (
    2  # torchvision's models hold no image size: then one at which every stage has windows to shift
)


def adopt(model: nn.Module) -> SwinTransformer:
    """Our Swin Transformer with the parameters of `model`, in evaluation mode; ours is returned as it is.

    Takes classifiers of timm, torchvision and transformers, V1 and V2, of any size. At the image size that the model
    was built for the numbers are the same; at others ours pads where timm refuses.

    Raises:
        TypeError: the model is no Swin Transformer of these libraries.
    """
    if isinstance(model, SwinTransformer):
        return model
    config = _config(model)
    ours = SwinTransformer(config)
    load_weights(ours, model.state_dict())
    like = next(model.parameters())
    return ours.to(like.device, like.dtype).eval()


def _config(model: nn.Module) -> SwinConfig:
    try:
        state, _, _ = translate(model.state_dict())
        shapes = _shapes(state)
    except (ValueError, KeyError) as error:
        raise TypeError(
            f"{type(model).__name__} is not a Swin Transformer that this package knows: pass a classifier of ours, "
            "or of timm, torchvision or transformers"
        ) from error
    config = getattr(model, "config", None)
    sizes = _sizes_of_config(config) if hasattr(config, "image_size") else _sizes_of_modules(model, shapes)
    return SwinConfig(**shapes, **sizes)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the shapes of the parameters tell."""
    embed_dim, in_chans, patch_size, _ = state["patch_embed.proj.weight"].shape
    depths = _depths(state)
    v2 = "layers.0.blocks.0.attn.logit_scale" in state
    heads = "attn.logit_scale" if v2 else "attn.relative_position_bias_table"
    first = "layers.0.blocks.0"
    return {
        "version": 2 if v2 else 1,
        "patch_size": patch_size,
        "in_chans": in_chans,
        "num_classes": state["head.fc.weight"].shape[0] if "head.fc.weight" in state else 0,
        "embed_dim": embed_dim,
        "depths": depths,
        "num_heads": tuple(
            state[f"layers.{i}.blocks.0.{heads}"].shape[0 if v2 else 1] for i in range(len(depths))
        ),
        "mlp_ratio": state[f"{first}.mlp.fc1.weight"].shape[0] / embed_dim,
        "qkv_bias": f"{first}.attn.q_bias" in state or f"{first}.attn.qkv.bias" in state,
        "absolute_pos_embed": "absolute_pos_embed" in state,
        "patch_norm": "patch_embed.norm.weight" in state,
    }


def _depths(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    found = [re.match(r"layers\.(\d+)\.blocks\.(\d+)\.", name) for name in state]
    blocks = {(int(m[1]), int(m[2])) for m in found if m}
    stages = {stage for stage, _ in blocks}
    return tuple(sum(stage == s for s, _ in blocks) for stage in sorted(stages))


def _sizes_of_config(config: Any) -> dict[str, Any]:
    """Sizes of image and windows, from a configuration of transformers."""
    stages = len(config.depths)
    trained = getattr(config, "pretrained_window_sizes", (0,) * stages)
    return {
        "img_size": pair(config.image_size),
        "window_size": pair(config.window_size),
        "pretrained_window_sizes": tuple(trained[:stages]),
    }


def _sizes_of_modules(model: nn.Module, shapes: dict[str, Any]) -> dict[str, Any]:
    """Sizes of image and windows, as timm's and torchvision's attention layers carry them."""
    attentions = [m for m in model.modules() if hasattr(m, "window_size") and hasattr(m, "qkv")]
    windows = [_ints(m.window_size) for m in attentions]
    trained = [_ints(getattr(m, "pretrained_window_size", 0))[0] for m in attentions]
    window = max(windows)  # later stages may have smaller ones
    depths = shapes["depths"]
    many = shapes["patch_size"] * MANY_WINDOWS << len(depths)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return {
        "img_size": pair([many * w for w in window]) if size is None else _ints(size),
        "window_size": window,
        "pretrained_window_sizes": tuple(trained[sum(depths[:i])] for i in range(len(depths))),
    }


def _ints(size: Any) -> Size:
    return pair([int(s) for s in size] if isinstance(size, (list, tuple)) else int(size))
