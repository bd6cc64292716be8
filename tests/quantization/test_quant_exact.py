"""Exact products of integers: against int64, over odd shapes, with the largest codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.quantization import exact_product, integer_product, pack_int4, unpack_int4
from swin_lessons.quantization.exact import _float_product, check_depth, cuda_product
from swin_lessons.quantization.modules import centred_product


def codes(*shape: int, seed: int = 0, bits: int = 8) -> torch.Tensor:
    reach = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-reach, reach, shape, generator=generator, dtype=torch.int8)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.long() @ weight.long().t()).int()


SHAPES = [
    (1, 1024, 8),
    (1, 1, 1),
    (16, 7, 3),
    (17, 96, 96),
    (3, 1, 4),
    (5, 1041, 2),
    (49, 3072, 5),
    (33, 15, 32),
]


@pytest.mark.parametrize("product", [integer_product, _float_product])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_int64(product, shape):
    """Fewer than 17 rows (ao#2376), one column (ao#761), depths that are no multiple of 8 (ao#1268)."""
    M, K, outputs = shape
    x, weight = codes(M, K), codes(outputs, K, seed=1)
    found = product(x, weight)
    assert found.dtype == torch.int32
    assert torch.equal(found, reference(x, weight))


@pytest.mark.parametrize("product", [integer_product, _float_product])
@pytest.mark.parametrize("values", [(-128, -128), (-128, 127), (127, 127)])
def test_the_largest_sums(product, values):
    """Beyond 1,040 terms fp32 would round; pre-VNNI instructions would saturate at 16 bits."""
    x = torch.full((3, 4099), values[0], dtype=torch.int8)
    weight = torch.full((5, 4099), values[1], dtype=torch.int8)
    assert product(x, weight).unique().tolist() == [4099 * values[0] * values[1]]


def test_fp32_rounds_where_the_exact_product_does_not():
    """fp32 lacks 2^24 + 1, and a sum reaches that after 1,041 products of 127 by 127."""
    x = torch.full((1, 4095), 127.0)
    x[0, 0] = 126.0
    total = 4094 * 127**2 + 126**2
    assert exact_product(x.double(), x.double().t(), 128 * 128).item() == total
    once = torch.tensor(total, dtype=torch.int32).float().item()  # rounded once, to the nearest
    assert exact_product(x, x.t(), 128 * 128).item() == once
    step_by_step = torch.zeros(())
    for value in x[0]:
        step_by_step += value * value
    assert step_by_step.item() != once


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 700), st.integers(1, 20), st.integers(-128, 127), st.integers(0, 999)
)
def test_zero_points_on_both_sides(M, K, outputs, zero, seed):
    x, weight = codes(M, K, seed=seed), codes(outputs, K, seed=seed + 1)
    x_zero = torch.tensor(zero, dtype=torch.int32)
    weight_zero = codes(outputs, seed=seed + 2).int()
    expected = (x.long() - zero) @ (weight.long() - weight_zero[:, None].long()).t()
    assert torch.equal(centred_product(x, x_zero, weight, weight_zero).long(), expected)
    assert torch.equal(
        centred_product(x, None, weight, weight_zero).long(),
        x.long() @ (weight.long() - weight_zero[:, None]).t(),
    )
    floats = exact_product((x.float() - zero), (weight.float() - weight_zero[:, None].float()).t(), 255 * 255)
    assert torch.equal(floats, expected.int().float())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_padding_for_cuda(monkeypatch, shape):
    """What a CUDA device would be given keeps its limits, and the padding does not show."""
    M, K, outputs = shape
    x, weight = codes(M, K), codes(outputs, K, seed=1)

    def int_mm(a, b):
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[0] % 8 == b.shape[1] % 8 == 0
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        return (a.long() @ b.long()).int()

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    assert torch.equal(cuda_product(x, weight), reference(x, weight))


def test_nothing_to_multiply():
    assert integer_product(codes(0, 5), codes(3, 5)).shape == (0, 3)
    assert integer_product(codes(2, 0), codes(3, 0)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_sum_that_int32_cannot_hold_is_refused():
    check_depth(65_535, "fc")
    with pytest.raises(ValueError, match="fc sums 65,537 products"):
        check_depth(65_537, "fc")


@pytest.mark.parametrize("depth", [1, 2, 7, 32, 33])
def test_int4_packs_two_in_a_byte(depth):
    x = codes(5, depth, bits=4)
    packed = pack_int4(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, (depth + 1) // 2)
    assert torch.equal(unpack_int4(packed, depth), x)


def test_every_pair_of_4_bit_codes():
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    packed = pack_int4(pairs)
    assert packed[0].item() == 0x88
    assert packed[-1].item() == 0x77
    assert pack_int4(torch.tensor([1, -2], dtype=torch.int8)).item() == 0xE1  # the first in the low half
    assert torch.equal(unpack_int4(packed, 2), pairs)


def test_codes_that_4_bits_cannot_hold():
    with pytest.raises(ValueError, match="codes run from -9 to 3"):
        pack_int4(torch.tensor([-9, 3], dtype=torch.int8))
