"""Where the time of a step goes, from `torch.profiler`: operation by operation, and by kind of block.

How an operation gets its kind: `kind_ranges` puts a range around each piece of the model, and the innermost range
around an operation names it. The backward pass has no ranges. There each node of autograd carries the sequence number
of the forward operation that made it, and the thread; the node and all that it runs get that operation's kind. Adding
into a parameter's gradient (AccumulateGrad, which has no number) follows the node that made the gradient. A block that
is recomputed in the backward pass opens its ranges again there, and these count.

On a CPU the time of a kind is all the time spent within its ranges and nodes, Python included. On a GPU it is the time
of the kernels that its operations launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from swin_lessons.profiling.kinds import KINDS as BLOCK_KINDS
from swin_lessons.profiling.kinds import REST, kind_ranges

__all__ = [
    "KINDS",
    "KindTime",
    "OpTime",
    "Trace",
    "by_kind",
    "kind_times",
    "ops_table",
    "profile_step",
    "trace_step",
]

# kind of work -> names of operations without their outer underscores; the first that fits wins
KINDS = {
    "attention": r"scaled_dot_product\w*|flash_attention\w*|softmax\w*",
    "matrix product": r"addmm|mm|bmm|baddbmm|\w*linear\w*|\w*convolution\w*",
    "norm": r"\w*layer_norm\w*|\w*batch_norm\w*|linalg_vector_norm",
    "activation": r"gelu\w*|relu\w*|threshold_backward|sigmoid\w*",
    "copy": r"copy|cat|clone|roll|index\w*|embedding\w*|gather|constant_pad_nd|fill|zero|to_copy",
    "elementwise": r"add|sub|mul|div|pow|neg|exp|log|clamp\w*|masked_fill|where|sum|mean|\w*clip\w*",
    "optimizer": r"fused_adam\w*|foreach\w*|Optimizer.*",
}
STEP = "step"
NODE = "autograd::engine::evaluate_function: "


@dataclass
class OpTime:
    """Self time of one operation in one step, in seconds: on the CPU (all threads that it waits for), on the GPU."""

    name: str
    calls: float
    cpu: float
    cuda: float = 0.0

    @property
    def seconds(self) -> float:
        """On the GPU where the operation runs there, else on the CPU."""
        return self.cuda or self.cpu

    @property
    def kind(self) -> str:
        """Which sort of work it is; "other" when nobody knows."""
        op = self.name.rpartition("::")[2].strip("_")
        return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, op)), "other")


@dataclass
class KindTime:
    """Seconds of one kind in one step, forward and backward, and how many kernels it launched on a GPU."""

    forward: float = 0.0
    backward: float = 0.0
    kernels: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass
class Trace:
    """A profile of some steps of one model."""

    profile: Any  # torch.profiler's
    steps: int
    cuda: bool

    def operations(self) -> list[OpTime]:
        """Operations of a step, the longest first."""
        ranges = {*BLOCK_KINDS, STEP}
        ops = [_op_time(e, self.steps) for e in self.profile.key_averages() if e.key not in ranges]
        return sorted((op for op in ops if op.seconds > 0), key=lambda op: op.seconds, reverse=True)

    def kinds(self) -> dict[str, KindTime]:
        """Times by kind of block in the fastest step, the least disturbed one.

        On a CPU they add up to `seconds`; on a GPU the rest of that, it was idle.
        """
        return kind_times((e for e in self._events if _starts_within(e, self._fastest)), self.cuda)

    @property
    def seconds(self) -> float:
        """Wall time of the fastest step under the profiler, which makes it longer."""
        return self._fastest.time_range.elapsed_us() / 1e6

    @cached_property
    def _events(self) -> list[Any]:
        return list(self.profile.events())

    @cached_property
    def _fastest(self) -> Any:
        steps = [e for e in self._events if e.name == STEP and e.device_type == DeviceType.CPU]
        return min(steps, key=lambda e: e.time_range.elapsed_us())

    def save(self, path: Any) -> None:
        """Write a trace that Perfetto (ui.perfetto.dev) and Chrome (about:tracing) show; gzipped if named `.gz`."""
        self.profile.export_chrome_trace(str(path))


def trace_step(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 5,
    cuda: bool = False,
) -> Trace:
    """Run `step` once to warm up, then `steps` times under the profiler, with ranges around the kinds of `model`.

    On a GPU each step ends when the device has done it.
    """
    with kind_ranges(model, record_function, optimizer):
        return Trace(_profiled(step, steps, cuda), steps, cuda)


def profile_step(step: Callable[[], Any], *, steps: int = 3, cuda: bool = False) -> list[OpTime]:
    """Operations of `step`, the longest first; means over `steps` runs after one to warm up.

    The profiler itself costs time, most for short operations: trust shares, and take totals from `compare`.
    """
    return Trace(_profiled(step, steps, cuda), steps, cuda).operations()


def _profiled(step: Callable[[], Any], steps: int, cuda: bool) -> Any:
    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as trace:
        for _ in range(steps):
            with record_function(STEP):
                step()
                if cuda:
                    torch.cuda.synchronize()
    return trace


def _op_time(event: Any, steps: int) -> OpTime:
    return OpTime(
        name=event.key,
        calls=event.count / steps,
        cpu=event.self_cpu_time_total / steps / 1e6,  # the profiler counts microseconds
        cuda=event.self_device_time_total / steps / 1e6,
    )


# ----------------------------------------------------------------------------------------------------
# Kinds


def kind_times(events: Iterable[Any], cuda: bool = False) -> dict[str, KindTime]:
    """Add up the events of a step by kind; see the module's text."""
    here = [e for e in events if e.device_type == DeviceType.CPU]
    here.sort(key=lambda e: e.time_range.start)
    finder = _Finder(here)
    times: dict[str, KindTime] = {}
    for event in here:
        kind, backward = finder.place(event)
        time = times.setdefault(kind, KindTime())
        kernels = [] if _is_range(event) else event.kernels
        micros = sum(k.duration for k in kernels) if cuda else event.self_cpu_time_total
        time.kernels += len(kernels)
        if backward:
            time.backward += micros / 1e6
        else:
            time.forward += micros / 1e6
    return times


class _Finder:
    """Kind and phase of each event, from the ranges and nodes around it."""

    def __init__(self, events: list[Any]) -> None:
        """`events` in the order in which they started."""
        self._makers = {  # the last operation that saw a number is the one that took it for its node
            (e.thread, e.sequence_nr): e
            for e in events
            if e.sequence_nr >= 0 and e.scope == 0 and not e.name.startswith(NODE)
        }
        self._nodes: dict[int, str] = {}
        last: dict[int, str] = {}  # of each thread
        for event in events:
            if event.name.startswith(NODE):
                kind = self._made_by(event) if event.sequence_nr >= 0 else last.get(event.thread, REST)
                self._nodes[event.id] = last[event.thread] = kind

    def _made_by(self, node: Any) -> str:
        maker = self._makers.get((node.fwd_thread, node.sequence_nr))
        return REST if maker is None else self.place(maker)[0]

    def place(self, event: Any) -> tuple[str, bool]:
        """Kind, and whether it is in the backward pass."""
        kind, around = None, event
        while around is not None:
            if _is_range(around) and around.name in BLOCK_KINDS:
                kind = kind or around.name
            elif around.name.startswith(NODE):
                return kind or self._nodes[around.id], True
            around = around.cpu_parent
        return kind or REST, False


def _is_range(event: Any) -> bool:
    return bool(event.is_user_annotation)


def _starts_within(event: Any, step: Any) -> bool:
    return step.time_range.start <= event.time_range.start <= step.time_range.end


def by_kind(ops: list[OpTime]) -> dict[str, float]:
    """Seconds a step by kind of work, the longest first."""
    seconds: dict[str, float] = {}
    for op in ops:
        seconds[op.kind] = seconds.get(op.kind, 0.0) + op.seconds
    return dict(sorted(seconds.items(), key=lambda item: item[1], reverse=True))


def ops_table(ops: list[OpTime], top: int = 15) -> str:
    """Plain text: the `top` longest operations."""
    total = sum(op.seconds for op in ops)
    lines = [f"{'operation':48s}{'kind':>16s}{'calls':>8s}{'ms':>10s}{'share':>8s}"]
    for op in ops[:top]:
        share = f"{100 * op.seconds / total:.1f}%"
        lines.append(f"{op.name[:47]:48s}{op.kind:>16s}{op.calls:8.0f}{op.seconds * 1e3:10.2f}{share:>8s}")
    return "\n".join(lines)
