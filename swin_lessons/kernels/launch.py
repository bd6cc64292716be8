"""Who runs a kernel: Triton on a GPU it compiles for, Triton's interpreter on request, PyTorch everywhere else."""

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..models.fast import in_transform

try:
    import triton
    import triton.language as tl
except ImportError:  # kernels are then plain functions that nobody launches

    class _Absent:
        """Stands for triton where it is not installed: decorators change nothing, annotations mean nothing."""

        def __getattr__(self, name: str) -> Any:
            return (lambda function: function) if name == "jit" else self

    triton = tl = _Absent()

HAS_TRITON = not type(triton).__name__.startswith("_")
IMPLEMENTATIONS = ("auto", "torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # sm_75 has no tensor-core path in Triton


def interpreting() -> bool:
    """Do kernels run in Triton's interpreter? It follows TRITON_INTERPRET=1, set before triton is imported."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(impl: str, x: Tensor, limit: str = "") -> bool:
    """Whether Triton runs an operation on `x`.

    Args:
        impl: "auto" takes Triton where it can and PyTorch elsewhere; "torch" and "triton" insist.
        x: the operation's main input.
        limit: what about this call the kernel cannot do, in words; empty when it can.

    Raises:
        ValueError: an unknown `impl`, or "triton" for what the kernel cannot do.
        ImportError: "triton" where triton is not installed.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "torch":
        return False
    reason = obstacle(x) or limit
    if impl == "auto":
        return x.is_cuda and not reason
    if not HAS_TRITON:
        raise ImportError("impl='triton' needs triton: pip install triton (Linux), or choose impl='torch'")
    if reason:
        raise ValueError(f"impl='triton': {reason}; choose impl='torch' or 'auto'")
    return True


def no_gradient(name: str, *tensors: Tensor | None) -> str:
    """Why a kernel without a backward pass cannot take these tensors; empty when nobody asks for a gradient."""
    asked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return f"{name} has no gradient in Triton; use torch.no_grad()" if asked else ""


def obstacle(x: Tensor) -> str:
    """Why no kernel can take `x`; empty when one can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if _transformed():
        return "torch.func's transforms and forward-mode differentiation cannot look into a kernel"
    if x.dtype not in DTYPES:
        return f"{x.dtype} is not among {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
    if x.is_cuda:
        return _too_old(x.device)
    if x.is_meta:
        return ""  # shapes alone
    if x.device.type == "cpu" and interpreting():
        return ""
    return (
        f"tensors on {x.device.type} need a CUDA GPU, or on a CPU TRITON_INTERPRET=1 set before Python starts"
    )


def _transformed() -> bool:
    """Does PyTorch differentiate or vectorise in a way that a kernel would silently drop out of?

    A compiler refuses the other transforms by itself.
    """
    return forward_ad._current_level >= 0 if torch.compiler.is_compiling() else in_transform()


@lru_cache
def _too_old(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return (
        "" if (major, minor) >= OLDEST else f"sm_{major}{minor} is older than sm_80, the first that is served"
    )


def once_only(backward: Any) -> None:
    """Second derivatives, which would need a gradient of the operation `backward`, end in an error with a remedy."""

    def refuse(ctx: Any, *_: Any) -> None:
        raise NotImplementedError("kernels have first derivatives only: choose impl='torch' for second ones")

    backward.register_autograd(refuse)


def multiprocessors(x: Tensor) -> int:
    """How many programs run side by side, at least: the multiprocessors of the GPU; 4 in the interpreter."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below `n`: sides of Triton's tiles are powers of 2."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, d: int) -> int:
    """How many pieces of `d` cover `n`."""
    return (n + d - 1) // d
