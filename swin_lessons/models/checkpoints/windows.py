"""The windows that a model has and that a checkpoint was trained with."""

import json
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

Size = tuple[int, int]


def model_windows(model: nn.Module) -> dict[str, list]:
    """Windows of each stage and those that normalise V2's coordinates; empty for models without windows."""
    windows: dict[int, Size] = {}
    reference: dict[int, Size] = {}
    for name, module in model.named_modules():
        match = re.search(r"layers\.(\d+)\.blocks\.0\.attn$", name)
        if match and hasattr(module, "window_size"):
            stage, window = int(match[1]), tuple(module.window_size)
            pretrained = tuple(getattr(module, "pretrained_window_size", (0, 0)))
            windows[stage] = window
            reference[stage] = tuple(p or w for p, w in zip(pretrained, window, strict=True))
    result = {"window_sizes": [list(windows[i]) for i in sorted(windows)]} if windows else {}
    if "layers.0.blocks.0.attn.logit_scale" in model.state_dict():
        result["reference_windows"] = [list(reference[i]) for i in sorted(reference)]
    return result


def trained_windows(metadata: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, list]:
    """What a checkpoint says about its windows: our metadata, or the configuration in or beside it."""
    keys = ("window_sizes", "reference_windows")
    found = {key: json.loads(metadata[key]) for key in keys if key in metadata}
    try:
        beside = json.loads(metadata.get("config.json", "{}"))
        return found or _official_windows(content.get("config")) or _transformers_windows(beside)
    except (KeyError, TypeError, ValueError):
        return {}  # a configuration of another kind


def _official_windows(config: Any) -> dict[str, list]:
    """Windows from the configuration that Microsoft's V2 training stores beside its weights."""
    if not isinstance(config, Mapping) or config["MODEL"]["TYPE"] not in ("swinv2", "swin_v2"):
        return {}
    swin, size = config["MODEL"]["SWINV2"], config["DATA"]["IMG_SIZE"]
    pretrained = swin.get("PRETRAINED_WINDOW_SIZES")
    return _windows(size, swin["PATCH_SIZE"], swin["WINDOW_SIZE"], len(swin["DEPTHS"]), pretrained)


def _transformers_windows(config: Mapping[str, Any]) -> dict[str, list]:
    """Windows from the config.json that transformers writes beside its weights."""
    if config.get("model_type") != "swinv2":
        return {}
    pretrained = config.get("pretrained_window_sizes")
    stages = len(config["depths"])
    return _windows(config["image_size"], config["patch_size"], config["window_size"], stages, pretrained)


def _windows(size: int, patch: int, window: int, stages: int, pretrained: Any) -> dict[str, list]:
    """Square windows of each stage, none larger than its map, and the ones that normalise coordinates."""
    windows = [min(int(window), int(size) // int(patch) >> i) for i in range(stages)]
    reference = [int(p) or w for p, w in zip(pretrained or [0] * stages, windows, strict=True)]
    return {"window_sizes": [[w, w] for w in windows], "reference_windows": [[r, r] for r in reference]}


def stage_window(windows: dict[str, list], name: str) -> Size | None:
    """The window that a parameter of `layers.i` was trained with, where the checkpoint says it."""
    match, sizes = re.match(r"layers\.(\d+)\.", name), windows.get("window_sizes", [])
    return tuple(sizes[int(match[1])]) if match and int(match[1]) < len(sizes) else None
