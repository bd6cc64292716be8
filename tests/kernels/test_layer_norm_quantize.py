"""LayerNorm to int8 against LayerNorm in fp64."""

import math

import pytest
import torch
from compare import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import layer_norm_quantize
from swin_lessons.kernels.layer_norm_quantize import layer_norm_quantize_cost

pytest.importorskip("triton")


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Rows that are not centred, and parameters that are not 1 and 0."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = 5 + 2 * torch.randn(shape, generator=generator)
    weight, bias = 1 + torch.rand(shape[-1], generator=generator), torch.randn(shape[-1], generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE), bias.to(DEVICE)


def check(x, weight, bias, scale=0.02, eps=1e-5):
    found = layer_norm_quantize(x, weight, bias, eps, scale, impl="triton")
    expected = torch.nn.functional.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)
    assert (found.shape, found.dtype) == (x.shape, torch.int8)
    steps = (expected / scale).clamp(-128, 127)
    assert (found.double() - steps).abs().max() <= 0.5 + 2e-3  # a last bit before a half
    theirs = layer_norm_quantize(x, weight, bias, eps, scale, impl="torch")
    assert (found != theirs).double().mean() <= 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7, 96), (2, 49, 768), (7, 3), (1, 1000)])
def test_equals_the_maths(shape, dtype):
    check(*inputs(*shape, dtype=dtype))


@given(st.integers(1, 50), st.integers(2, 200), st.floats(1e-3, 10))
@settings(max_examples=10, deadline=None)
def test_any_sizes_and_scales(rows, C, scale):
    check(*inputs(rows, C), scale=scale)


def test_many_rows_of_a_strided_input():
    x, weight, bias = inputs(4, 24)
    rows = inputs(24, 66_000)[0].t()[::16]
    check(rows, weight, bias)
    check(x, weight, bias)


def test_by_hand():
    """A row of 1, 2, 3: deviation sqrt(2/3), so -1.2247, 0, 1.2247; in steps of 0.5: -2.449, 0, 2.449."""
    x, one, zero = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(3), torch.zeros(3)
    for impl in ("torch", "triton"):
        found = layer_norm_quantize(*(t.to(DEVICE) for t in (x, one, zero)), 1e-12, 0.5, impl=impl)
        assert found.tolist() == [[-2, 0, 2]]
        found = layer_norm_quantize(*(t.to(DEVICE) for t in (x, one, zero + 100)), 1e-12, 0.5, impl=impl)
        assert found.tolist() == [[127, 127, 127]]


def test_compilers_see_through():
    x, weight, bias = inputs(6, 96)
    scale = torch.tensor([0.02], device=DEVICE)
    torch.library.opcheck(torch.ops.swin_lessons.layer_norm_quantize.default, (x, weight, bias, 1e-5, scale))
    assert layer_norm_quantize(x[:0], weight, bias, 1e-5, scale, impl="triton").shape == (0, 96)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, b: layer_norm_quantize(x, w[:5], b, 1e-5, 1.0), r"weight \(5,\)"),
        (lambda x, w, b: layer_norm_quantize(x, w, b, 1e-5, math.nan), "scale=nan: a scale is finite"),
        (lambda x, w, b: layer_norm_quantize(x, w, b, 1e-5, w), r"scale is \(24,\): one number is needed"),
        (
            lambda x, w, b: layer_norm_quantize(x, w.requires_grad_(), b, 1e-5, 1.0, impl="triton"),
            "layer_norm_quantize has no gradient in Triton; use torch.no_grad",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*inputs(2, 24))


def test_what_is_moved():
    """Stage 1 of Swin-T in fp16, 32 images: 7 TC bytes and the statistics, and 3 TC as one."""
    T, C = 32 * 56 * 56, 96
    cost = layer_norm_quantize_cost(T, C, 2)
    assert (cost.bytes_before - 8 * T, cost.bytes_after) == (7 * T * C, 3 * T * C)
