"""Where the time of a step goes, operation by operation, from `torch.profiler`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["KINDS", "OpTime", "by_kind", "ops_table", "profile_step"]

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


def profile_step(step: Callable[[], Any], *, steps: int = 3, cuda: bool = False) -> list[OpTime]:
    """Operations of `step`, the longest first; means over `steps` runs after one to warm up.

    The profiler itself costs time, most for short operations: trust shares, and take totals from `compare`.
    """
    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as trace:
        for _ in range(steps):
            step()
    ops = [_op_time(event, steps) for event in trace.key_averages()]
    return sorted((op for op in ops if op.seconds > 0), key=lambda op: op.seconds, reverse=True)


def _op_time(event: Any, steps: int) -> OpTime:
    return OpTime(
        name=event.key,
        calls=event.count / steps,
        cpu=event.self_cpu_time_total / steps / 1e6,  # the profiler counts microseconds
        cuda=event.self_device_time_total / steps / 1e6,
    )


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
