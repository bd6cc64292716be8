"""The kernel in CUDA C++: what it computes (as C++, on whole numbers), and what a compiler makes of each way."""

import shutil
import subprocess

import numpy as np
import pytest
import torch

from swin_lessons.kernels import four_ways
from swin_lessons.kernels.four_ways import WAYS, compile_cuda, cuda_source, defines, readings
from swin_lessons.kernels.window_rows import paste_torch

pytest.importorskip("triton")
SIZES = {"C": 48, "H": 6, "W": 9, "window": 3, "shift": 2}

# CUDA's names for a C++ compiler: halves are whole numbers, and threads run one after the other.
SHIM = """
#include <cstdio>
#include <vector>
#define __device__
#define __global__
typedef short half;
struct half2 { short x, y; };
struct uint4 { unsigned x, y, z, w; };
struct dim { int x; };
static dim blockIdx, blockDim, threadIdx;
static half __hadd(half a, half b) { return a + b; }
static half2 __hadd2(half2 a, half2 b) { return {short(a.x + b.x), short(a.y + b.y)}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
"""
MAIN = """
template <class Number>
void run(void (*kernel)(const Number*, const Number*, const Number*, Number*, int), int n) {
    std::vector<uint4> data[4];  // windows, bias, shortcut, map
    int sizes[] = {n, C, n, n};
    for (int i = 0; i < 4; i++) data[i].resize(sizes[i] / 8);
    for (int i = 0; i < 3; i++) if (fread(data[i].data(), 2, sizes[i], stdin) != size_t(sizes[i])) return;
    Number* at[4];
    for (int i = 0; i < 4; i++) at[i] = (Number*)data[i].data();
    blockDim.x = 32;
    for (blockIdx.x = 0; blockIdx.x <= n / 32; blockIdx.x++)  // more threads than there is work
        for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++)
            kernel(at[0], at[1], at[2], at[3], n);
    fwrite(data[3].data(), 2, n, stdout);
}
int main() { run(kernel, NUMBERS); }
"""


@pytest.mark.parametrize("way", WAYS)
def test_each_way_puts_every_number_in_its_place(way, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    C, H, W, w, s = SIZES.values()
    generator = torch.Generator().manual_seed(0)
    windows, bias, shortcut = (
        torch.randint(-9999, 9999, shape, generator=generator, dtype=torch.int16)
        for shape in ((2 * H * W // w**2, w * w, C), (C,), (2, H, W, C))
    )
    (tmp_path / "cuda_fp16.h").write_text(SHIM)
    (tmp_path / "kernel.cpp").write_text(cuda_source(way) + MAIN)
    macros = defines(way, **SIZES) | {"NUMBERS": windows.numel()}
    options = [f"-D{name}={value}" for name, value in macros.items()]
    program = tmp_path / "kernel"
    command = [
        compiler,
        "-w",
        "-O1",
        "-fno-strict-aliasing",
        f"-I{tmp_path}",
        *options,
        str(tmp_path / "kernel.cpp"),
    ]
    subprocess.run([*command, "-o", str(program)], check=True)
    given = b"".join(t.numpy().tobytes() for t in (windows, bias, shortcut))
    done = subprocess.run([program], input=given, capture_output=True, check=True)
    found = torch.from_numpy(np.frombuffer(done.stdout, np.int16).copy()).view(shortcut.shape)
    assert torch.equal(found, paste_torch(windows + bias, H, W, (w, w), (s, s)) + shortcut)


@pytest.fixture(scope="module")
def read():
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        return dict(zip(WAYS, readings(), strict=True))
    except ImportError as error:  # PyTorch's CPU wheels bring no NVRTC
        pytest.skip(str(error))


def test_wider_is_fewer(read):
    """Two sums a number or a pair; two maps and a bias to load, 2, 4 or 16 bytes at a time."""
    assert [read[way].load_bytes for way in WAYS] == [2, 4, 16, 16, 16]
    assert [(read[way].loads, read[way].stores) for way in WAYS] == [(3, 1), (3, 1), (3, 1), (9, 3), (3, 1)]
    assert [(read[way].numbers, read[way].half_sums) for way in WAYS[:4]] == [
        (1, 2),
        (2, 2),
        (8, 8),
        (24, 24),
    ]


def test_indices_are_the_work(read):
    """The same index arithmetic serves 1, 2, 8 or 24 numbers."""
    each = [read[way].instructions / read[way].numbers for way in WAYS[:4]]
    assert each[0] > 1.8 * each[1] > 6 * each[2] > 10 * each[3]
    assert read["scalar"].index > 0.7 * read["scalar"].instructions
    assert max(read[way].index for way in WAYS[:4]) <= 1.3 * read["scalar"].index


def test_an_array_is_registers_only_if_its_loop_is_unrolled(read):
    assert [read[way].stack_bytes for way in WAYS] == [0, 0, 0, 0, 2 * 3 * 16]
    assert [read[way].local for way in WAYS[:4]] == [0, 0, 0, 0]
    assert read["array, rolled"].local == 4
    assert read["array"].registers > read["vector"].registers


def test_other_gpus(read):
    (found,) = readings(("vector",), "sm_90")
    assert (found.load_bytes, found.half_sums, found.stack_bytes) == (16, 8, 0)


def test_what_is_wrong_is_named(read, monkeypatch):
    with pytest.raises(ValueError, match=r"NVRTC: kernel\.cu\(1\): error"):
        compile_cuda("int x")
    with pytest.raises(ValueError, match="target='sm_75'"):
        readings(target="sm_75")
    with pytest.raises(ValueError, match="way='wide': choose one of scalar, half2"):
        cuda_source("wide")
    with pytest.raises(ValueError, match="C=100 must be a multiple of 24"):
        readings(("scalar",), C=100)
    monkeypatch.setattr(four_ways, "find_spec", lambda name: None)
    monkeypatch.setattr(four_ways, "TOOLKIT", four_ways.TOOLKIT / "nowhere")
    four_ways._include.cache_clear()
    with pytest.raises(ImportError, match="pip install nvidia-cuda-runtime"):
        compile_cuda("")
    four_ways._include.cache_clear()
