"""Which module of a model is running now: the way from an operation back to a layer's name."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["RunningModules", "storage_key"]


class RunningModules:
    """A context that follows a model's forward pass; `.name` is the innermost running module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._stack = [""]

    @property
    def name(self) -> str:
        """Qualified name, as in `model.get_submodule(name)`; "" is the model itself."""
        return self._stack[-1]

    def __enter__(self) -> RunningModules:
        self._handles = []
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self._stack.append(name)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()


def storage_key(tensor: Tensor) -> int | None:
    """What all views of one memory share, on the meta device too; None for a tensor without a storage.

    Valid while the tensor lives: memory is used again.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # packed oneDNN weights are opaque
        return None
