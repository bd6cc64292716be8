"""What the machine is, in plain values for JSON: the provenance of every measured number."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

__all__ = ["cpu_features", "machine_info"]

# name -> the kernel's flag; those that decide how fast bf16 and int8 run on a CPU
FEATURES = {
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_BF16": "amx_bf16",
    "AMX_INT8": "amx_int8",
    "NEON_DOT": "asimddp",
    "NEON_BF16": "bf16",
    "SVE": "sve",
}
PACKAGES = (
    "swin-lessons",
    "torch",
    "triton",
    "torchvision",
    "timm",
    "transformers",
    "onnxruntime",
    "openvino",
    "numpy",
)
TUNING = ("OMP_", "MKL_", "KMP_", "MALLOC_", "GLIBC_TUNABLES", "ONEDNN_", "LD_PRELOAD")  # they change timings


def machine_info() -> dict[str, Any]:
    """Processor, memory, GPU, threads; versions; commit; time (UTC, ISO 8601).

    The keys are those of `swin_lessons.results`: hardware, versions, date, commit. Nothing here names the
    user, the host or a path: the result may be published.
    """
    return {
        "hardware": _hardware(),
        "versions": _versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cpu_features": cpu_features(),
        "cores": os.cpu_count() or 1,
        "physical_cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "tuning": _tuning(),
        "load": _load(),
        **_gpu(),
    }


def cpu_features() -> list[str]:
    """Those of AVX2, AVX512, VNNI, AVX512_BF16, AMX_BF16, AMX_INT8, NEON_DOT, NEON_BF16, SVE that it has."""
    flags = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    if not flags:  # not Linux: PyTorch knows the family it dispatches to
        return [torch.backends.cpu.get_cpu_capability()]
    return [name for name, flag in FEATURES.items() if flag in flags]


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    """First value of `key` in Linux's /proc/cpuinfo, or an empty string."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key), "")


def _gpu() -> dict[str, Any]:
    """The current GPU; `gpu` is None where there is none."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties()
    return {
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "gpu_multiprocessors": properties.multi_processor_count,
    }


def _versions() -> dict[str, str]:
    """Python and the packages that are installed; CUDA's where PyTorch has it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package.replace("-", "_")] = metadata.version(package)
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _tuning() -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(TUNING)}
    if "LD_PRELOAD" in found:
        found["LD_PRELOAD"] = " ".join(Path(part).name for part in re.split("[ :]", found["LD_PRELOAD"]))
    return found


def _load() -> float | None:
    """Runnable processes, mean of the last minute: above the number of cores, mistrust timings."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _commit() -> str:
    """Commit of the source tree, "-dirty" when tracked files differ; "unknown" outside a repository."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    found = _output("git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    return found or "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
