"""The peak memory of a step: of a process of its own, as the system sees it, or what PyTorch's allocator gives out."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["PeakMemory", "peak_allocated", "peak_memory"]


@dataclass
class PeakMemory:
    """Bytes resident in a process of its own: before the measured step, and at its highest."""

    before: int
    peak: int

    @property
    def rise(self) -> int:
        """What the step needed over what was there."""
        return self.peak - self.before


def peak_memory(make_step: Callable[[], Callable[[], Any]]) -> PeakMemory:
    """Peak resident memory of one step, in a new process so that nobody else's memory is in it.

    `make_step()` builds everything and returns the step; it runs once to warm up (gradients and optimiser
    states exist afterwards) and once measured. It travels to the new process, so it must be importable: a
    module-level function, or a `functools.partial` of one.

    Raises:
        ValueError: `make_step` cannot be sent to another process.
    """
    try:
        pickle.dumps(make_step)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"make_step={make_step!r} cannot be sent to a new process ({error}): "
            "define it at the top level of a module, and pass arguments with functools.partial"
        ) from None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, make_step, torch.get_num_threads()).result()


def _measure(make_step: Callable[[], Callable[[], Any]], threads: int) -> PeakMemory:
    torch.set_num_threads(threads)
    step = make_step()
    step()
    before = _reset_peak()
    step()
    return PeakMemory(before, max(before, _peak_rss()))


def peak_allocated(step: Callable[[], Any], device: str | torch.device = "cpu") -> int:
    """Bytes of tensors that `step` holds at its highest, over what is there before it. Run it once to warm up first.

    This is what PyTorch's allocators give out: on a GPU, `torch.cuda.max_memory_allocated`; on a CPU the same from
    the profiler's record of every allocation. A process needs more: the libraries themselves, and what its allocator
    keeps or cannot use, which `peak_memory` sees.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        now += change.nbytes()
        highest = max(highest, now)
    return highest


def _reset_peak() -> int:
    """Start a new high-water mark where the system allows it (Linux); return the bytes resident now."""
    marker = Path("/proc/self/clear_refs")
    if marker.exists():
        marker.write_text("5")
    return psutil.Process().memory_info().rss


def _peak_rss() -> int:
    """Bytes at the high-water mark: Linux, Windows, macOS."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
