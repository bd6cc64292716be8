"""The training ladder on paper: what each rung moves, computes and starts, and how long that takes at best.

A whole step of a whole model runs on the meta device, where tensors have shapes and no values, and `count_work` counts
it. Mixed precision is that of CUDA: there autocast computes LayerNorm and softmax in fp32, which a CPU's does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from swin_lessons.profiling.work import Work, count_work

if TYPE_CHECKING:
    from swin_lessons.profiling.suites.train_ladder import Rung

__all__ = ["CARDS", "AmpOnPaper", "Card", "RungCost", "count_rung"]

SHORT = {  # what CUDA's autocast runs in fp16 or bf16 ...
    F.linear,
    F.conv2d,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.bmm,
    Tensor.matmul,
    Tensor.__matmul__,
}
LONG = {F.layer_norm, F.softmax, torch.softmax, Tensor.softmax, F.cross_entropy}  # ... and in fp32
CLIP_BYTES = 12  # a parameter: the gradient read for its norm, then read and written to scale it
UNSCALE_BYTES = 8  # a parameter, in fp16: read and written
FOREACH_LAUNCHES = 48  # of AdamW as it comes: a dozen operations on lists of tensors, each in a few launches
CLIP_LAUNCHES = 10


class AmpOnPaper(TorchFunctionMode):
    """CUDA's autocast for tensors on the meta device: operands are cast before the functions that it knows."""

    def __init__(self, short: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.short = short

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = self.short if func in SHORT else torch.float32 if func in LONG else None
        return func(
            *(_cast(a, wanted) for a in args), **{k: _cast(v, wanted) for k, v in (kwargs or {}).items()}
        )


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _on_paper(half: bool) -> Iterator[None]:
    """Fused kernels hear of autocast on the meta device, where PyTorch knows none."""
    from swin_lessons.models import fused

    with (
        patch.object(fused, "autocast_on", lambda _: half),
        patch.object(import_module("swin_lessons.kernels.linear_gelu"), "autocast_on", lambda _: half),
        patch.object(torch, "get_autocast_dtype", lambda *_: torch.float16),
        AmpOnPaper() if half else nullcontext(),
    ):
        yield


@dataclass(frozen=True)
class RungCost:
    """A step of a rung: forward, backward, and everything that happens to parameters after them.

    Attributes:
        precision: of its matrix products: "fp32", "tf32" or "half".
        batch: images.
        kinds: {(kind, "forward" or "backward"): Work} of the model and the loss.
        update: bytes and launches of clipping, unscaling and the optimiser.
    """

    precision: str
    batch: int
    kinds: Mapping[tuple[str, str], Work]
    update: Work

    @property
    def total(self) -> Work:
        """All of it."""
        return sum(self.kinds.values(), start=self.update)


def count_rung(rung: Rung, name: str = "swin_tiny_patch4_window7_224", batch: int = 32) -> RungCost:
    """Count a step of `rung`, one that is not compiled, on the meta device: about a second.

    Raises:
        ValueError: a rung of torch.compile, whose kernels nobody knows before it has run.
    """
    from swin_lessons.models import create_model

    if rung.compiled:
        raise ValueError(f"{rung.name}: only the compiler knows which kernels it makes")
    half = rung.precision in ("fp16", "bf16")
    with torch.device("meta"):
        model: Any = create_model(name, kernels=rung.kernels, attention=rung.attention).train()
        chans, size = model.config.in_chans, model.config.img_size
        x, y = torch.empty(batch, chans, *size), torch.empty(batch, dtype=torch.long)

    def step() -> None:
        with _on_paper(half):
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()

    with _on_paper(half):
        model(x)  # makes the tables that are made once and kept
    kinds = count_work(model, step)
    params = sum(p.numel() for p in model.parameters())
    return RungCost("half" if half else rung.precision, batch, kinds, _update(rung, params, half))


def _update(rung: Rung, params: int, half: bool) -> Work:
    from swin_lessons.kernels.adamw import adamw_cost

    cost = adamw_cost(params, 1)
    nbytes = cost.bytes_before if rung.optimizer == "default" else cost.bytes_after
    launches = FOREACH_LAUNCHES if rung.optimizer == "default" else cost.launches_after
    return Work(0, nbytes + params * (CLIP_BYTES + half * UNSCALE_BYTES), launches + CLIP_LAUNCHES)


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet, and how much of that a program gets.

    Attributes:
        name: of the card.
        bandwidth: bytes a second.
        rates: FLOP a second of matrix products in "fp32", "tf32" and "half".
        memory_share, product_share: of the peaks that real kernels reach.
        gap: seconds between two kernels on the device.
        host: seconds that Python and PyTorch need to start an operation, in eager mode.
    """

    name: str
    bandwidth: float
    rates: Mapping[str, float] = field(hash=False)
    memory_share: float = 0.8
    product_share: float = 0.6
    gap: float = 1e-6
    host: float = 10e-6

    def device_seconds(self, cost: RungCost) -> float:
        """Of each kind, what takes longer, memory or products; and the gaps between kernels."""
        rate = self.product_share * self.rates[cost.precision]
        bandwidth = self.memory_share * self.bandwidth
        parts = [*cost.kinds.values(), cost.update]
        busy = sum(max(w.flops / rate, w.bytes / bandwidth) for w in parts)
        return busy + self.gap * cost.total.launches

    def host_seconds(self, cost: RungCost) -> float:
        """To start all operations, one after the other."""
        return self.host * cost.total.launches

    def step_seconds(self, cost: RungCost) -> float:
        """Device and host work side by side, so the slower one decides."""
        return max(self.device_seconds(cost), self.host_seconds(cost))


CARDS = {  # dense peaks, from the makers' papers: see the hardware guide
    "A100": Card("A100 40 GB", 1.555e12, {"fp32": 19.5e12, "tf32": 156e12, "half": 312e12}),
    "RTX 4090": Card("RTX 4090", 1.008e12, {"fp32": 82.6e12, "tf32": 82.6e12, "half": 165e12}),
    "H100": Card("H100 SXM5", 3.35e12, {"fp32": 67e12, "tf32": 495e12, "half": 989e12}),
}
