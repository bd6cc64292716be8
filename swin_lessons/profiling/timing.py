"""Fair timing: contestants take turns in one process, in a random order, and medians are compared.

A machine changes with time (heat, other users, frequency), so two numbers taken minutes apart do not compare.
Here every round runs every contestant once; whatever slows a round slows all. Each sample has a wall time and
a process CPU time. On a busy machine, with one thread, believe the second; with more threads it is their sum.

A small operation that is called again and again on the same tensors finds them in the cache, as it would not in a
network. `rotating` gives it copies in turn, more of them than the cache holds.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Comparison", "Timer", "Timing", "cache_bytes", "compare", "rotating"]

SOME_CACHE = 64 << 20  # bytes, where the system does not tell
MOST_COPIES = 1000


@dataclass
class Timing:
    """Seconds a call of one contestant, one entry a round. `cuda` is empty off the GPU."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cuda: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds a call: by CUDA events on a GPU, else by the wall clock."""
        return statistics.median(self.cuda or self.wall)

    @property
    def median_cpu(self) -> float:
        """Median process CPU seconds a call, summed over threads."""
        return statistics.median(self.cpu)

    @property
    def best(self) -> float:
        """Fastest round."""
        return min(self.cuda or self.wall)

    @property
    def iqr(self) -> float:
        """Interquartile range in seconds: the spread that the median hides."""
        return _iqr(self.cuda or self.wall)


@dataclass
class Comparison:
    """Timings by contestant. Ratios are time over the baseline's time: lower is faster."""

    baseline: str
    timings: dict[str, Timing]
    threads: int
    rounds: int

    def ratio(self, name: str, clock: str = "wall") -> float:
        """Median over rounds of (time / the baseline's time in the same round).

        `clock` is "wall", "cpu" or "cuda". A ratio within a round is immune to drift from round to round.
        """
        mine, base = (getattr(self.timings[n], clock) for n in (name, self.baseline))
        return statistics.median(a / b for a, b in zip(mine, base, strict=True))

    def speedup(self, name: str) -> float:
        """How many times faster than the baseline, on the GPU's clock or the wall's."""
        return 1 / self.ratio(name, "cuda" if self.timings[name].cuda else "wall")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: seconds, medians, ratios and every sample."""
        rows = {name: self._row(name, timing) for name, timing in self.timings.items()}
        keys = {"baseline": self.baseline, "threads": self.threads, "rounds": self.rounds}
        return keys | {"timings": rows}

    def _row(self, name: str, timing: Timing) -> dict[str, Any]:
        row = {key: getattr(timing, key) for key in ("median", "median_cpu", "best", "iqr")}
        row |= {"ratio": 1 / self.speedup(name), "ratio_cpu": self.ratio(name, "cpu")}
        return row | {"samples": {clock: times for clock, times in asdict(timing).items() if times}}

    def table(self) -> str:
        """Plain text: one line a contestant."""
        head = "".join(
            f"{title:>11s}" for title in ("median ms", "IQR ms", "CPU ms", "ratio", "CPU ratio", "faster")
        )
        return "\n".join([f"{'':24s}{head}", *(self._line(name) for name in self.timings)])

    def _line(self, name: str) -> str:
        t, faster = self.timings[name], self.speedup(name)
        times = f"{t.median * 1e3:11.2f}{t.iqr * 1e3:11.2f}{t.median_cpu * 1e3:11.2f}"
        return f"{name:24s}{times}{1 / faster:11.3f}{self.ratio(name, 'cpu'):11.3f}{faster:10.2f}x"


class Timer:
    """A context that measures its block: `.wall`, `.cpu` and, on a CUDA device, `.cuda`, in seconds.

    >>> with Timer() as timer:
    ...     _ = sum(range(1000))
    >>> timer.wall > 0
    True
    """

    wall: float
    cpu: float
    cuda: float | None = None

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def __enter__(self) -> Timer:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record(torch.cuda.current_stream(self.device))
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self._events[1].record(torch.cuda.current_stream(self.device))
            torch.cuda.synchronize(self.device)
            self.cuda = self._events[0].elapsed_time(self._events[1]) / 1e3
        self.wall, self.cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def compare(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    baseline: str | None = None,
    rounds: int = 7,
    warmup: int = 1,
    min_time: float = 0.02,
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: Callable[[str], Any] | None = None,
) -> Comparison:
    """Time the contestants in turns: each round calls all of them once, in a new random order.

    Args:
        contestants: {name: function without arguments}.
        baseline: whose time is 1; the first by default.
        rounds: samples of each; at least 7, so that a median means something.
        warmup: calls of each before the first round.
        min_time: seconds; a faster contestant is called several times, and the mean is one sample.
        device: on a CUDA device, samples carry the time between CUDA events too.
        seed: of the order.
        progress: called with the contestant's name after each sample.

    Raises:
        ValueError: no contestants, an unknown baseline, or fewer than 7 rounds.
    """
    baseline = _checked(contestants, baseline, rounds)
    calls = {name: _warm_up(fn, warmup, min_time, device) for name, fn in contestants.items()}
    timings = {name: Timing() for name in contestants}
    order, shuffler = list(contestants), random.Random(seed)
    for _ in range(rounds):
        shuffler.shuffle(order)
        with _no_gc():
            for name in order:
                _sample(timings[name], contestants[name], calls[name], device)
                if progress:
                    progress(name)
    return Comparison(baseline, timings, torch.get_num_threads(), rounds)


def rotating(function: Callable[..., Any], *args: Any, cover: int | None = None) -> Callable[[], Any]:
    """A contestant that calls `function(*args)` with other copies of the tensors each time.

    The copies fill `cover` bytes, twice the last cache by default, before the first comes round again (there are 1000
    at the most). So each call reads its operands from memory, whatever the cache holds. Arguments that are no tensors
    stay as they are.

    Raises:
        ValueError: there is no tensor among `args`.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    if not size:
        raise ValueError("rotating needs tensors to copy: give the function's operands as arguments")
    cover = 2 * cache_bytes(tensors[0].device) if cover is None else cover
    copies = [_copy(args) for _ in range(min(MOST_COPIES, cover // size + 1))]
    turns = itertools.cycle(copies)
    return lambda: function(*next(turns))


def _copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
    )


def cache_bytes(device: str | torch.device = "cpu") -> int:
    """Size of the last cache before memory: a GPU's L2; a CPU's L3 or L2; 64 MiB where the system does not tell."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [_kibibytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    names = [
        n for n in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE") if n in getattr(os, "sysconf_names", {})
    ]
    return max([*sizes, *map(os.sysconf, names)], default=0) or SOME_CACHE


def _kibibytes(path: Path) -> int:
    """Linux writes "32768K"."""
    return int(path.read_text().strip().removesuffix("K")) * 1024


def _checked(contestants: Mapping[str, Any], baseline: str | None, rounds: int) -> str:
    if not contestants:
        raise ValueError("contestants is empty: give {name: function}")
    if rounds < 7:
        raise ValueError(f"rounds={rounds} is too few for a median: use at least 7")
    name = next(iter(contestants)) if baseline is None else baseline
    if name not in contestants:
        raise ValueError(f"baseline={name!r} is not among the contestants: {', '.join(contestants)}")
    return name


def _warm_up(fn: Callable[[], Any], warmup: int, min_time: float, device: str | torch.device) -> int:
    """Run it, and return how many calls make a sample last `min_time`."""
    fastest = float("inf")
    for _ in range(warmup):
        with Timer(device) as timer:
            fn()
        fastest = min(fastest, timer.wall)
    return 1 if warmup == 0 else max(1, min(1000, round(min_time / max(fastest, 1e-9))))


def _sample(timing: Timing, fn: Callable[[], Any], calls: int, device: str | torch.device) -> None:
    with Timer(device) as timer:
        for _ in range(calls):
            fn()
    timing.wall.append(timer.wall / calls)
    timing.cpu.append(timer.cpu / calls)
    if timer.cuda is not None:
        timing.cuda.append(timer.cuda / calls)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Collect garbage before a round, and not while its clock runs."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _iqr(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first
