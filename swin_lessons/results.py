"""Measured numbers as JSON files, each with its origin. `book/results/*.json` is their only home in the book.

A result is a JSON object. `save_result` adds the key `provenance`:

    hardware   cpu (str), cores (int, logical), threads (int, of PyTorch), memory_gib (float),
               gpu (str or null), and what else `profiling.machine_info` knows
    versions   python, torch, numpy, swin_lessons, and what else is installed (str)
    date       ISO 8601, UTC, to the second
    command    what was run (str)
    commit     of the source tree, "-dirty" when tracked files differ, "unknown" outside a repository
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from datetime import datetime
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
    from .profiling.machine import machine_info  # needs torch, which reading a result does not

    return {**machine_info(), "command": command or this_command()}


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
