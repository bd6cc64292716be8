"""Which instructions a compiled kernel holds, and how many: enough to see work that is done twice. Nothing runs."""

import inspect
import re
import runpy
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import check_compiler, compile_spec, compiling, in_a_process, read_cubin, spec_named
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
        ValueError: no such kernel, target or argument.
        ImportError: triton is not installed.
    """
    check_compiler(target)
    for change in changes:
        spec_named(name).changed(change)  # a wrong name is an error here
    return compiling(_count, name, [dict(change) for change in changes], target, dtype)


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
        ValueError: no such target.
        ImportError: triton is not installed.
    """
    check_compiler(target)
    source = "import triton\nimport triton.language as tl\n\n\n" + inspect.getsource(kernel.fn)
    wanted = (source, kernel.fn.__name__, dict(scalars), dict(constants), num_warps, target, dtype)
    return in_a_process(_count_source, *wanted)


def _count(name: str, changes: list[dict[str, int]], target: str, dtype: str) -> list[dict[str, int]]:
    spec = spec_named(name)
    return [_instructions(spec.changed(change), target, dtype) for change in changes]


def _count_source(
    source: str, name: str, scalars: dict, constants: dict, warps: int, target: str, dtype: str
):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own_kernel.py"  # Triton reads the source of a kernel from its file
        path.write_text(source)
        spec = Spec(name, runpy.run_path(str(path))[name], {}, scalars, constants, warps, 1)
        return _instructions(spec, target, dtype)


def _instructions(spec: Spec, target: str, dtype: str) -> dict[str, int]:
    return opcodes(read_cubin(compile_spec(spec, target, dtype).asm["cubin"])[2])


def opcodes(code: str) -> dict[str, int]:
    """How often each operation occurs in machine code as text, its modifiers left out."""
    lines = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", code)
    return dict(Counter(lines).most_common())
