"""INT8 window attention: against PyTorch's whole numbers, and against attention in fp64 of the same queries."""

import math

import pytest
import torch
from compare import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import int8_linear, int8_window_attention, window_attention
from swin_lessons.kernels.int8_window_attention import int8_attention_tiles, int8_window_attention_cost

pytest.importorskip("triton")
IMPLEMENTATIONS = ("torch", "triton")
SCALES = (0.021, 0.018, 0.03)  # of queries, keys and values


def inputs(B, H, W, window, heads, head_dim, cosine=False):
    """qkv of a normal distribution with a deviation of 40 steps, bias, and for V2 factors between 1 and 20."""
    generator = torch.Generator().manual_seed(B + H * W + heads)
    N = window[0] * window[1]
    qkv = (40 * torch.randn(B, H, W, 3 * heads * head_dim, generator=generator)).round().clamp(-128, 127)
    bias = torch.randn(heads, N, N, generator=generator)
    factor = 1 + 19 * torch.rand(heads, 1, 1, generator=generator) if cosine else None
    return qkv.to(torch.int8).to(DEVICE), bias.to(DEVICE), None if factor is None else factor.to(DEVICE)


def run(qkv, bias, factor, window, shift, heads, impl="triton", **options):
    scales = torch.tensor(SCALES, device=DEVICE)
    sizes = {"num_heads": heads, "qkv_scale": scales, "logit_factor": factor, "impl": impl}
    return int8_window_attention(qkv, bias, window, shift, **sizes, **options)


def exact(qkv, bias, factor, window, shift, heads, scale=None):
    """Attention of the same numbers in fp64, nothing rounded."""
    parts = qkv.double().unflatten(-1, (3, -1)) * torch.tensor(SCALES, device=DEVICE).double()[:, None]
    factor = None if factor is None else factor.double()
    sizes = {"num_heads": heads, "logit_factor": factor, "scale": scale, "impl": "torch"}
    return window_attention(parts.flatten(-2), bias.double(), window, shift, **sizes)


def check(shape, cosine, limit=0.02):
    B, H, W, window, shift, heads, head_dim = shape
    args = (*inputs(B, H, W, window, heads, head_dim, cosine), window, shift, heads)
    found, theirs, expected = run(*args), run(*args, impl="torch"), exact(*args)
    assert found.shape == expected.shape
    one_tile = window[0] * window[1] <= 64
    largest = expected.abs().max()
    # other sums of exponentials, or (in blocks) steps of the largest weight so far
    assert (found - theirs).abs().max() <= (2e-3 if one_tile else limit) * largest
    for ours in (found, theirs):
        assert (ours.double() - expected).abs().max() <= limit * largest
        assert (ours.double() - expected).square().mean() <= limit**2 * expected.square().mean()


@pytest.mark.parametrize(
    ("shape", "cosine"),
    [
        ((1, 14, 7, (7, 7), (3, 3), 3, 32), False),  # N = 49, C = 96, H != W
        ((1, 8, 8, (8, 8), (0, 0), 2, 32), True),  # V2, a window as large as the map
        ((3, 4, 8, (4, 4), (2, 1), 2, 32), True),  # N = 16, odd batch
        ((3, 2, 6, (2, 3), (1, 1), 2, 24), False),  # tiny windows, heads of 24
        ((1, 4, 16, (4, 8), (2, 0), 2, 64), False),  # heads of 64
        ((1, 18, 8, (9, 8), (4, 4), 1, 32), False),  # in blocks
        ((1, 9, 16, (9, 8), (4, 4), 1, 32), True),
    ],
)
def test_equals_the_maths(shape, cosine):
    check(shape, cosine)


@pytest.mark.parametrize(("window", "cosine"), [((12, 12), False), ((16, 16), True), ((24, 24), True)])
def test_the_windows_of_v2(window, cosine):
    shift = (0, 0) if window[0] > 12 else (6, 6)
    check((1, *window, window, shift, 1, 32), cosine, limit=0.06)


@given(
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.tuples(st.integers(0, 3), st.integers(0, 4)),
    st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_any_map_window_and_shift(maps, window, shift, cosine):
    B, H, W = maps[0], maps[1] * window[0], maps[2] * window[1]
    check((B, H, W, window, (shift[0] % window[0], shift[1] % window[1]), 2, 32), cosine)


def test_many_windows_share_programs():
    check((11, 4, 8, (2, 4), (1, 2), 2, 32), cosine=False)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_by_hand(impl):
    """Two tokens. Bias ln 3 for the first key: weights 3/4 and 1/4, which are 255 and 85 of 255."""
    qkv = torch.zeros(1, 1, 2, 96, dtype=torch.int8, device=DEVICE)
    qkv[0, 0, 0, 64:], qkv[0, 0, 1, 64:] = 100, -20
    bias = torch.tensor([[[math.log(3), 0.0], [math.log(3), 0.0]]], device=DEVICE)
    sizes = {"num_heads": 1, "qkv_scale": 0.5, "impl": impl}
    found = int8_window_attention(qkv, bias, (1, 2), **sizes)
    assert found.unique().tolist() == [(255 * 100 - 85 * 20) / 340 / 2] == [35.0]
    q = int8_window_attention(qkv, bias, (1, 2), out_scale=0.25, **sizes)
    assert (q.dtype, q.unique().tolist()) == (torch.int8, [127])  # 140 saturates
    q = int8_window_attention(qkv, bias, (1, 2), out_scale=2.0, **sizes)
    assert q.unique().tolist() == [18]  # 17.5, half to even


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_largest_sums_are_exact(impl):
    """All -128: dot products 524,288, and a mean of values of -128, whatever the weights."""
    qkv = torch.full((1, 16, 16, 96), -128, dtype=torch.int8, device=DEVICE)
    bias = torch.randn(1, 256, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = int8_window_attention(qkv, bias, (16, 16), num_heads=1, qkv_scale=1.0, impl=impl)
    torch.testing.assert_close(found, torch.full_like(found, -128.0))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_large_window_keeps_small_weights(impl):
    """Equal weights of 1 / 256: in 127 steps of 1 they would all be 0; of their largest they are whole."""
    qkv, *_ = inputs(1, 16, 16, (16, 16), 1, 32)
    qkv[..., :64] = 0
    bias = torch.zeros(1, 256, 256, device=DEVICE)
    found = int8_window_attention(qkv, bias, (16, 16), num_heads=1, qkv_scale=1.0, impl=impl)
    mean = qkv[..., 64:].double().mean((1, 2))
    torch.testing.assert_close(found.double(), mean.view(1, 1, 1, 32).expand_as(found), atol=1e-4, rtol=1e-5)


def test_padded_tokens_of_v2_have_no_direction():
    qkv, bias, factor = inputs(1, 4, 4, (4, 4), 1, 32, cosine=True)
    qkv[:, -1, :, :64] = 0
    args = (qkv, bias, factor, (4, 4), (0, 0), 1)
    found, expected = run(*args), exact(*args)
    assert (found.double() - expected).abs().max() <= 0.02 * expected.abs().max()


def test_scales_of_queries_and_keys_cancel_in_v2():
    qkv, bias, factor = inputs(1, 4, 8, (4, 4), 2, 32, cosine=True)
    a, b = (
        int8_window_attention(
            qkv, bias, (4, 4), num_heads=2, qkv_scale=torch.tensor(s, device=DEVICE), logit_factor=factor, impl="triton"
        )
        for s in ((1.0, 1.0, 0.5), (9.0, 0.1, 0.5))
    )  # fmt: skip
    assert torch.equal(a, b)


def test_reads_what_the_linear_layer_wrote():
    """Tokens to attention through int8 alone, each part with its scale; strided input, own scale of the products."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-128, 128, s, generator=generator, dtype=torch.int8).to(DEVICE)
        for s in ((1, 8, 8, 64), (192, 64))
    )
    bias = torch.zeros(2, 16, 16, device=DEVICE)
    qkv = int8_linear(x, weight, 1e-3, 1e-3, out_scale=torch.tensor(SCALES).repeat_interleave(64).to(DEVICE))
    args = (qkv, bias, None, (4, 4), (2, 2), 2)
    found, expected = run(*args, scale=1.5), exact(*args, scale=1.5)
    assert (found.double() - expected).abs().max() <= 0.02 * expected.abs().max()
    apart = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run(apart, *args[1:], scale=1.5), found)


def test_results_in_halves_and_int8():
    args = (*inputs(1, 7, 7, (7, 7), 1, 32), (7, 7), (0, 0), 1)
    found = run(*args)
    half = run(*args, dtype=torch.float16)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), found, atol=1e-3, rtol=1e-3)
    q = run(*args, out_scale=0.02)
    assert ((found / 0.02).clamp(-128, 127) - q).abs().max() <= 0.5 + 1e-3


def test_compilers_see_through():
    qkv, bias, factor = inputs(1, 4, 8, (4, 4), 1, 32, cosine=True)
    scales, one = torch.tensor(SCALES, device=DEVICE), torch.tensor([0.02], device=DEVICE)
    op = torch.ops.swin_lessons.int8_window_attention.default
    sizes = ([4, 4], [2, 2], 1, 0.2, torch.float16)
    torch.library.opcheck(op, (qkv, bias, factor.reshape(-1), scales, one, *sizes))
    torch.library.opcheck(op, (qkv, bias, None, scales, None, *sizes))
    assert run(qkv[:0], bias, None, (4, 4), (0, 0), 1).shape == (0, 4, 8, 32)


@pytest.mark.parametrize(
    ("N", "query", "key", "warps"),
    [
        (4, 16, 32, 1),
        (16, 16, 32, 1),
        (32, 32, 32, 2),
        (49, 64, 64, 4),
        (64, 64, 64, 4),
        (65, 64, 32, 4),
        (576, 64, 32, 4),
    ],
)
def test_tiles(N, query, key, warps):
    """An instruction takes 32 keys at least."""
    assert int8_attention_tiles(N) == (query, key, warps, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(1, 4, 8, 96)}, "qkv is torch.float32: int8 is needed"),
        ({"bias": torch.zeros(1, 9, 9)}, r"bias is \(1, 9, 9\): it must be \(1, 16, 16\)"),
        ({"window_size": (3, 4)}, "windows of 3 x 4 do not tile a map of 4 x 8"),
        ({"shift_size": (4, 0)}, "less than the window"),
        ({"num_heads": 5}, "96 channels are not 3 x 5 heads"),
        ({"qkv_scale": math.inf}, "qkv_scale=inf: a scale is finite"),
        ({"qkv_scale": torch.ones(2)}, r"qkv_scale is \(2,\): one number, or 3"),
        ({"out_scale": torch.tensor([math.nan])}, "out_scale holds nan"),
        ({"dtype": torch.int32}, "choose torch.float32"),
        ({"scale": 1.0, "logit_factor": torch.ones(1)}, "give one of them"),
        ({"bias": torch.zeros(1, 16, 16, requires_grad=True)}, "has no gradient: use torch.no_grad"),
        (
            {"qkv": torch.zeros(1, 4, 8, 288, dtype=torch.int8), "impl": "triton"},
            "head_dim 96 is more than 64; choose impl='torch'",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    qkv, bias, _ = inputs(1, 4, 8, (4, 4), 1, 32)
    call = {"qkv": qkv, "bias": bias, "window_size": (4, 4), "num_heads": 1, "qkv_scale": 1.0} | change
    call = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in call.items()}
    with pytest.raises(ValueError, match=message):
        int8_window_attention(**call)


def test_what_is_moved():
    """Stage 1 of Swin-T, 32 images: 4 TC bytes and the bias, where halves move 8 TC."""
    T, C = 32 * 56 * 56, 96
    cost = int8_window_attention_cost(T, C, 3, 49, shifted=True)
    assert cost.bytes_after - 3 * 49 * 49 * 4 == 4 * T * C
    assert (cost.launches_before, cost.launches_after, cost.flops) == (17, 1, 4 * T * 49 * C)
