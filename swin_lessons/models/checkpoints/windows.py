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
    """What a checkpoint says about its windows: our metadata, or the configuration in an official file."""
    keys = ("window_sizes", "reference_windows")
    found = {key: json.loads(metadata[key]) for key in keys if key in metadata}
    return found or _official_windows(content.get("config"))


def _official_windows(config: Any) -> dict[str, list]:
    """Windows from the configuration that Microsoft's V2 training stores beside its weights."""
    try:
        model, size = config["MODEL"], int(config["DATA"]["IMG_SIZE"])
        swin = model["SWINV2"]
        if model["TYPE"] not in ("swinv2", "swin_v2"):
            return {}
        grids = [size // int(swin["PATCH_SIZE"]) >> i for i in range(len(swin["DEPTHS"]))]
        windows = [min(int(swin["WINDOW_SIZE"]), grid) for grid in grids]
        pretrained = swin.get("PRETRAINED_WINDOW_SIZES") or [0] * len(windows)
    except (KeyError, TypeError, ValueError):
        return {}  # no configuration, or another one
    reference = [int(p) or w for p, w in zip(pretrained, windows, strict=True)]
    return {"window_sizes": [[w, w] for w in windows], "reference_windows": [[r, r] for r in reference]}


def stage_window(windows: dict[str, list], name: str) -> Size | None:
    """The window that a parameter of `layers.i` was trained with, where the checkpoint says it."""
    match, sizes = re.match(r"layers\.(\d+)\.", name), windows.get("window_sizes", [])
    return tuple(sizes[int(match[1])]) if match and int(match[1]) < len(sizes) else None
