"""Counting instructions of compiled kernels."""

import math

import pytest

from swin_lessons.kernels.instructions import count_in, count_instructions, opcodes
from swin_lessons.kernels.launch import tl, triton

pytest.importorskip("triton")
FORWARD = "window_attention[w=7 d=32 shifted] forward"

SASS = """
        /*0100*/                   LDG.E.128 R4, [R2.64] ;   /* 0x0 */
        /*0110*/              @!P0 HMMA.16816.F32 R12, R4, R8, RZ ;   /* 0x0 */
        /*0120*/                   HMMA.16816.F32 R12, R4, R8, R12 ;   /* 0x0 */
        /*0130*/                   @P1 BRA `(.L_x_0) ;   /* 0x0 */
"""


def test_operations_are_counted_without_modifiers() -> None:
    assert opcodes(SASS) == {"HMMA": 2, "LDG": 1, "BRA": 1}


def test_products_are_those_of_the_tile() -> None:
    """Two products of 64 x 64 x 32; an instruction takes 16 x 8 x 16, so four warps share 128 of them."""
    four, eight = count_instructions(FORWARD, [{}, {"num_warps": 8}])
    assert 4 * four["HMMA"] == math.prod((2, 64, 64, 32)) / math.prod((16, 8, 16)) == 128
    assert eight["HMMA"] == four["HMMA"]  # 64 rows feed four warps: the others repeat them


@triton.jit
def product_kernel(x_ptr, out_ptr, scale, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x) * scale)


def test_a_kernel_of_ones_own() -> None:
    counts = count_in(product_kernel, {"scale": 0.5}, {"SIDE": 32}, num_warps=1)
    assert counts["HMMA"] == 2 * 4 * 2


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [("no_kernel", "sm_80", "no kernel 'no_kernel'"), (FORWARD, "sm_75", "choose one of sm_80")],
)
def test_unknown_names_are_refused(name: str, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_instructions(name, target=target)
