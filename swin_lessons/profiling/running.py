"""From an operation back to the layer that runs it, without touching the model.

Hooks would be simpler, but a model may choose another path when somebody watches its layers; ours does. So the
caller's stack is read instead.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import Tensor, nn

__all__ = ["module_names", "running_module", "storage_key"]


def module_names(model: nn.Module) -> dict[int, str]:
    """{id of a module: its qualified name}; the model itself is ""."""
    return {id(module): name for name, module in model.named_modules()}


def running_module(names: dict[int, str]) -> str:
    """Name of the innermost module of `names` on the call stack: the nearest caller with it as first argument.

    That is `self` of a method, or the layer that a function was given to stand in for.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        name = names.get(id(frame.f_locals.get(first[0]))) if first else None
        if name is not None:
            return name
        frame = frame.f_back
    return ""


def storage_key(tensor: Tensor) -> int | None:
    """What all views of one memory share, on the meta device too; None for a tensor without a storage.

    Valid while the tensor lives: memory is used again.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # packed oneDNN weights are opaque
        return None
