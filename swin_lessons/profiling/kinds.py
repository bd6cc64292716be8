"""The kinds of work in a step of a Swin, and ranges around the code that does each.

A profiler lists operations: `addmm` is in the MLP, in the queries and in the head alike. Here each piece of a model
is told apart by what it is for, and `kind_ranges` opens a named range around it while it runs: for PyTorch's
profiler, for NVTX, or for a counter of our own.

Ranges are put around functions and `nn.Module.__call__` from outside, and taken off again. Hooks would be the usual
way, but this package's models leave their fast path when a hook is there, and then one would profile another program.

The innermost range counts. So a LayerNorm is "LayerNorm" wherever it lies; "attention" is what is left of attention
when QKV and proj are taken out (scores, bias, softmax, the sum over values); "residual" is what is left of a block:
the additions, and drop path. Whatever is in no range is "the rest".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

__all__ = ["KINDS", "REST", "kind_of_module", "kind_ranges", "nvtx_ranges"]

KINDS = (
    "patch embedding",
    "LayerNorm",
    "partition/shift",
    "QKV",
    "attention",
    "proj",
    "MLP",
    "merging",
    "residual",
    "head",
    "loss",
    "optimiser",
)
REST = "the rest"

NAMES = {  # kind -> the end of the module's qualified name
    "patch embedding": r"patch_embed",
    "QKV": r"attn\.qkv",
    "proj": r"attn\.proj",
    "attention": r"attn",
    "MLP": r"mlp",
    "merging": r"downsample",
    "residual": r"blocks\.\d+",
    "head": r"head(_dist)?",
}
OpenRange = Callable[[str], AbstractContextManager[Any]]
KindOf = Callable[..., str | None]  # of the arguments of a call; None opens no range


def kind_of_module(name: str, module: nn.Module) -> str | None:
    """The kind of what a module does itself, by its type or its qualified name; None: its caller's."""
    if isinstance(module, nn.Identity):
        return None
    if isinstance(module, nn.LayerNorm):
        return "LayerNorm"
    return next((k for k, end in NAMES.items() if re.fullmatch(rf"(.*\.)?({end})", name)), None)


@contextmanager
def kind_ranges(
    model: nn.Module, open_range: OpenRange, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """While this context lasts, each piece of `model` runs within `open_range(kind)`, its kind one of `KINDS`.

    Args:
        model: this package's, for all kinds. In another one, modules that have the same names are found; what its
            blocks do between them is "residual".
        open_range: kind -> a context manager, such as `torch.profiler.record_function`.
        optimizer: whose `step` and `zero_grad` are the kind "optimiser". `F.cross_entropy` is "loss".
    """
    with ExitStack() as patches:
        for owner, name, kind_of in _places(model, optimizer):
            inside = _within(open_range, kind_of, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, inside))
        yield


def nvtx_ranges(
    model: nn.Module, device: str | torch.device, optimizer: torch.optim.Optimizer | None = None
) -> AbstractContextManager[None]:
    """`kind_ranges` for Nsight Systems: NVTX ranges on a CUDA device; on another, a context that does nothing.

    Backward passes show as PyTorch's own ranges, with the sequence number of the forward operation
    (`torch.autograd.profiler.emit_nvtx`).
    """
    return _nvtx(model, optimizer) if torch.device(device).type == "cuda" else nullcontext()


@contextmanager
def _nvtx(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    with torch.autograd.profiler.emit_nvtx(), kind_ranges(model, torch.cuda.nvtx.range, optimizer):
        yield


def _within(open_range: OpenRange, kind_of: KindOf, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        kind = kind_of(*args, **kwargs)
        if kind is None:
            return function(*args, **kwargs)
        with open_range(kind):
            return function(*args, **kwargs)

    return inside


def _places(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Any, str, KindOf]]:
    """(owner, attribute, kind of a call) of everything that gets a range."""
    from swin_lessons.models import rows, swin

    kinds = {id(m): k for name, m in model.named_modules() if (k := kind_of_module(name, m))}
    weights = {
        id(m.weight): kinds[id(m)] for m in model.modules() if isinstance(m, nn.Linear) and id(m) in kinds
    }

    def of_module(module: Any, *_: Any, **__: Any) -> str | None:
        return kinds.get(id(module))

    def of_weight(x: Any, weight: Any, *_: Any, **__: Any) -> str | None:
        return weights.get(id(weight))

    yield nn.Module, "__call__", of_module
    for owner, name in (  # the fast path's functions that stand in for modules
        (swin, "merge_patches"),
        (rows, "block_rows"),
        (rows, "attention_rows"),
        (rows, "mlp_rows"),
    ):
        yield owner, name, of_module
    yield rows, "linear", of_weight
    for kind, owner, names in (*_functions(optimizer), *_kernels(model)):
        for name in names:
            yield owner, name, functools.partial(_always, kind)


def _functions(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """(kind, owner, names) of functions and methods that do one kind of work."""
    from swin_lessons.models import attention, rows, swin, vit

    yield "patch embedding", swin.SwinTransformer, ("_embed",)
    yield "patch embedding", vit.VisionTransformer, ("embed",)
    yield "partition/shift", swin, ("run_stage",)  # the moves of rows; its blocks are ranges within
    yield "partition/shift", rows, ("zero_pads",)
    yield (
        "partition/shift",
        attention,
        ("pad_to_windows", "cyclic_shift", "window_partition", "window_reverse", "shift_mask"),
    )
    yield "attention", rows, ("kind_bias",)
    yield "attention", attention.WindowAttention, ("current_bias", "attend_windows")
    for version in (attention.WindowAttention, attention.WindowAttentionV2):
        yield "QKV", version, ("project_qkv", "joint_qkv_bias")
    yield "loss", nn.functional, ("cross_entropy",)
    if optimizer is not None:
        yield "optimiser", type(optimizer), ("step", "zero_grad")


def _kernels(model: nn.Module) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The same for blocks that fused kernels run, where `model` has any: they are not loaded for other models."""
    if not any(getattr(stage, "fused_parts", ()) for stage in model.modules()):
        return
    from swin_lessons import kernels
    from swin_lessons.models import fused

    yield "residual", fused.FusedBlock, ("__call__",)
    yield "MLP", fused.FusedBlock, ("mlp",)
    yield "LayerNorm", kernels, ("layer_norm", "add_layer_norm")
    yield "partition/shift", kernels, ("shift_partition", "reverse_unshift")


def _always(kind: str, *_: Any, **__: Any) -> str:
    return kind
