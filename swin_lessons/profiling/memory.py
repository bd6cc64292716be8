"""Where training memory goes: what autograd saves for the backward pass, and the ledger of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from swin_lessons.profiling.running import module_names, running_module, storage_key

__all__ = ["MemoryLedger", "SavedTensors", "memory_ledger", "saved_for_backward"]

LossFn = Callable[[Any], Tensor]


@dataclass
class SavedTensors:
    """Bytes that a forward pass keeps for the backward pass, for the whole batch."""

    batch: int
    by_module: dict[str, int] = field(default_factory=dict)
    """{qualified name of the module that saved it first: bytes}"""
    on_ctx: int = 0
    """Bytes that a custom `autograd.Function` keeps as attributes of ctx, where hooks do not see them."""

    @property
    def total(self) -> int:
        """All bytes, those on ctx included."""
        return sum(self.by_module.values()) + self.on_ctx

    @property
    def per_image(self) -> float:
        """Bytes an image."""
        return self.total / self.batch


def saved_for_backward(model: nn.Module, x: Tensor, loss_fn: LossFn | None = None) -> SavedTensors:
    """Run a forward pass and add up the storages that autograd keeps for the backward pass.

    Each storage counts once and as a whole, since a saved view keeps all of it alive. Parameters and buffers
    are left out (they are there anyway); the input is not. The model's mode is respected: call
    `model.train()` first. A meta-device model is measured without allocating.

    What a custom `autograd.Function` puts on ctx as a plain attribute passes the hooks by; the graph is
    searched for it afterwards (`on_ctx`). Memory that no graph node holds, such as a workspace, is invisible
    here: see `peak_memory`.

    Args:
        model: any module that takes one tensor.
        x: a batch, first axis B.
        loss_fn: the model's output -> a scalar; the sum of the output (or of its `.logits`) by default.
    """
    saved = SavedTensors(batch=x.shape[0])
    kept: dict[int, Any] = {}  # keeps storages alive, so that a key means one storage
    names = module_names(model)
    known = {storage_key(t) for t in [*model.parameters(), *model.buffers()]}

    def size(tensor: Tensor) -> int:
        """Bytes of the tensor's storage when it is a new one, else 0."""
        key = storage_key(tensor)
        if key is None:
            return tensor.numel() * tensor.element_size()
        if key in known or key in kept:
            return 0
        kept[key] = tensor.untyped_storage()
        return kept[key].nbytes()

    def pack(tensor: Tensor) -> Tensor:
        if new := size(tensor):
            name = running_module(names)
            saved.by_module[name] = saved.by_module.get(name, 0) + new
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
        loss = (loss_fn or _sum)(model(x))
    saved.on_ctx = sum(map(size, _tensors_on_ctx(loss)))
    return saved


def _sum(output: Any) -> Tensor:
    return getattr(output, "logits", output).float().sum()


def _tensors_on_ctx(loss: Tensor) -> Iterator[Tensor]:
    """Tensors among the attributes of the graph's Python nodes."""
    queue, seen = [loss.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        queue.extend(parent for parent, _ in node.next_functions)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from _tensors_in(vars(node))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


@dataclass
class MemoryLedger:
    """Bytes of one training step by purpose. `activations` is for the whole batch."""

    batch: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def states(self) -> int:
        """What does not grow with the batch: 16 bytes a parameter with AdamW in fp32 (Swin V2, s. 3.5)."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """States and activations."""
        return self.states + self.activations

    def table(self) -> str:
        """Plain text, MB = 10⁶ bytes."""
        names = ("parameters", "buffers", "gradients", "optimizer", "activations", "total")
        return "\n".join(f"{name:12s}{getattr(self, name) / 1e6:12,.1f} MB" for name in names)


def memory_ledger(
    model: nn.Module,
    x: Tensor,
    loss_fn: LossFn | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryLedger:
    """Add up what a training step of `model` on `x` holds.

    `optimizer` is measured as it is: give one that has made a step. Without one, AdamW is assumed: two
    moments of each trainable parameter's size.
    """
    trainable = _bytes(p for p in model.parameters() if p.requires_grad)
    return MemoryLedger(
        batch=x.shape[0],
        parameters=_bytes(model.parameters()),
        buffers=_bytes(model.buffers()),
        gradients=trainable,
        optimizer=2 * trainable if optimizer is None else _optimizer_bytes(optimizer),
        activations=saved_for_backward(model, x, loss_fn).total,
    )


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return _bytes(_tensors_in([list(state.values()) for state in optimizer.state.values()]))
