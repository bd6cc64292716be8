"""The work of one step, by kind: multiply-accumulates, bytes that operations read and write, launches.

Operations are counted where they reach the dispatcher, below autograd, as `count_macs` does; here the whole step
runs, with its backward pass and optimiser. An operation belongs to the range (`kind_ranges`) that is open. In the
backward pass none is: there autograd tells which node runs, the node's sequence number tells when it was made, and
the range that was open then names the kind. A gradient that is added to a parameter's follows the node that made it.

What counts:

* MACs: matrix products and normalised elements, as in `count_macs`; of backward passes, the products alone.
* Bytes: each operation reads each of its operands from memory once (also one that is given twice, as in x * x) and
  writes its result once. Views and bare allocations are free. Caches do better than that, and a fused kernel needs
  less: this is the traffic of the operations as they were called.
* Launches: operations that move bytes. On a GPU each is a kernel, or a few.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from swin_lessons.profiling.kinds import REST, kind_ranges
from swin_lessons.profiling.mac_formulas import formula_of
from swin_lessons.profiling.running import storage_key

__all__ = ["KindStack", "Work", "count_work"]

aten = torch.ops.aten
NO_SEQUENCE = 2**63  # a node that adds into a parameter's gradient has a larger number than any other
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
WRITE_ONLY = {"copy_", "fill_", "zero_"}  # they write their first operand without reading it
FORWARD, BACKWARD = "forward", "backward"


@dataclass
class Work:
    """What a kind does in one step: `macs`, `bytes` read and written, `launches` of operations."""

    macs: int = 0
    bytes: int = 0
    launches: int = 0

    @property
    def flops(self) -> int:
        """A multiply-accumulate is two floating-point operations."""
        return 2 * self.macs

    def __add__(self, other: Work) -> Work:
        return Work(self.macs + other.macs, self.bytes + other.bytes, self.launches + other.launches)


class KindStack:
    """The ranges that are open, and which was open when autograd made a node: an `open_range` for `kind_ranges`."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._since: list[int] = []  # sequence numbers at which the innermost range changed ...
        self._kinds: list[str] = []  # ... and what it became

    @property
    def current(self) -> str | None:
        """The innermost open range."""
        return self._open[-1] if self._open else None

    def at(self, sequence: int) -> str:
        """The range that was open when the node of this number was made."""
        place = bisect.bisect_right(self._since, sequence)
        return self._kinds[place - 1] if place else REST

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        self._open.append(kind)
        self._note()
        try:
            yield
        finally:
            self._open.pop()
            self._note()

    def _note(self) -> None:
        if (
            torch._C._current_autograd_node() is None
        ):  # recomputing in a backward pass makes no nodes that run
            self._since.append(torch._C._autograd._get_sequence_nr())
            self._kinds.append(self.current or REST)


def count_work(
    model: nn.Module, step: Callable[[], Any], optimizer: torch.optim.Optimizer | None = None
) -> dict[tuple[str, str], Work]:
    """Run `step` once and count: {(kind, "forward" or "backward"): Work}, of the whole batch.

    Args:
        model: that `step` runs, forward or forward and backward.
        optimizer: that `step` uses.
    """
    stack = KindStack()
    counter = _Work(stack)
    with kind_ranges(model, stack, optimizer), counter:
        step()
    return counter.found


class _Work(TorchDispatchMode):
    def __init__(self, stack: KindStack) -> None:
        super().__init__()
        self.stack = stack
        self.found: dict[tuple[str, str], Work] = {}
        self._last = REST

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if formula_of(func) is None and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        place, moved = self._place(), _traffic(func, args, kwargs, out)
        work = Work(_macs(func, args, kwargs, out), moved, int(moved > 0))
        self.found[place] = self.found.get(place, Work()) + work
        return out

    def _place(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return self.stack.current or REST, FORWARD
        if self.stack.current:  # a block that is recomputed
            return self.stack.current, BACKWARD
        if node._sequence_nr() < NO_SEQUENCE:
            self._last = self.stack.at(node._sequence_nr())
        return self._last, BACKWARD


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _macs(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    operation, found = func._overloadpacket, formula_of(func)
    if found is not None:
        return found[1](out, *args, **kwargs)
    if operation is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_backward(*args)
    if operation in flop_registry:
        return flop_registry[operation](*args, **kwargs, out_val=out) // 2
    return 0


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """Scores again, and the gradients of the probabilities, v, q and k: five products."""
    return q.shape[:-1].numel() * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _traffic(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written: operands, those that are changed once more, and new results."""
    name = func._overloadpacket.__name__
    operands = _tensors((args, kwargs))
    changed = _changed(func, args, kwargs)
    there = {storage_key(t) for t in operands}
    new = [t for t in _tensors(out) if storage_key(t) not in there]
    if name in ALLOCATIONS or not (new or changed):
        return 0
    read = operands[1:] if name in WRITE_ONLY else operands
    return sum(map(_bytes, read)) + sum(map(_bytes, changed)) + sum(map(_bytes, new))


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}.values())


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Operands that the operation writes, by its schema."""
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    if values.get("grad_scale") is None and "exp_avgs" in names:
        names.remove("grads")  # an optimiser writes gradients only to unscale them
    return _tensors([values.get(name) for name in names])


def _bytes(tensor: Tensor) -> int:
    """Of an expanded tensor, what is really there."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    there = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(there) * tensor.element_size()
