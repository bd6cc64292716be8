"""A profile that a student can read: time, work and memory of each kind of block, and how near the roof it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from swin_lessons.profiling.kinds import KINDS, REST
from swin_lessons.profiling.memory import MemoryLedger, memory_ledger, saved_by_kind
from swin_lessons.profiling.peak import peak_allocated
from swin_lessons.profiling.roof import Roofline
from swin_lessons.profiling.steps import DTYPES, Contestant
from swin_lessons.profiling.timing import Timing, compare
from swin_lessons.profiling.trace import KindTime, OpTime, Trace, trace_step
from swin_lessons.profiling.work import BACKWARD, FORWARD, Work, count_work

__all__ = ["KindRow", "Profile", "kind_table", "profile_model", "total_row"]


@dataclass
class KindRow:
    """One kind of work in one step of a batch. Times are under the profiler, of its fastest step."""

    kind: str
    forward: float  # seconds
    backward: float  # seconds
    share: float  # of the step
    macs: int  # forward and backward
    bytes: int  # that its operations read and write
    saved: int  # bytes kept for the backward pass
    launches: int  # operations on a CPU, kernels on a GPU
    bound: float  # the least seconds that the roofline allows
    limit: str  # what decides that: "memory" or "compute"

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def intensity(self) -> float | None:
        """FLOP a byte; None where nothing is moved."""
        return 2 * self.macs / self.bytes if self.bytes else None

    @property
    def roof(self) -> float | None:
        """The bound over the time: 1 is as fast as can be. Above 1 where operands came from the cache."""
        return self.bound / self.seconds if self.seconds and self.bound else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"intensity": self.intensity, "roof": self.roof}


@dataclass
class Profile:
    """Everything about one step of one model."""

    rows: list[KindRow]  # kinds in the order of a forward pass, then "the rest"
    timing: Timing  # of the step without the profiler
    profiled: float  # seconds of the step under the profiler
    idle: float  # of those, how many the GPU did nothing; 0 on a CPU
    roofline: Roofline
    trace: Trace
    memory: MemoryLedger | None  # of a training step
    peak: int | None  # bytes that a training step held at its highest, as measured

    @property
    def ops(self) -> list[OpTime]:
        """Operations, the longest first."""
        return self.trace.operations()

    @property
    def covered(self) -> float:
        """Share of the measured time that has a kind, other than "the rest"."""
        return sum(row.share for row in self.rows if row.kind != REST)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: seconds and bytes."""
        return {
            "step_seconds": {"median": self.timing.median, "iqr": self.timing.iqr, "profiled": self.profiled}
            | {"gpu_idle": self.idle, "samples": asdict(self.timing)},
            "kinds": [row.to_dict() for row in self.rows],
            "covered": self.covered,
            "roofline": asdict(self.roofline),
            "peak_bytes": {"predicted": self.memory.peak, "measured": self.peak} if self.memory else None,
        }


def profile_model(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    roof: Roofline,
    *,
    train: bool = False,
    dtype: str = "fp32",
    rounds: int = 7,
) -> Profile:
    """Measure one step of `model`: a forward pass, or with `train` forward, cross-entropy, backward and AdamW.

    The step runs some twenty times: to time it, under the profiler, to count its work, to see its memory.
    The learning rate is 0, so the weights stay as they are.

    Args:
        x, y: images (B, C, H, W) and labels (B,), on the model's device.
        roof: of that device; see `roofline`.
        dtype: "fp32", or "bf16" by autocast.
        rounds: samples of the time without the profiler, at least 7.

    Raises:
        ValueError: an unknown dtype, or fewer rounds.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    contestant = Contestant(type(model).__name__, "ours", model, "train" if train else "infer", dtype)
    step = contestant.step(x, y)
    cuda = x.is_cuda
    timing = compare({"step": step}, rounds=rounds, warmup=2, device=x.device).timings["step"]
    trace = trace_step(model, step, optimizer=contestant.optimizer, cuda=cuda)
    work = count_work(model, step, contestant.optimizer)
    ledger, saved, peak = None, {}, None
    if train:
        with _autocast(x, dtype):
            ledger = memory_ledger(model, x, optimizer=contestant.optimizer)
            saved = saved_by_kind(model, x)
        peak = ledger.resident + peak_allocated(step, x.device)
    times = trace.kinds()
    profiled = trace.seconds
    busy = sum(time.seconds for time in times.values())
    rows = _rows(times, work, saved, roof, dtype, busy, cuda)
    return Profile(rows, timing, profiled, max(0.0, profiled - busy), roof, trace, ledger, peak)


def _autocast(x: Tensor, dtype: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bf16")


def _rows(
    times: dict[str, KindTime],
    work: dict[tuple[str, str], Work],
    saved: dict[str, int],
    roof: Roofline,
    dtype: str,
    busy: float,
    cuda: bool,
) -> list[KindRow]:
    """A row for each kind that took time, did work or kept memory."""
    rows = []
    for kind in (*KINDS, REST):
        time = times.get(kind, KindTime())
        done = work.get((kind, FORWARD), Work()) + work.get((kind, BACKWARD), Work())
        kept = saved.get(kind, 0)
        if not (time.seconds or done.launches or kept):
            continue
        bound, limit = roof.bound(done.flops, done.bytes, dtype), roof.limit(done.flops, done.bytes, dtype)
        launches = time.kernels if cuda else done.launches
        share = time.seconds / busy if busy else 0.0
        rows.append(
            KindRow(
                kind, time.forward, time.backward, share, done.macs, done.bytes, kept, launches, bound, limit
            )
        )
    return rows


COLUMNS: dict[str, Callable[[KindRow], str]] = {
    "fwd ms": lambda r: f"{r.forward * 1e3:,.2f}",
    "bwd ms": lambda r: f"{r.backward * 1e3:,.2f}",
    "share": lambda r: f"{r.share:.1%}",
    "MMACs": lambda r: f"{r.macs / 1e6:,.1f}",
    "MB moved": lambda r: f"{r.bytes / 1e6:,.1f}",
    "MB kept": lambda r: f"{r.saved / 1e6:,.1f}",
    "launches": lambda r: f"{r.launches:,}",
    "FLOP/B": lambda r: "" if r.intensity is None else f"{r.intensity:,.1f}",
    "bound ms": lambda r: f"{r.bound * 1e3:,.2f}",
    "of roof": lambda r: "" if r.roof is None else f"{r.roof:.0%}",
    "limit": lambda r: r.limit if r.bytes else "",
}
TRAINING_ONLY = ("bwd ms", "MB kept")


def kind_table(profile: Profile) -> str:
    """Plain text: a line for each kind, and their sum."""
    hidden = () if profile.memory else TRAINING_ONLY
    columns = {name: show for name, show in COLUMNS.items() if name not in hidden}
    table = Table(box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in profile.rows:
        table.add_row(row.kind, *(show(row) for show in columns.values()))
    whole = total_row(profile.rows)
    table.add_row("total", *("" if name == "limit" else show(whole) for name, show in columns.items()))
    text = StringIO()
    Console(file=text, width=200, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def total_row(rows: list[KindRow]) -> KindRow:
    """The sum of all kinds. Its bound is the sum of theirs: each kind has to be done, one after the other."""
    numbers = ("forward", "backward", "share", "macs", "bytes", "saved", "launches", "bound")
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in numbers}
    return KindRow(kind="total", limit="", **sums)
