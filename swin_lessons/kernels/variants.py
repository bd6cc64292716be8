"""What if a launch were another? A kernel of the report, compiled with other tiles or warps. Nothing runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .report import check_compiler, compiling, row_of, spec_named


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
    check_compiler(target)
    for change in changes:
        spec_named(name).changed(change)  # a wrong name is an error here
    return compiling(_compile, name, [dict(change) for change in changes], target, dtype)


def _compile(name: str, changes: list[dict[str, int]], target: str, dtype: str) -> list[dict[str, Any]]:
    spec = spec_named(name)
    return [{**asdict(row_of(spec.changed(change), target, dtype)), **change} for change in changes]
