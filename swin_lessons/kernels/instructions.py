"""Which instructions a compiled kernel holds, and how many: enough to see work that is done twice. Nothing runs."""

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .launch import HAS_TRITON, interpreting
from .report import ARCHITECTURES, all_specs, read_cubin
from .spec import Spec


def count_instructions(
    name: str, changes: Sequence[Mapping[str, int]] = ({},), target: str = "sm_80", dtype: str = "fp16"
) -> list[dict[str, int]]:
    """Instructions in the machine code of a kernel, by name: a dict for each change of its launch.

    Each warp runs them all, and those in a loop once a turn: a loop that was unrolled holds them several times.

    Args:
        name: of a row of `compile_report`, whole.
        changes: other values of `tl.constexpr` arguments, and of `num_warps`.
        target: as `compile_report` takes it.
        dtype: "fp32", "fp16" or "bf16".

    Raises:
        ValueError: no such kernel or target.
        ImportError: triton is not installed.
    """
    if not HAS_TRITON:
        raise ImportError("compiling kernels needs triton: pip install triton (Linux)")
    if target not in ARCHITECTURES:
        raise ValueError(f"target={target!r}: choose one of {', '.join(ARCHITECTURES)}")
    if name not in {spec.name for spec in all_specs()}:
        raise ValueError(f"there is no kernel {name!r}; compile_report() lists them")
    wanted = (name, [dict(change) for change in changes], target, dtype)
    return _in_a_process("_count", *wanted) if interpreting() else _count(*wanted)


def count_in(
    kernel: Any,
    scalars: Mapping[str, float],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    target: str = "sm_80",
    dtype: str = "fp16",
) -> dict[str, int]:
    """As `count_instructions`, for a kernel of your own that uses no name but `triton` and `tl`.

    Args:
        kernel: a `triton.jit` function; arguments named neither in `scalars` nor in `constants` point to `dtype`.
        scalars: arguments that are numbers, with typical values.
        constants: the `tl.constexpr` arguments.
        num_warps: as the launch gives it.
        target: as `compile_report` takes it.
        dtype: "fp32", "fp16" or "bf16".

    Raises:
        ImportError: triton is not installed.
    """
    if not HAS_TRITON:
        raise ImportError("compiling kernels needs triton: pip install triton (Linux)")
    source = "import triton\nimport triton.language as tl\n\n\n" + inspect.getsource(kernel.fn)
    wanted = (source, kernel.fn.__name__, dict(scalars), dict(constants), num_warps, target, dtype)
    return _in_a_process("_count_source", *wanted)


def _count(name: str, changes: list[dict[str, int]], target: str, dtype: str) -> list[dict[str, int]]:
    spec = next(spec for spec in all_specs() if spec.name == name)
    found = []
    for change in changes:
        constants = {k: v for k, v in change.items() if k != "num_warps"}
        warps = change.get("num_warps", spec.num_warps)
        other = replace(spec, constants={**spec.constants, **constants}, num_warps=warps)
        found.append(_compile(other, target, dtype))
    return found


def _count_source(
    source: str, name: str, scalars: dict, constants: dict, warps: int, target: str, dtype: str
):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own_kernel.py"  # Triton reads the source of a kernel from its file
        path.write_text(source)
        spec = Spec(name, runpy.run_path(str(path))[name], {}, scalars, constants, warps, 1)
        return _compile(spec, target, dtype)


def _compile(spec: Spec, target: str, dtype: str) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(spec.kernel, *spec.source(dtype))
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    made = triton.compile(source, GPUTarget("cuda", int(target[3:]), 32), options)
    return opcodes(read_cubin(made.asm["cubin"])[2])


def opcodes(code: str) -> dict[str, int]:
    """How often each operation occurs in machine code as text, its modifiers left out."""
    lines = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", code)
    return dict(Counter(lines).most_common())


def _in_a_process(function: str, *wanted: Any) -> Any:
    """As for `compile_report`: what is interpreted here can be compiled in another process."""
    code = "import json, sys; from swin_lessons.kernels import instructions; "
    code += f"print(json.dumps(instructions.{function}(*json.load(sys.stdin))))"
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
