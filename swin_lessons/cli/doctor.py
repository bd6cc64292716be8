"""`swin-lessons doctor`: what this machine has, and what that means for the lessons."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from swin_lessons.cli._page import add_command, table

TEXT = """\
Look at this machine and say what it means for the lessons: Python and PyTorch, the processor and the
number formats it multiplies natively, memory, disk, GPU, Fashion-MNIST, a browser, optional extras.

Nothing is fetched or changed. Marks: "ok" is all there, "--" is missing but optional, "!!" needs you.
The exit status is 1 if anything is marked "!!".
"""
EXAMPLES = """\
  swin-lessons doctor
  swin-lessons doctor --json > machine.json      for a bug report
"""
# extra -> a module that it installs, and what it is for
EXTRAS = {
    "vision": ("torchvision", "your own images, peers, pretrained weights"),
    "plots": ("matplotlib", "figures"),
    "peers": ("transformers", "`swin-lessons bench --against`"),
    "deploy": ("onnxruntime", "export and INT8 runtimes"),
    "book": ("jupyter_book", "`make book`, JupyterLab"),
    "test": ("pytest", "`make test`"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ENOUGH_MEMORY, ENOUGH_DISK = 4.0, 3.0  # GiB: the largest lesson at CPU size; data sets and runs
MARKS = {True: "ok", False: "!!", None: "--"}


class Finding(NamedTuple):
    """One line: `ok` is True, False (needs the user) or None (optional and missing)."""

    name: str
    ok: bool | None
    value: str
    meaning: str


def add_parser(subparsers) -> None:
    """Add this subcommand."""
    parser = add_command(
        subparsers, "doctor", run, "what this machine has, and what that means", TEXT, EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--root", metavar="FOLDER", help="where data sets lie, if not in the usual places")


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from swin_lessons.profiling import machine_info
    from swin_lessons.runtime import profile

    machine = machine_info()
    findings = [*software(machine), *hardware(machine["hardware"]), *surroundings(args.root), *extras()]
    if args.json:
        report = {"profile": profile(), **machine, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(table([(f"{MARKS[f.ok]}  {f.name}", f"{f.value}: {f.meaning}") for f in findings], indent=""))
        print(f"\nprofile: {profile()} ({PROFILE_MEANING[profile()]})")
    return 1 if any(finding.ok is False for finding in findings) else 0


PROFILE_MEANING = {
    "ci": "lessons run a few steps, to show that they run",
    "cpu": "lessons run at a size that two CPU cores finish in minutes",
    "gpu": "lessons run at full size",
}


def software(machine: dict[str, Any]) -> list[Finding]:
    """Python, PyTorch, Triton."""
    versions = machine["versions"]
    python_ok, torch_ok = (3, 11) <= sys.version_info[:2] <= (3, 13), _at_least(versions["torch"], (2, 11))
    return [
        Finding(
            "Python", python_ok, versions["python"], "supported" if python_ok else "use Python 3.11 to 3.13"
        ),
        Finding("PyTorch", torch_ok, versions["torch"], "supported" if torch_ok else "use 2.11 or newer"),
        _triton(versions.get("triton")),
    ]


def _triton(version: str | None) -> Finding:
    if version is None:
        return Finding(
            "Triton", None, "not installed", "kernels fall back to PyTorch; needed in lessons 10 to 13"
        )
    return Finding(
        "Triton", True, version, "kernels compile for a GPU, and run in the interpreter without one"
    )


def _at_least(version: str, lowest: tuple[int, int]) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= lowest


def hardware(found: dict[str, Any]) -> list[Finding]:
    """Processor, memory, GPU."""
    memory = found["memory_gib"]
    enough = memory >= ENOUGH_MEMORY
    return [
        Finding("CPU", True, found["cpu"], f"{found['cores']} cores, PyTorch uses {found['threads']}"),
        *_number_formats(set(found["cpu_features"])),
        Finding(
            "Memory", enough, f"{memory} GiB", "enough" if enough else f"lessons need {ENOUGH_MEMORY:.0f} GiB"
        ),
        _gpu(found),
    ]


def _number_formats(features: set[str]) -> list[Finding]:
    bf16 = bool(features & {"AVX512_BF16", "AMX_BF16", "NEON_BF16"})
    int8 = bool(features & {"VNNI", "AMX_INT8", "NEON_DOT"})
    listed = ", ".join(sorted(features)) or "no vector extensions seen"
    return [
        Finding("bf16", bf16 or None, listed if bf16 else "not native",
                "bf16 trains faster than fp32: lesson 4 measures it" if bf16 else "training runs in fp32"),
        Finding("int8", int8 or None, "native" if int8 else "not native",
                "the CPU has instructions for INT8 inference" if int8
                else "INT8 models are smaller here, but hardly faster"),
    ]  # fmt: skip


def _gpu(found: dict[str, Any]) -> Finding:
    if not found["gpu"]:
        return Finding("GPU", None, "none", "all lessons run on the CPU at a smaller size; no GPU times")
    value = f"{found['gpu']}, {found['gpu_memory_gib']} GiB, compute capability {found['gpu_capability']}"
    return Finding("GPU", True, value, gpu_meaning(float(found["gpu_capability"])))


def gpu_meaning(capability: float) -> str:
    """What the lessons can do on a GPU of a compute capability, such as 8.6."""
    if capability < 7.5:
        return "lessons run in fp32; too old for Triton's kernels and INT8 tensor cores"
    if capability < 8.0:
        return "fp16 and INT8 tensor cores; no bf16, no 2:4 sparsity, no tensor cores from Triton"
    if capability < 8.9:
        return "bf16, INT8, INT4 and 2:4 sparse tensor cores; no FP8"
    return "bf16, INT8, FP8 and 2:4 sparse tensor cores; no INT4 tensor cores from Hopper on"


def surroundings(root: str | None) -> list[Finding]:
    """Disk, data, browser."""
    return [_disk(), _fashion_mnist(root), _browser()]


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    enough = free >= ENOUGH_DISK
    advice = "enough" if enough else f"lessons need {ENOUGH_DISK:.0f} GiB for data sets and runs"
    return Finding("Disk", enough, f"{free:.0f} GiB free here", advice)


def _fashion_mnist(root: str | None) -> Finding:
    from swin_lessons.data import fashion_mnist

    for folder in fashion_mnist.search_folders(root):
        if fashion_mnist.is_complete(folder):
            return Finding("Fashion-MNIST", True, str(folder), "found")
    return Finding("Fashion-MNIST", None, "not found", "fetch it with `swin-lessons data fashion-mnist`")


def _browser() -> Finding:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found:
        return Finding("Chromium", True, found, "the tests of the rendered site can run")
    return Finding("Chromium", None, "not found", "only the tests of the rendered site need it")


def extras() -> list[Finding]:
    """Optional parts of the package."""
    return [_extra(name, module, use) for name, (module, use) in EXTRAS.items()]


def _extra(name: str, module: str, use: str) -> Finding:
    if importlib.util.find_spec(module):
        return Finding(f"extra {name}", True, "installed", use)
    return Finding(f"extra {name}", None, "not installed", f'{use}: pip install "swin-lessons[{name}]"')
