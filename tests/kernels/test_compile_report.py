"""Reading what a compiler made, and who runs a kernel."""

import subprocess
import sys

import pytest
import torch

from swin_lessons.kernels import compile_report, launch
from swin_lessons.kernels.launch import ceil_div, power_of_2, use_triton
from swin_lessons.kernels.report import all_specs, mma_of, occupancy, widest_load
from swin_lessons.kernels.spec import Spec
from swin_lessons.kernels.variants import compile_variants


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "expected"),
    [
        ("sm_80", 32, 0, 4, 1.0),  # 16 blocks of 4 warps: all 64
        ("sm_80", 64, 0, 4, 0.5),  # 64 * 32 = 2,048 registers a warp: 32 warps fill the 65,536
        ("sm_80", 65, 0, 4, 28 / 64),  # 2,304 a warp, 7 blocks of 4
        ("sm_80", 255, 0, 8, 8 / 64),  # one block
        ("sm_80", 32, 163 * 1024, 4, 4 / 64),  # all of the shared memory
        ("sm_86", 32, 0, 4, 1.0),  # 12 blocks of 4 warps: all 48
        ("sm_86", 32, 0, 1, 16 / 48),  # the most blocks
        ("sm_89", 32, 0, 1, 24 / 48),
        ("sm_90", 128, 48 * 1024, 4, 16 / 64),
    ],
)
def test_occupancy(target, registers, shared, warps, expected):
    assert occupancy(target, registers, shared, warps) == expected


SASS = """
 /*0100*/ LDG.E.128 R4, [R2.64] ;
 /*0110*/ @P0 LDG.E.U16.CONSTANT R8, [R6.64] ;
 /*0120*/ HMMA.16816.F32 R12, R4, R8, RZ ;
 /*0130*/ HMMA.16816.F32 R12, R4, R8, R12 ;
 /*0140*/ HMMA.1688.F32.TF32 R12, R4, R8, R12 ;
"""


@pytest.mark.parametrize(
    ("code", "mma", "width"),
    [
        (SASS, "HMMA.16816.F32", 16),
        ("LDG.E R1, [R2] ; FFMA R1, R2, R3, R4 ;", "", 4),
        ("LDG.E.U16 R1, [R2] ; IMMA.16832.S8.S8 R1, R2, R3, R4 ;", "IMMA.16832.S8.S8", 2),
        ("LDG.E.64 R1, [R2] ; HGMMA.64x64x16.F32 R24, gdesc[UR4] ;", "HGMMA.64x64x16.F32", 8),
        ("LDGSTS.E.BYPASS.128 [R1], [R2.64] ;", "", 16),
        ("LDG.E.S8 R1, [R2] ;", "", 1),
        ("LDS.128 R1, [R2] ;", "", 0),  # shared memory is not what is meant
    ],
)
def test_machine_code_is_read(code, mma, width):
    assert (mma_of(code), widest_load(code)) == (mma, width)


def test_a_launch_is_told_to_the_compiler_as_it_is():
    class kernel:
        arg_names = ("x_ptr", "mean_ptr", "rows", "C", "eps", "one", "BLOCK")

    spec = Spec(
        "k", kernel, {"mean_ptr": "fp32"}, {"rows": 49, "C": 96, "eps": 1e-5, "one": 1}, {"BLOCK": 128}
    )
    signature, constants, known = spec.source("fp16")
    assert signature == {
        "x_ptr": "*fp16", "mean_ptr": "*fp32", "rows": "i32", "C": "i32", "eps": "fp32",
        "one": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    assert constants == {"BLOCK": 128, "one": 1}
    assert sorted(known) == [(0,), (1,), (3,)]  # addresses, and 96 is a multiple of 16; 49 is not


def test_names_are_their_own():
    names = [(spec.name, dtype) for spec in all_specs() for dtype in spec.dtypes]
    assert len(names) == len(set(names)) >= 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"op": "softmax"}, ValueError, "no kernel 'softmax'; choose one of .*layer_norm"),
        ({"target": "sm_75"}, ValueError, "target='sm_75': choose one of sm_80"),
        ({"dtypes": ["int8"]}, ValueError, r"dtypes=\['int8'\]: give a list of fp32, fp16, bf16"),
        ({"dtypes": "fp16"}, ValueError, "dtypes='fp16': give a list"),
    ],
)
def test_unknown_names(options, error, message):
    with pytest.raises(error, match=message):
        compile_report(**options)


def test_tiles():
    assert [power_of_2(n) for n in (0, 1, 2, 3, 49, 64, 65)] == [1, 1, 2, 4, 64, 64, 128]
    assert [ceil_div(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_cpu_takes_pytorch_unless_asked():
    assert use_triton("auto", torch.zeros(1)) is False
    assert use_triton("torch", torch.zeros(1), "anything") is False
    with pytest.raises(ValueError, match="impl='triton': too wide; choose impl='torch' or 'auto'"):
        use_triton("triton", torch.zeros(1), "too wide")


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"tensors on cpu need a CUDA GPU, or .* TRITON_INTERPRET=1"):
        use_triton("triton", torch.zeros(1))


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_old_gpus_take_pytorch(monkeypatch, capability, served):
    launch._too_old.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (launch._too_old("cuda:0") == "") is served
    launch._too_old.cache_clear()


def test_the_package_works_without_triton():
    """Triton has no wheels for Windows and macOS: kernels then run their maths in PyTorch."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from swin_lessons import kernels
x, w = torch.randn(3, 8), torch.ones(8)
assert torch.equal(kernels.layer_norm(x, w, 0 * w), torch.nn.functional.layer_norm(x, (8,)))
for call in (lambda: kernels.layer_norm(x, w, w, impl="triton"), kernels.compile_report):
    try:
        call()
    except ImportError as error:
        assert "pip install triton" in str(error)
    else:
        raise AssertionError("no error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


needs_tools = pytest.mark.skipif(not launch.HAS_TRITON, reason="needs triton")


@needs_tools
def test_a_variant_is_the_launch_with_another_tile():
    name, changes = "layer_norm[C=96]", [{}, {"BLOCK_R": 1}, {"num_warps": 8}]
    as_it_is, one_row, wider = compile_variants(name, changes, "sm_80", "fp16")
    (row,) = (r for r in compile_report(name, "sm_80", ["fp16"]) if r["name"] == name)
    assert as_it_is == row
    assert one_row["BLOCK_R"] == 1
    assert one_row["registers"] < row["registers"]
    assert one_row["vector_bytes"] < row["vector_bytes"] == 16
    assert (row["num_warps"], wider["num_warps"]) == (4, 8)


@needs_tools
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layer", [{}]), "no kernel 'layer'"),
        (("layer_norm[C=96]", [{"BLOCK": 1}]), "has no BLOCK; choose from BLOCK_C, BLOCK_R, MODE, num_warps"),
        (("layer_norm[C=96]", [{}], "sm_75"), "target='sm_75'"),
    ],
)
def test_a_variant_that_cannot_be_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        compile_variants(*arguments)
