"""One kernel of CUDA C++, written four ways and compiled: what half2, wide loads and arrays in registers do.

The job ends the first half of a Swin block: rows come in windows, and each number, plus bias and shortcut, goes to its
place on the map. So there is arithmetic on halves (little), arithmetic on indices (much), and memory. NVRTC, which
comes with PyTorch's CUDA wheels, compiles for a GPU that need not be there; tools in Triton's wheel read the result.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .instructions import opcodes
from .report import check_compiler, read_cubin, widest_load

WAYS = ("scalar", "half2", "vector", "array", "array, rolled")

HEADER = """
#include <cuda_fp16.h>

__device__ int place_of(int row) {  // from window order to the map: its row there
    int window = row / (WINDOW * WINDOW), token = row % (WINDOW * WINDOW);
    int across = W / WINDOW, image = window / (H / WINDOW * across), within = window % (H / WINDOW * across);
    int y = within / across * WINDOW + token / WINDOW + SHIFT;
    int x = within % across * WINDOW + token % WINDOW + SHIFT;
    return (image * H + (y < H ? y : y - H)) * W + (x < W ? x : x - W);
}

typedef uint4 Eight;  // eight halves, and one load: of a struct of halves the compiler makes four

__device__ unsigned add(unsigned a, unsigned b, unsigned c) {  // a pair of halves each
    half2 sum = __hadd2(__hadd2(reinterpret_cast<half2&>(a), reinterpret_cast<half2&>(b)), reinterpret_cast<half2&>(c));
    return reinterpret_cast<unsigned&>(sum);
}

__device__ Eight add(Eight a, Eight b, Eight c) {
    return make_uint4(add(a.x, b.x, c.x), add(a.y, b.y, c.y), add(a.z, b.z, c.z), add(a.w, b.w, c.w));
}
"""

KERNELS = {
    "scalar": """
extern "C" __global__ void kernel(
    const half* windows, const half* bias, const half* shortcut, half* map, int numbers
) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numbers) return;
    int channel = i % C, at = place_of(i / C) * C + channel;
    map[at] = __hadd(__hadd(windows[i], bias[channel]), shortcut[at]);
}
""",
    "half2": """
extern "C" __global__ void kernel(
    const half2* windows, const half2* bias, const half2* shortcut, half2* map, int numbers
) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;  // counts pairs, and so does all that follows
    if (i >= numbers / 2) return;
    int channel = i % (C / 2), at = place_of(i / (C / 2)) * (C / 2) + channel;
    map[at] = __hadd2(__hadd2(windows[i], bias[channel]), shortcut[at]);
}
""",
    "vector": """
extern "C" __global__ void kernel(
    const Eight* windows, const Eight* bias, const Eight* shortcut, Eight* map, int numbers
) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numbers / 8) return;
    int channel = i % (C / 8), at = place_of(i / (C / 8)) * (C / 8) + channel;
    map[at] = add(windows[i], bias[channel], shortcut[at]);
}
""",
    "array": """
extern "C" __global__ void kernel(
    const Eight* windows, const Eight* bias, const Eight* shortcut, Eight* map, int numbers
) {
    const int LANES = C / 8 / ARRAY;  // threads of a row
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / LANES, lane = i % LANES;
    if (row >= numbers / C) return;
    int from = row * (C / 8) + lane, to = place_of(row) * (C / 8) + lane;
    Eight a[ARRAY], b[ARRAY];
#pragma unroll UNROLL
    for (int j = 0; j < ARRAY; j++) {  // all loads are under way before the first sum
        a[j] = windows[from + j * LANES];
        b[j] = shortcut[to + j * LANES];
    }
#pragma unroll UNROLL
    for (int j = 0; j < ARRAY; j++) map[to + j * LANES] = add(a[j], bias[lane + j * LANES], b[j]);
}
""",
}
NUMBERS = {"scalar": 1, "half2": 2, "vector": 8}  # of a thread; an array holds several vectors
ARRAY = 3  # vectors
INTEGER = (
    "IMAD",
    "IADD3",
    "IADD",
    "LEA",
    "LOP3",
    "SHF",
    "ISETP",
    "SEL",
    "IMNMX",
    "VIADD",
    "PRMT",
    "UIMAD",
    "USHF",
)


HALF_SUM = re.compile(r"\b(?:HADD2|HFMA2)[\w.]* (?!\w+, -RZ, RZ)")  # those only set a register


@dataclass(frozen=True)
class Reading:
    """One way to write the kernel, as machine code. Counts are those of a thread.

    Attributes:
        way: one of `WAYS`.
        numbers: halves that a thread makes.
        registers, stack_bytes: of a thread; a stack is local memory, that is, memory.
        loads, stores: global.
        local: loads and stores of the stack.
        load_bytes: of the widest load.
        half_sums: instructions that add halves, alone or in pairs.
        index: integer instructions.
        instructions: all, no-operations left out; a loop that was not unrolled counts once.
    """

    way: str
    numbers: int
    registers: int
    stack_bytes: int
    loads: int
    stores: int
    local: int
    load_bytes: int
    half_sums: int
    index: int
    instructions: int


def cuda_source(way: str) -> str:
    """The kernel as CUDA C++, with what it needs, for `defines`.

    Raises:
        ValueError: an unknown way.
    """
    if way not in WAYS:
        raise ValueError(f"way={way!r}: choose one of {', '.join(WAYS)}")
    return HEADER + KERNELS[way.split(",")[0]]


def defines(
    way: str, C: int = 96, H: int = 56, W: int = 56, window: int = 7, shift: int = 3
) -> dict[str, int]:
    """What the source leaves open: sizes, vectors of an array, and whether its loops are unrolled.

    Raises:
        ValueError: channels that do not fill the vectors, or windows that do not tile the map.
    """
    if C % (8 * ARRAY) or H % window or W % window or not 0 <= shift < window:
        raise ValueError(
            f"C={C} must be a multiple of {8 * ARRAY}, and windows of {window}, shifted by {shift}, tile {H} x {W}"
        )
    sizes = {"C": C, "H": H, "W": W, "WINDOW": window, "SHIFT": shift}
    return {**sizes, "ARRAY": ARRAY, "UNROLL": 1 if way.endswith("rolled") else ARRAY}


def readings(ways: Sequence[str] = WAYS, target: str = "sm_80", **sizes: int) -> list[Reading]:
    """Compile the kernel each way for a GPU and count instructions.

    Args:
        ways: of `WAYS`.
        target: as `compile_report` takes it.
        sizes: `C`, `H`, `W`, `window`, `shift`, as in `defines`.

    Raises:
        ValueError: an unknown way or target, or sizes that do not fit.
        ImportError: NVRTC or triton is not installed.
    """
    check_compiler(target)
    return [_read(way, compile_cuda(cuda_source(way), target, defines(way, **sizes))) for way in ways]


def _read(way: str, cubin: bytes) -> Reading:
    registers, stack, code = read_cubin(cubin)
    found = opcodes(code)

    def count(*names: str) -> int:
        return sum(found.get(name, 0) for name in names)

    return Reading(
        way,
        NUMBERS.get(way, 8 * ARRAY),
        registers,
        stack,
        count("LDG"),
        count("STG"),
        count("LDL", "STL"),
        widest_load(code),
        len(HALF_SUM.findall(code)),
        count(*INTEGER),
        sum(found.values()) - count("NOP"),
    )


# --- NVRTC

TOOLKIT = Path("/usr/local/cuda/include")


def compile_cuda(source: str, target: str = "sm_80", defines: dict[str, int] | None = None) -> bytes:
    """CUDA C++ as machine code (a cubin) for a GPU that need not be there.

    Args:
        source: may include `cuda_fp16.h`.
        target: "sm_80", "sm_86", "sm_89", "sm_90" or any other that NVRTC knows.
        defines: macros.

    Raises:
        ValueError: the compiler refuses the source; what it says follows.
        ImportError: NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture={target}", f"--include-path={_include()}", "--std=c++17"]
    options += [f"--define-macro={name}={value}" for name, value in (defines or {}).items()]
    program = _result(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ValueError(f"NVRTC: {_text(nvrtc, program).strip() or failed.name}")
        cubin = b" " * _result(nvrtc.nvrtcGetCUBINSize(program))
        _result(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "NVRTC comes with PyTorch's CUDA wheels, or: pip install cuda-bindings[all]"
        ) from error
    return nvrtc


@cache
def _include() -> Path:
    """Where `cuda_fp16.h` is: in NVIDIA's wheels, or a CUDA toolkit's."""
    spec = find_spec("nvidia")
    wheels = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    places = [
        *(folder for p in wheels for folder in sorted(p.glob("*/include"))),
        TOOLKIT,
    ]
    for place in places:
        if (place / "cuda_fp16.h").is_file():
            return place
    raise ImportError("cuda_fp16.h was not found: pip install nvidia-cuda-runtime")


def _result(returned: tuple) -> Any:
    """What an NVRTC function gives after its status. Raises RuntimeError where that is no success."""
    status, *values = returned
    if status.value:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if values else None


def _text(nvrtc: Any, program: Any) -> str:
    log = b" " * _result(nvrtc.nvrtcGetProgramLogSize(program))
    _result(nvrtc.nvrtcGetProgramLog(program, log))
    return re.sub(r"\n{2,}", "\n", log.rstrip(b"\0 ").decode())
