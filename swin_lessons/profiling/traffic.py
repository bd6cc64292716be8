"""What operations move: PyTorch shows each one before it runs, with the tensors that it reads and writes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts operations, and the bytes of all tensors that they read and write.

    A tensor counts once for each operation that touches it. Views do not count, nor does what is smaller than 100
    bytes. An operation that starts several kernels inside itself counts as one.

    Attributes:
        launches, bytes: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        told = zip(op._schema.arguments, args, strict=False)
        written = [a for s, a in told if s.alias_info and s.alias_info.is_write]
        read, made = tensors((args, kwargs)), tensors(written or out)
        both = [*read.values(), *made.values()]
        moved = sum(t.numel() * t.element_size() for t in both)
        if (written or made.keys() - read.keys()) and moved > 100:
            self.launches += 1
            self.bytes += moved
        return out


def tensors(tree: Any) -> dict[int, Tensor]:
    """All tensors in nested lists and tuples, each once, by its address."""
    return {t.data_ptr(): t for t in tree_leaves(tree) if isinstance(t, Tensor)}
