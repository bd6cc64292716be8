"""What a compiler makes of the kernels: registers, spills, shared memory, matrix instructions, loads, occupancy.

Nothing runs, so no GPU is needed: Triton compiles for a named architecture, and the tools in its wheel read the result.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .launch import HAS_TRITON, interpreting
from .spec import FLOATS, Spec

# modules of this package that have `specs()`
OPERATIONS = (
    "layer_norm",
    "window_rows",
    "shift_partition",
    "reverse_unshift",
    "window_attention",
    "adamw",
    "linear_gelu",
    "linear",
    "int8",
    "int8_linear",
    "int8_window_attention",
    "layer_norm_quantize",
)


@dataclass(frozen=True)
class Architecture:
    """What one multiprocessor has (CUDA C++ programming guide, table of compute capabilities)."""

    warps: int
    blocks: int
    shared: int  # bytes for all blocks; each takes `RESERVED` more than it asks for
    registers: int = 65536


RESERVED = 1024
ARCHITECTURES = {
    "sm_80": Architecture(64, 32, 164 * 1024),
    "sm_86": Architecture(48, 16, 100 * 1024),
    "sm_89": Architecture(48, 24, 100 * 1024),
    "sm_90": Architecture(64, 32, 228 * 1024),
    "sm_100": Architecture(64, 32, 228 * 1024),
}


@dataclass(frozen=True)
class Row:
    """One kernel, compiled for one dtype and architecture.

    Attributes:
        registers: of a thread.
        spill_bytes: of a thread's registers that went to memory: its stack, which Triton uses for nothing else.
        shared_bytes: of a program.
        mma: the matrix instruction in the machine code, as "HMMA.16816.F32"; empty where there is none.
        vector_bytes: the widest global load of a thread.
        occupancy: resident warps, of those that a multiprocessor can hold.
    """

    name: str
    target: str
    dtype: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    mma: str
    vector_bytes: int
    occupancy: float
    num_warps: int


def all_specs() -> list[Spec]:
    """Every launch that the kernels name for the report."""
    return [spec for op in OPERATIONS for spec in import_module(f"{__package__}.{op}").specs()]


def compile_report(
    op: str | None = None, target: str = "sm_80", dtypes: Sequence[str] = ("fp32", "fp16", "bf16")
) -> list[dict[str, Any]]:
    """Compile kernels for an architecture and say what they need.

    Args:
        op: rows whose name begins so, as "layer_norm"; all when None.
        target: "sm_80" (A100), "sm_86" (A10, RTX 30), "sm_89" (L4, RTX 40), "sm_90" (H100, H200) or "sm_100" (B200).
        dtypes: of the tensors.

    Returns:
        A dict a row, with the fields of `Row`.

    Raises:
        ValueError: an unknown `op`, `target` or dtype.
        ImportError: triton is not installed.
    """
    check_compiler(target)
    if isinstance(dtypes, str) or not set(dtypes) <= set(FLOATS):
        raise ValueError(f"dtypes={dtypes!r}: give a list of {', '.join(FLOATS)}")
    names = [spec.name for spec in all_specs() if spec.name.startswith(op or "")]
    if not names:
        known = sorted({spec.name.split("[")[0] for spec in all_specs()})
        raise ValueError(f"there is no kernel {op!r}; choose one of {', '.join(known)}")
    return compiling(_compile, names, target, list(dtypes))


def check_compiler(target: str = "sm_80") -> None:
    """Raise ImportError where triton is not installed, and ValueError for an unknown `target`."""
    if not HAS_TRITON:
        raise ImportError("compiling kernels needs triton: pip install triton (Linux)")
    if target not in ARCHITECTURES:
        raise ValueError(f"target={target!r}: choose one of {', '.join(ARCHITECTURES)}")


def spec_named(name: str) -> Spec:
    """The launch of that name. Raises ValueError where there is none."""
    found = next((spec for spec in all_specs() if spec.name == name), None)
    if found is None:
        raise ValueError(f"there is no kernel {name!r}; compile_report() lists them")
    return found


def compiling(function: Callable[..., Any], *wanted: Any) -> Any:
    """`function(*wanted)`, which compiles; arguments and result must be fit for JSON.

    Where kernels are interpreted, Triton's own functions cannot be compiled: another process can.
    """
    return in_a_process(function, *wanted) if interpreting() else function(*wanted)


def in_a_process(function: Callable[..., Any], *wanted: Any) -> Any:
    """The same in a process of its own, without the interpreter."""
    name = function.__name__
    code = f"import json, sys; from {function.__module__} import {name}; "
    code += f"print(json.dumps({name}(*json.load(sys.stdin))))"
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


def _compile(names: list[str], target: str, dtypes: list[str]) -> list[dict[str, Any]]:
    chosen = [spec for spec in all_specs() if spec.name in names]
    return [asdict(row_of(spec, target, t)) for spec in chosen for t in dtypes if t in spec.dtypes]


def compile_spec(spec: Spec, target: str, dtype: str) -> Any:
    """What Triton's compiler makes of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, known = spec.source(dtype)
    source = ASTSource(spec.kernel, signature, constants, known)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    return triton.compile(source, GPUTarget("cuda", int(target[3:]), 32), options)


def row_of(spec: Spec, target: str, dtype: str) -> Row:
    """A launch, compiled, as a row of the report."""
    made = compile_spec(spec, target, dtype)
    shared = made.metadata.shared
    registers, stack, code = read_cubin(made.asm["cubin"])
    return Row(
        spec.name,
        target,
        dtype,
        registers,
        stack,
        shared,
        mma_of(code),
        widest_load(code),
        occupancy(target, registers, shared, spec.num_warps),
        spec.num_warps,
    )


# --- reading machine code


@cache
def _tool() -> str:
    import triton.backends.nvidia as nvidia

    return str(Path(nvidia.__file__).parent / "bin" / "cuobjdump")


def read_cubin(cubin: bytes) -> tuple[int, int, str]:
    """Registers of a thread, bytes of its stack, and the machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("--dump-resource-usage", file.name)
        code = _run("-sass", file.name)
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"], code


def _run(*args: str) -> str:
    return subprocess.run([_tool(), *args], capture_output=True, text=True, check=True).stdout


def mma_of(code: str) -> str:
    """The matrix instructions of machine code, the most frequent one named; empty where there is none."""
    found = re.findall(r"\b((?:H|I|Q|B|UTC|HG|IG|QG)MMA\.[\w.]+)", code)
    return max(set(found), key=lambda name: (found.count(name), name)) if found else ""


def widest_load(code: str) -> int:
    """Bytes of the widest global load of a thread: 16 is the most there is."""
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.[\w.]+", code)
    if "UTMALDG" in code:
        return 16
    return max((_width(load) for load in loads), default=0)


def _width(load: str) -> int:
    for bits in (128, 64):
        if f".{bits}" in load:
            return bits // 8
    return 2 if re.search(r"\.[US]16", load) else 1 if re.search(r"\.[US]8", load) else 4


def occupancy(target: str, registers: int, shared: int, num_warps: int) -> float:
    """Warps that a multiprocessor holds at once, of the most it can: what registers and shared memory allow.

    Registers are given to a warp in pieces of 256.
    """
    a = ARCHITECTURES[target]
    of_a_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        a.blocks,
        a.warps // num_warps,
        a.registers // (of_a_warp * num_warps),
        a.shared // (shared + RESERVED),
    )
    return blocks * num_warps / a.warps
