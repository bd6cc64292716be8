"""The peak memory of a step, in a process of its own."""

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

__all__ = ["PeakMemory", "peak_memory"]


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
