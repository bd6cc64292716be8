"""The roofline of this machine: how fast it copies, how fast it multiplies, and so how fast any work can be.

Work that computes F operations and moves Q bytes takes at least max(F / rate, Q / bandwidth) seconds. Its intensity,
F / Q, says which: below the ridge, rate / bandwidth, memory decides; above it, arithmetic (Williams, Waterman and
Patterson 2009, doi:10.1145/1498765.1498785).

Both figures are measured, since no data sheet knows a laptop's threads or a cloud's share of a processor: a copy
between arrays that no cache holds, and a product of large square matrices. That takes seconds, so the result is kept
in the user's cache folder, one file for each machine, number of threads and version of PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from swin_lessons.profiling.machine import machine_info
from swin_lessons.profiling.timing import cache_bytes, compare
from swin_lessons.results import load_result, save_result

__all__ = ["Roofline", "measure_roofline", "roofline", "roofline_file"]

IDENTITY = (  # of the machine, among its `hardware`
    *("cpu", "cores", "threads", "gpu", "gpu_capability", "gpu_memory_gib", "gpu_multiprocessors"),
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIDE = {"cpu": 1536, "cuda": 8192}  # of the square matrices
MOST_COPY = 2 << 30  # bytes of each array


@dataclass(frozen=True)
class Roofline:
    """What a machine can do at best."""

    device: str
    bandwidth: float  # bytes a second that a copy reads and writes, together
    rates: dict[
        str, float
    ]  # FLOP a second of matrix products, by "fp32", and "fp16", "bf16" where hardware has them

    def rate(self, dtype: str = "fp32") -> float:
        """FLOP a second in `dtype`, or in fp32 where the hardware does not multiply that."""
        return self.rates.get(dtype, self.rates["fp32"])

    def ridge(self, dtype: str = "fp32") -> float:
        """The intensity, in FLOP a byte, above which arithmetic takes longer than memory."""
        return self.rate(dtype) / self.bandwidth

    def bound(self, flops: float, nbytes: float, dtype: str = "fp32") -> float:
        """The least seconds that so much work takes."""
        return max(flops / self.rate(dtype), nbytes / self.bandwidth)

    def limit(self, flops: float, nbytes: float, dtype: str = "fp32") -> str:
        """What decides: "memory" or "compute"."""
        return "compute" if flops > self.ridge(dtype) * nbytes else "memory"

    def text(self) -> str:
        """One line for people."""
        rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in self.rates.items())
        return f"{self.bandwidth / 1e9:,.1f} GB/s copied, {rates}; ridge at {self.ridge():.0f} FLOP a byte in fp32"


def roofline(
    device: str | torch.device = "cpu", *, remeasure: bool = False, folder: Path | None = None
) -> Roofline:
    """This machine's roofline, measured once.

    Args:
        remeasure: measure again, as after other programs disturbed the first time.
        folder: where it is kept; the user's cache folder by default. Where that cannot be written, a warning says so.
    """
    path = roofline_file(device, folder)
    if not remeasure and path.exists() and (kept := _read(path)):
        return kept
    _warn_if_busy()
    measured = measure_roofline(device)
    try:
        save_result(path, {"roofline": asdict(measured)})
    except OSError as error:
        warnings.warn(f"the roofline cannot be kept in {path.parent}: {error.strerror}", stacklevel=2)
    return measured


def _warn_if_busy() -> None:
    hardware = machine_info()["hardware"]
    if (hardware["load"] or 0) > hardware["cores"]:
        warnings.warn(
            "other programs keep this machine busy, so its roofline comes out too low: measure it again later "
            "(--remeasure)",
            stacklevel=3,
        )


def _read(path: Path) -> Roofline | None:
    """None for a file that is damaged or of another version: it is measured and written again."""
    try:
        return Roofline(**load_result(path)["roofline"])
    except (ValueError, KeyError, TypeError):
        return None


def roofline_file(device: str | torch.device = "cpu", folder: Path | None = None) -> Path:
    """Where the roofline of this machine and number of threads is kept."""
    from swin_lessons.data.files import cache_dir

    info = machine_info()
    identity: dict[str, Any] = {key: info["hardware"].get(key) for key in IDENTITY}
    identity |= {"device": torch.device(device).type, "torch": info["versions"]["torch"]}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return (folder or cache_dir() / "roofline") / f"{name}.json"


def measure_roofline(device: str | torch.device = "cpu") -> Roofline:
    """Measure now: some seconds. The best of seven rounds counts, since other programs only make it slower."""
    device = torch.device(device)
    rates = {name: _matrix_rate(DTYPES[name], device) for name in matrix_dtypes(device)}
    return Roofline(device.type, _bandwidth(device), rates)


def matrix_dtypes(device: torch.device) -> list[str]:
    """What the hardware multiplies: fp32; on a CPU bf16 with AVX512-BF16 or AMX; on a GPU fp16 (7.0), bf16 (8.0)."""
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        return ["fp32", *(["fp16"] if major >= 7 else []), *(["bf16"] if major >= 8 else [])]
    from swin_lessons.training.precision import best_precision

    return ["fp32", *(["bf16"] if best_precision(device) == "bf16" else [])]


def _bandwidth(device: torch.device) -> float:
    """Two arrays, each as large as the last cache and at most an eighth of the free memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    size = min(max(2 * cache_bytes(device), 64 << 20), free // 8, MOST_COPY)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


@torch.no_grad()
def _matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """The faster of the ways in which this package's linear layers may multiply; fp32 without TF32."""
    from swin_lessons.models.fast import linear

    side = SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        seconds = min(_best(lambda f=f: f(a, b), device) for f in (F.linear, linear))  # type: ignore[misc]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2 * side**3 / seconds


def _best(function: Callable[[], Any], device: torch.device) -> float:
    return compare({"it": function}, device=device).timings["it"].best
