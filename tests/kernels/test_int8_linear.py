"""INT8 against sums of whole numbers in fp64: exact sums, rounding, odd shapes, scales, bad input."""

import math

import pytest
import torch
from compare import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import dequantize, int8_linear, quantize
from swin_lessons.kernels.int8 import quantize_cost
from swin_lessons.kernels.int8_linear import _forward_kernel, int8_linear_cost, int8_tiles
from swin_lessons.kernels.products import integer_product

pytest.importorskip("triton")
IMPLEMENTATIONS = ("torch", "triton")


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """int8, all values as likely."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8).to(DEVICE)


def positive(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + n)
    return (0.5 + torch.rand(n, generator=generator)).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def exact(x, weight, x_scale, weight_scale, bias=None, *, gelu=False, residual=None):
    """`int8_linear` before it is rounded, in fp64."""
    y = (x.double() @ weight.double().t()) * (x_scale * weight_scale.double())
    if bias is not None:
        y = y + bias.double()
    if gelu:
        y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    return y if residual is None else y + residual.double()


def close(found, expected, limit=3e-6):
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= limit * expected.abs().max().clamp(min=1e-3)


def nearest(found, expected, scale):
    """int8 codes of `expected`: those that lie within rounding of a half may fall to either side."""
    assert found.dtype == torch.int8
    steps = (expected / scale).clamp(-128, 127)
    assert (found.double() - steps).abs().max() <= 0.5 + 1e-3


# --- sums


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("K", [1024, 1041, 3072])
def test_the_largest_sums_are_exact(K, impl):
    """128 * 128 * 3,072 = 50,331,648 is three times what fp32 can count to."""
    x, weight = (torch.full((n, K), -128, dtype=torch.int8, device=DEVICE) for n in (17, 3))
    y = int8_linear(x, weight, 1.0, 1.0, impl=impl)
    assert y.unique().tolist() == [16384.0 * K]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_not_one_is_lost(impl):
    """K = 2,052 of 127 and one 1: a sum in fp32 would round it away."""
    x = torch.full((1, 2052), 127, dtype=torch.int8, device=DEVICE)
    weight = x.clone()
    weight[0, -1] = 1
    expected = 127 * 127 * 2051 + 127
    bias = torch.tensor([-float(127 * 127 * 2051 // 2**10 * 2**10)], device=DEVICE)
    found = int8_linear(x, weight, 1.0, 1.0, impl=impl)
    assert found.item() == torch.tensor(expected).float().item()
    assert integer_product(x, weight).item() == expected == 33080706
    assert abs(int8_linear(x, weight, 1.0, 1.0, bias, impl=impl).item() - (expected + bias.item())) <= 1


@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_whole_numbers_in_pytorch(M, K, N):
    x, weight = whole(M, K), whole(N, K, seed=1)
    assert torch.equal(integer_product(x, weight).long(), x.long() @ weight.long().t())


# --- the whole operation


@pytest.mark.parametrize(
    ("shape", "N"),
    [
        ((1, 1), 1),  # far below a tile, and the 17 rows that a GPU's own product wants
        ((3, 5, 7, 96), 384),  # stage 1, H != W, odd B
        ((131, 50), 130),  # rows, steps along K and columns: all with a rest
        ((1100, 16), 24),  # more rows of tiles than a group
        ((16, 64), 10),  # a head
    ],
)
@pytest.mark.parametrize("gelu", [False, True])
def test_equals_the_maths(shape, N, gelu):
    x, weight, scale, bias = whole(*shape), whole(N, shape[-1], seed=1), positive(N), normal(N)
    x_scale = 2 / (70 * 70 * math.sqrt(shape[-1]))  # results of about 2
    residual = normal(*shape[:-1], N)
    args, options = (x, weight, x_scale, scale), {"gelu": gelu, "residual": residual}
    expected = exact(*args, bias, **options)
    close(int8_linear(*args, bias, impl="triton", **options), expected)
    close(int8_linear(*args, bias, impl="torch", **options), expected)
    out_scale = 0.02  # some saturate
    found = [int8_linear(*args, bias, out_scale=out_scale, impl=i, **options) for i in IMPLEMENTATIONS]
    for q in found:
        nearest(q, expected, out_scale)
    assert (found[0] != found[1]).double().mean() <= 1e-3  # a last bit before a half


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 150))
@settings(max_examples=10, deadline=None)
def test_any_sizes(M, K, N):
    args = whole(M, K), whole(N, K, seed=1), 0.01, positive(N)
    close(int8_linear(*args, impl="triton"), exact(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_outside(dtype):
    x, weight, bias = whole(9, 96), whole(40, 96, seed=1), normal(40, dtype=dtype)
    residual = normal(9, 40, dtype=dtype)
    found = int8_linear(x, weight, 1e-4, 1.0, bias, residual=residual, impl="triton")
    assert found.dtype == dtype
    expected = exact(x, weight, 1e-4, torch.ones(40, device=DEVICE), bias, residual=residual)
    close(found, expected, 5e-4 if dtype == torch.float16 else 4e-3)
    assert int8_linear(x, weight, 1e-4, 1.0, bias, dtype=dtype, impl="triton").dtype == dtype


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_scale_for_each_output(impl):
    """Queries, keys and values from one product: each with a scale of its own."""
    x, weight, scales = whole(20, 32), whole(48, 32, seed=1), positive(48, seed=5)
    found = int8_linear(x, weight, 1e-3, 0.5, out_scale=scales, impl=impl)
    nearest(found, exact(x, weight, 1e-3, torch.full((48,), 0.5, device=DEVICE)), scales.double())


def test_a_zero_point_goes_into_the_bias():
    """GELU's outputs, from -0.17 to 8: codes of `q = round(h / s) - 100`."""
    h, scale, z = torch.nn.functional.gelu(4 * normal(30, 64)).clamp(-0.17, 8), 8.17 / 225, -100
    codes = ((h / scale).round() + z).clamp(-128, 127).to(torch.int8)
    weight, weight_scale = whole(20, 64, seed=1), positive(20) / 100
    bias = -z * scale * weight_scale * weight.sum(1, dtype=torch.int32)
    found = int8_linear(codes, weight, scale, weight_scale, bias, impl="triton")
    expected = ((codes.double() - z) * scale) @ (weight.double() * weight_scale.double()[:, None]).t()
    close(found, expected, 1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_halves_to_even_and_saturation(impl):
    x = torch.tensor([[1], [3], [5], [-1], [-3], [127], [-128], [0]], dtype=torch.int8, device=DEVICE)
    one = torch.ones(1, 1, dtype=torch.int8, device=DEVICE)
    found = int8_linear(x, one, 1.0, 1.0, out_scale=2.0, impl=impl)  # .5, 1.5, 2.5, -.5, -1.5, 63.5, -64, 0
    assert found.flatten().tolist() == [0, 2, 2, 0, -2, 64, -64, 0]
    found = int8_linear(x, one, 10.0, 1.0, out_scale=2.0, impl=impl)
    assert found.flatten().tolist() == [5, 15, 25, -5, -15, 127, -128, 0]


def test_non_contiguous_input():
    x, weight = whole(96, 10).t(), whole(96, 40, seed=1).t()
    residual = normal(40, 10).t()
    args = (x, weight, 1e-3, positive(80)[::2])
    close(
        int8_linear(*args, normal(80)[::2], residual=residual, impl="triton"),
        exact(*args, normal(80)[::2], residual=residual),
    )


def test_no_rows():
    y = int8_linear(whole(0, 7, 96), whole(40, 96), 1.0, 1.0, impl="triton")
    assert (y.shape, y.dtype) == ((0, 7, 40), torch.float32)


def test_compilers_see_through():
    x, weight, bias, scale = whole(6, 96), whole(40, 96, seed=1), normal(40), positive(40)
    one = torch.tensor([0.01], device=DEVICE)
    compiled = torch.compile(
        lambda x: int8_linear(x, weight, one, scale, bias, impl="triton").sin(),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(x), int8_linear(x, weight, one, scale, bias, impl="torch").sin())
    op = torch.ops.swin_lessons.int8_linear.default
    torch.library.opcheck(op, (x, weight, one, scale, bias, True, one, normal(6, 40), torch.float16))
    torch.library.opcheck(op, (x, weight, one, scale, None, False, None, None, torch.float16))


@pytest.mark.parametrize("K", [48, 96, 192, 384, 768, 1024, 3072])
def test_a_gpu_has_a_few_tiles_to_try(K):
    """An instruction takes 32 along K; no step reaches beyond Swin's rows by more than half."""
    choices = int8_tiles(K)
    assert len(choices) == len(set(choices)) == 3
    assert all(t.BLOCK_K >= 32 and t.BLOCK_K % 32 == 0 and -K % t.BLOCK_K <= t.BLOCK_K // 2 for t in choices)
    assert "GELU" in _forward_kernel.arg_names


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: int8_linear(x.float(), w, 1.0, 1.0), "x is torch.float32: int8 is needed; kernels.quantize"),
        (lambda x, w: int8_linear(x, w.t(), 1.0, 1.0), r"weight \(24, 40\) must be .* \(N, K\)"),
        (lambda x, w: int8_linear(x, w, 0.0, 1.0), "x_scale=0.0: a scale is finite and positive"),
        (lambda x, w: int8_linear(x, w, 1.0, torch.full((40,), math.nan, device=DEVICE)), "weight_scale holds nan"),
        (lambda x, w: int8_linear(x, w, positive(2), 1.0), r"x_scale is \(2,\): one number is needed"),
        (lambda x, w: int8_linear(x, w, 1.0, positive(24)), r"weight_scale is \(24,\): one number, or 40"),
        (lambda x, w: int8_linear(x, w, 1.0, 1.0, normal(24)), r"bias is \(24,\)"),
        (lambda x, w: int8_linear(x, w, 1.0, 1.0, residual=normal(2, 24)), r"residual is \(2, 24\)"),
        (lambda x, w: int8_linear(x, w, 1.0, 1.0, normal(40).requires_grad_()), "bias asks for a gradient"),
        (lambda x, w: int8_linear(x, w, 1.0, 1.0, dtype=torch.int32), "dtype=torch.int32: choose"),
        (lambda x, w: int8_linear(x, w, 1.0, 1.0, out_scale=1.0, dtype=torch.float16), "give one of them"),
        (lambda x, w: int8_linear(x, w, 1.0, 1.0, impl="cuda"), "impl='cuda'.*auto, torch, triton"),
        (lambda x, w: int8_linear(x.new_zeros(1, 131_072), w.new_zeros(1, 131_072), 1.0, 1.0), "may not fit int32"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(whole(2, 24), whole(40, 24))


# --- quantise and back


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_codes_by_hand(impl):
    x = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 63.4, 63.75, 1e9, -64.0, -1e9, 0.0], device=DEVICE)
    q = quantize(x, 0.5, impl=impl)
    assert q.tolist() == [0, 2, 2, 0, -2, 127, 127, 127, -128, -128, 0]
    assert dequantize(q[:3], 0.5, impl=impl).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_pytorchs(dtype):
    x = 3 * normal(7, 3, 601, dtype=dtype)
    found = quantize(x, 0.0237, impl="triton")
    assert torch.equal(found, quantize(x, 0.0237, impl="torch"))
    theirs = (torch.fake_quantize_per_tensor_affine(x.float(), 0.0237, 0, -128, 127) / 0.0237).round()
    assert (found != theirs).double().mean() <= 1e-3  # which multiplies by 1 / scale
    back = dequantize(found, 0.0237, dtype=dtype, impl="triton")
    assert back.dtype == dtype
    close(back, found.double() * 0.0237, {torch.float32: 1e-7, torch.float16: 5e-4}.get(dtype, 8e-3))


def test_every_code_comes_back():
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8)
    for scale in (1e-30, 0.0237, 1 / 3, 1e30):
        back = dequantize(codes, scale, impl="triton")
        assert torch.equal(quantize(back, scale, impl="triton"), codes)


def test_quantisation_refuses():
    x = normal(4)
    with pytest.raises(ValueError, match=r"scale=inf: a scale is finite"):
        quantize(x, math.inf)
    with pytest.raises(ValueError, match="int8: quantisation starts from floating point"):
        quantize(whole(3), 1.0)
    with pytest.raises(ValueError, match="quantize has no gradient"):
        quantize(x.requires_grad_(), 1.0, impl="triton")
    with pytest.raises(ValueError, match=r"q is torch\.float32"):
        dequantize(x, 1.0)


def test_operators_of_quantisation():
    x, scale = normal(6, 5), torch.tensor([0.1], device=DEVICE)
    torch.library.opcheck(torch.ops.swin_lessons.quantize.default, (x, scale))
    torch.library.opcheck(torch.ops.swin_lessons.dequantize.default, (whole(6, 5), scale, torch.float16))
    assert quantize(normal(0, 5), 1.0, impl="triton").shape == (0, 5)


def test_what_is_moved():
    """fc1 of Swin-T's stage 1, 32 images: TC int8 in, 4 TC out; through memory 32 TC for int32 alone."""
    T, C = 32 * 56 * 56, 96
    cost, small = int8_linear_cost(T, C, 4 * C, 2, gelu=True, requantize=True), 4 * C * C + 4 * C * 6
    assert cost.bytes_after - small == 5 * T * C
    assert cost.bytes_before - small == T * C * (1 + 2 * 16 + 8 + 16 + 12)
    assert (cost.launches_before, cost.launches_after, cost.flops) == (4, 1, 8 * T * C * C)
    assert quantize_cost(100, 2).bytes_after == 300
