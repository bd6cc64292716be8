"""Measured numbers as JSON files, each with its origin. `book/results/*.json` is their only home in the book.

A result is a JSON object. `save_result` adds the key `provenance`:

    hardware   cpu (str), cores (int, logical), threads (int, of PyTorch), memory_gib (float),
               gpu (str or null)
    versions   python, torch, numpy, swin_lessons (str)
    date       ISO 8601, UTC, to the second
    command    what was run (str)
    commit     `git describe --always --dirty` of the working folder (str), "unknown" outside a repository
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROVENANCE: dict[str, tuple[type, ...]] = {
    "hardware": (dict,),
    "versions": (dict,),
    "date": (str,),
    "command": (str,),
    "commit": (str,),
}
HARDWARE: dict[str, tuple[type, ...]] = {
    "cpu": (str,),
    "cores": (int,),
    "threads": (int,),
    "memory_gib": (float, int),
    "gpu": (str, type(None)),
}
VERSIONS = ("python", "torch", "numpy", "swin_lessons")


def cpu_name() -> str:
    """The processor's trade name where the system tells it, else the architecture."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            out = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
            return out.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    import psutil
    import torch

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    names = ("torch", "numpy", "swin-lessons")
    return {"python": platform.python_version(), **{n.replace("-", "_"): _version(n) for n in names}}


def commit() -> str:
    """The commit of the repository that holds the current folder, with "-dirty" when it had changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return run.stdout.strip() or "unknown"


def this_command(argv: list[str] | None = None) -> str:
    """The running command without this machine's folders: the program by name, paths relative."""
    program, *rest = sys.argv if argv is None else argv
    name = Path(program).name
    if name == "__main__.py":
        name = f"python -m {Path(program).parent.name}"
    elif name in ("", "-c"):
        name = "python"
    elif name.endswith(".py"):
        name = f"python {_relative(program)}"
    return " ".join([name, *(shlex.quote(_relative(a)) for a in rest)])


def _relative(argument: str) -> str:
    here = f"{Path.cwd()}{os.sep}"
    return argument.replace(here, "")


def provenance(command: str | None = None) -> dict[str, Any]:
    """Where a number comes from: see the module's text for the keys."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command or this_command(),
        "commit": commit(),
    }


def check_result(result: Any, name: str = "result") -> None:
    """Raise ValueError, naming `name` and the key, when `result` is not an object with a full provenance."""
    if not isinstance(result, dict):
        raise ValueError(f"{name}: a result is a JSON object, found {type(result).__name__}")
    origin = _entry(result, "provenance", (dict,), name)
    for key, kinds in PROVENANCE.items():
        _entry(origin, key, kinds, f"{name}: provenance")
    for key, kinds in HARDWARE.items():
        _entry(origin["hardware"], key, kinds, f"{name}: provenance.hardware")
    for key in VERSIONS:
        _entry(origin["versions"], key, (str,), f"{name}: provenance.versions")
    try:
        datetime.fromisoformat(origin["date"])
    except ValueError:
        raise ValueError(
            f"{name}: provenance.date is {origin['date']!r}, expected an ISO 8601 date"
        ) from None


def _entry(table: dict[str, Any], key: str, kinds: tuple[type, ...], where: str) -> Any:
    if key not in table:
        raise ValueError(f"{where} lacks {key!r}: write the file with swin_lessons.results.save_result")
    if not isinstance(table[key], kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: {key!r} is {table[key]!r}, expected {expected}")
    return table[key]


def save_result(path: str | os.PathLike[str], data: dict[str, Any], *, command: str | None = None) -> Path:
    """Write `data` with its provenance to `path` as JSON: to a temporary file, which then takes the name.

    `command` says what was run; by default the running command line. Raises ValueError on NaN or infinity
    (JSON has neither: store null and say why) and on a `data` that brings its own `provenance`.
    """
    if "provenance" in data:
        raise ValueError("data already has the key 'provenance': save_result adds it, leave it out")
    path = Path(path)
    result = {"provenance": provenance(command), **data}
    check_result(result, path.name)
    try:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        raise ValueError(f"{path.name}: a number is NaN or infinite; store None instead") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text)
    return path


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a result. Raises FileNotFoundError or ValueError, with the file's name."""
    path = Path(path)
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    check_result(result, path.name)
    return result
