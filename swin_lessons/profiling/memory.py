"""Where training memory goes: what autograd saves for the backward pass, and the ledger of a step.

The ledger predicts the peak of a step from one forward pass. At the end of that pass all activations are there and no
gradient. The backward pass then frees a layer's activations and makes its gradients, from the last layer to the
first; which layer is the worst depends on the batch. With a small batch it is the first one, or the optimiser's step,
where all gradients are there. A block that checkpointing rebuilds is there once, when its turn comes. While a layer
works it holds the gradient of its largest tensor twice: before and after an activation function, or a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from swin_lessons.profiling.kinds import REST, kind_ranges
from swin_lessons.profiling.running import module_names, running_module, storage_key
from swin_lessons.profiling.work import KindStack

__all__ = [
    "LayerMemory",
    "MemoryLedger",
    "SavedTensors",
    "memory_ledger",
    "saved_by_kind",
    "saved_for_backward",
]

LossFn = Callable[[Any], Tensor]


@dataclass
class SavedTensors:
    """Bytes that a forward pass keeps for the backward pass, for the whole batch."""

    batch: int
    by_module: dict[str, int] = field(default_factory=dict)
    """{qualified name of the module that saved it first: bytes}"""
    recomputed: dict[str, int] = field(default_factory=dict)
    """{module: bytes of its largest piece that checkpointing rebuilds}; they are not in the total"""
    largest: dict[str, int] = field(default_factory=dict)
    """{module: bytes of the largest tensor that it keeps or rebuilds}"""
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
    names = module_names(model)
    return _saved(model, x, loss_fn, lambda: running_module(names))


def saved_by_kind(model: nn.Module, x: Tensor, loss_fn: LossFn | None = None) -> dict[str, int]:
    """`saved_for_backward` by kind of work (see `kinds`): {kind: bytes}. What is on ctx is in "the rest"."""
    stack = KindStack()
    with kind_ranges(model, stack):
        saved = _saved(model, x, loss_fn, lambda: stack.current or REST)
    saved.by_module[REST] = saved.by_module.get(REST, 0) + saved.on_ctx
    return saved.by_module


def _saved(model: nn.Module, x: Tensor, loss_fn: LossFn | None, owner: Callable[[], str]) -> SavedTensors:
    """What the forward pass keeps, by who `owner()` says is running."""
    saved = SavedTensors(batch=x.shape[0])
    kept: dict[int, Any] = {}  # keeps storages alive, so that a key means one storage
    known = {storage_key(t) for t in [*model.parameters(), *model.buffers()]}

    def size(tensor: Tensor, there: dict[int, Any]) -> int:
        """Bytes of the tensor's storage when it is a new one, else 0."""
        key = storage_key(tensor)
        if key is None:
            return tensor.numel() * tensor.element_size()
        if key in known or key in there:
            return 0
        there[key] = tensor.untyped_storage()
        return there[key].nbytes()

    def pack(tensor: Tensor) -> Tensor:
        if new := size(tensor, kept):
            name = owner()
            saved.by_module[name] = saved.by_module.get(name, 0) + new
            saved.largest[name] = max(saved.largest.get(name, 0), new)
        return tensor

    def rebuild(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        """In place of `checkpoint`: its arguments are kept, and what the function would keep is counted apart."""
        name, there, sizes = owner(), dict(kept), []
        saved.by_module.setdefault(name, 0)
        for tensor in _tensors_in(args):
            pack(tensor)
        with saved_tensors_hooks(lambda t: sizes.append(size(t, there)), lambda t: t):
            out = function(*args)
        saved.recomputed[name] = max(saved.recomputed.get(name, 0), sum(sizes))
        saved.largest[name] = max([saved.largest.get(name, 0), *sizes])
        return out

    with torch.enable_grad(), _checkpoint_as(rebuild), saved_tensors_hooks(pack, lambda t: t):
        loss = (loss_fn or _sum)(model(x))
    saved.on_ctx = sum(size(t, kept) for t in _tensors_on_ctx(loss))
    return saved


@contextmanager
def _checkpoint_as(function: Callable[..., Any]) -> Iterator[None]:
    """Wherever this package's models call `checkpoint`, call `function`. Other models' is left: they rebuild unseen."""
    from swin_lessons.models import attention, swin, vit

    with ExitStack() as patches:
        for owner in (attention, swin, vit):
            patches.enter_context(patch.object(owner, "checkpoint", function))
        yield


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
class LayerMemory:
    """Bytes of one layer: activations kept for its backward pass (of the whole batch), gradients of its parameters.

    `recomputed` is its largest piece that checkpointing rebuilds in the backward pass, `working` what it holds only
    while it works.
    """

    name: str
    activations: int
    gradients: int
    recomputed: int = 0
    working: int = 0


@dataclass
class MemoryLedger:
    """Bytes of one training step by purpose. `activations` is for the whole batch; `layers` splits it up."""

    batch: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    layers: list[LayerMemory] = field(default_factory=list)
    """In the order of the forward pass."""

    @property
    def states(self) -> int:
        """What does not grow with the batch: 16 bytes a parameter with AdamW in fp32 (Swin V2, s. 3.5)."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """States and activations: no step holds more than this and its layers' temporary tensors."""
        return self.states + self.activations

    @property
    def resident(self) -> int:
        """What is there between two steps: parameters, buffers, optimiser states."""
        return self.parameters + self.buffers + self.optimizer

    @property
    def peak(self) -> int:
        """The most that is held at once: while some layer's backward pass runs, or the optimiser.

        When a layer's turn comes, its activations and those of all layers before it are still there, and what
        checkpointing did not keep is rebuilt. It works, and makes its gradients beside those of all layers after it.
        """
        kept, made, most = self.activations, 0, self.gradients
        for layer in reversed(self.layers):
            made += layer.gradients
            most = max(most, kept + made + layer.recomputed + layer.working)
            kept -= layer.activations
        return self.resident + most

    def table(self) -> str:
        """Plain text, MB = 10⁶ bytes."""
        names = ("parameters", "buffers", "gradients", "optimizer", "activations", "total", "peak")
        return "\n".join(f"{name:12s}{getattr(self, name) / 1e6:12,.1f} MB" for name in names)

    def layer_table(self) -> str:
        """Plain text: activations and gradients layer by layer, in the order of the forward pass."""
        width = max((len(layer.name) for layer in self.layers), default=5) + 2
        lines = [f"{'layer':{width}s}{'activations':>14s}{'gradients':>14s}"]
        lines += [
            f"{r.name or '(model)':{width}s}{r.activations / 1e6:11,.2f} MB{r.gradients / 1e6:11,.2f} MB"
            for r in self.layers
        ]
        return "\n".join(lines)


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
    saved = saved_for_backward(model, x, loss_fn)
    return MemoryLedger(
        batch=x.shape[0],
        parameters=_bytes(model.parameters()),
        buffers=_bytes(model.buffers()),
        gradients=trainable,
        optimizer=2 * trainable if optimizer is None else _optimizer_bytes(optimizer),
        activations=saved.total,
        layers=_layers(model, saved),
    )


def _layers(model: nn.Module, saved: SavedTensors) -> list[LayerMemory]:
    """A row for each module that kept something; a parameter's gradient belongs to the nearest such module around it.

    A parameter in none of them belongs to the first row, whose backward pass comes last.
    """
    layers = {
        name: LayerMemory(name, size, 0, saved.recomputed.get(name, 0), 2 * saved.largest.get(name, 0))
        for name, size in saved.by_module.items()
    }
    if not layers:
        return []
    first = next(iter(layers.values()))
    for name, param in model.named_parameters():
        if param.requires_grad:
            layers.get(_around(name, layers), first).gradients += param.numel() * param.element_size()
    return list(layers.values())


def _around(name: str, layers: dict[str, LayerMemory]) -> str:
    """The longest of `layers` that is a beginning of this name, part by part."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return _bytes(_tensors_in([list(state.values()) for state in optimizer.state.values()]))
