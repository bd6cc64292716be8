"""What if a launch were another? A kernel of the report, compiled with other tiles or warps. Nothing runs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .launch import HAS_TRITON, interpreting
from .report import ARCHITECTURES, _row, all_specs

WARPS = "num_warps"


def compile_variants(
    name: str, changes: Sequence[Mapping[str, int]], target: str = "sm_80", dtype: str = "fp16"
) -> list[dict[str, Any]]:
    """Rows of `compile_report` for one kernel, a row for each change of its launch.

    Args:
        name: of the row in the report, whole, as "layer_norm[C=96]".
        changes: other values of `tl.constexpr` arguments, as `{"BLOCK_R": 1}`, and of `num_warps`. An empty one
            stands for the launch as it is.
        target: as `compile_report` takes it.
        dtype: "fp32", "fp16" or "bf16".

    Raises:
        ValueError: no kernel of that name, no such target or argument.
        ImportError: triton is not installed.
    """
    if not HAS_TRITON:
        raise ImportError("compiling kernels needs triton: pip install triton (Linux)")
    if target not in ARCHITECTURES:
        raise ValueError(f"target={target!r}: choose one of {', '.join(ARCHITECTURES)}")
    specs = [spec for spec in all_specs() if spec.name == name]
    if not specs:
        raise ValueError(f"there is no kernel {name!r}; compile_report() lists them")
    known = {*specs[0].constants, WARPS}
    unknown = sorted({key for change in changes for key in change} - known)
    if unknown:
        raise ValueError(f"{name} has no {', '.join(unknown)}; choose from {', '.join(sorted(known))}")
    wanted = (name, [dict(change) for change in changes], target, dtype)
    return _in_a_process(*wanted) if interpreting() else _compile(*wanted)


def _compile(name: str, changes: list[dict[str, int]], target: str, dtype: str) -> list[dict[str, Any]]:
    spec = next(spec for spec in all_specs() if spec.name == name)
    rows = []
    for change in changes:
        constants = {**spec.constants, **{k: v for k, v in change.items() if k != WARPS}}
        other = replace(spec, constants=constants, num_warps=change.get(WARPS, spec.num_warps))
        rows.append({**asdict(_row(other, target, dtype)), **change})
    return rows


def _in_a_process(*wanted: Any) -> list[dict[str, Any]]:
    """As for `compile_report`: what is interpreted here can be compiled in another process."""
    code = "import json, sys; from swin_lessons.kernels import variants; "
    code += "print(json.dumps(variants._compile(*json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(wanted),
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"compiling failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
