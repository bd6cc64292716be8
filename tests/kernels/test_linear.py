"""Linear layers of inference against PyTorch in fp64: rows, rows put back on the map, queries, keys, values apart."""

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, DTYPES, check, random
from compare import close as compare_close
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import linear, linear_residual, qkv_linear
from swin_lessons.kernels.linear import linear_cost, linear_residual_cost, qkv_linear_cost
from swin_lessons.kernels.window_rows import window_shape
from swin_lessons.models.attention import WindowAttention
from swin_lessons.models.windows import cyclic_shift, pad_to_windows, window_partition, window_reverse

pytest.importorskip("triton")


def numbers(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    return random(*shape, dtype=dtype, seed=seed, scale=scale).detach()


def close(ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    compare_close(ours, theirs, limit, "output")


def parameters(K: int, N: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(N, K, dtype=dtype, seed=1, scale=K**-0.5), numbers(N, dtype=dtype, seed=2)


# --- rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "N"), [((1, 1), 1), ((3, 5, 7, 96), 96), ((131, 50), 130), ((1100, 16), 24)]
)
def test_rows(shape, N, dtype):
    x, operands = numbers(*shape, dtype=dtype), parameters(shape[-1], N, dtype)
    check(linear, (x, *operands))
    residual = numbers(*shape[:-1], N, dtype=dtype, seed=3)
    check(linear_residual, (x, *operands, residual))


def test_by_hand():
    x, weight = (
        torch.tensor([[1.0, 2.0]], device=DEVICE),
        torch.tensor([[3.0, 4.0], [5.0, 6.0]], device=DEVICE),
    )
    bias, residual = torch.tensor([0.5, -0.5], device=DEVICE), torch.tensor([[100.0, 200.0]], device=DEVICE)
    for impl in ("torch", "triton"):
        assert linear(x, weight, impl=impl).tolist() == [[11.0, 17.0]]
        assert linear(x, weight, bias, impl=impl).tolist() == [[11.5, 16.5]]
        assert linear_residual(x, weight, bias, residual, impl=impl).tolist() == [[111.5, 216.5]]
        assert linear_residual(x, weight, None, residual, impl=impl).tolist() == [[111.0, 217.0]]


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 150))
@settings(max_examples=8, deadline=None)
def test_any_sizes(M, K, N):
    check(linear_residual, (numbers(M, K), *parameters(K, N), numbers(M, N, seed=3)))


def test_a_wide_residual_keeps_its_digits():
    """Halves inside, fp32 outside: 2,048.25 has no half near it."""
    x, operands = numbers(9, 96, dtype=torch.float16), parameters(96, 40, torch.float16)
    residual = torch.full((9, 40), 2048.25, device=DEVICE)
    found = linear_residual(x, *operands, residual, impl="triton")
    assert found.dtype == torch.float32
    expected = residual.double() + F.linear(*(t.double() for t in (x, *operands)))
    close(found, expected, 1e-6)
    assert linear_residual(x, *operands, residual, impl="torch").dtype == torch.float32


def test_non_contiguous_input():
    x, weight, residual = numbers(96, 10).t(), numbers(96, 40).t(), numbers(40, 10).t()
    close(
        linear_residual(x, weight, numbers(80)[::2], residual, impl="triton"),
        (residual + F.linear(x, weight, numbers(80)[::2])).double(),
        1e-6,
    )


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_autocast_casts_as_it_does_for_linear(impl):
    x, operands = numbers(6, 96), parameters(96, 40)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = linear(x, *operands, impl=impl)
        expected = F.linear(x, *operands)
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected.double(), 1.6e-2)


# --- windows back to the map


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "window", "shift"),
    [
        ((1, 14, 7, 96), (7, 7), (3, 3)),
        ((3, 9, 5, 48), (4, 3), (2, 1)),  # padded below and at the right, odd batch
        ((2, 6, 4, 33), (2, 4), (0, 0)),
    ],
)
def test_windows_go_back_to_the_map(shape, window, shift, dtype):
    K, N = 40, shape[-1]
    n, tokens, _ = window_shape(shape, window)
    x, operands = numbers(n, tokens, K, dtype=dtype), parameters(K, N, dtype)
    residual = numbers(*shape, dtype=dtype, seed=3)

    def op(*tensors, impl):
        return linear_residual(*tensors, window_size=window, shift_size=shift, impl=impl)

    def by_hand(x, weight, bias, residual):
        (_, H, W, _), (h, w) = residual.shape, window
        padded = (-(-H // h) * h, -(-W // w) * w)
        y = window_reverse(F.linear(x, weight, bias), window, *padded)
        return residual + cyclic_shift(y, (-shift[0], -shift[1]))[:, :H, :W]

    check(op, (x, *operands, residual), reference=by_hand)
    close(op(x, *operands, residual, impl="torch"), op(x, *operands, residual, impl="triton").double(), 2e-2)


# --- queries, keys and values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "window", "shift", "heads", "head_dim"),
    [
        ((1, 14, 7, 96), (7, 7), (3, 3), 3, 32),
        ((3, 9, 5, 20), (4, 3), (2, 1), 2, 5),  # padded, odd batch, heads of 5
        ((2, 8, 4, 32), (4, 4), (0, 0), 1, 32),
    ],
)
def test_queries_keys_and_values(shape, window, shift, heads, head_dim, dtype):
    x, operands = numbers(*shape, dtype=dtype), parameters(shape[-1], 3 * heads * head_dim, dtype)

    def op(*tensors, impl):
        return qkv_linear(*tensors, window, shift, num_heads=heads, impl=impl)

    def by_hand(x, weight, bias):
        windows = window_partition(cyclic_shift(pad_to_windows(x, window), shift), window)
        rows = F.linear(windows, weight, bias).view(*windows.shape[:2], 3, heads, head_dim)
        return rows.permute(2, 0, 3, 1, 4)

    check(op, (x, *operands), reference=by_hand)
    assert op(x, *operands, impl="torch").is_contiguous()


def test_attention_from_map_to_map():
    """QKV, attention by PyTorch, projection and shortcut: a layer of Swin V1, shifted, on a map that is padded."""
    torch.manual_seed(0)
    layer = WindowAttention(32, 2, (4, 4)).to(DEVICE).eval().requires_grad_(False)
    layer.relative_position_bias_table.normal_()
    x = numbers(2, 7, 6, 32)
    q, k, v = qkv_linear(x, layer.qkv.weight, layer.qkv.bias, (4, 4), num_heads=2, impl="triton").unbind(0)
    rows = F.scaled_dot_product_attention(q, k, v, attn_mask=layer.relative_position_bias((4, 4)))
    rows = rows.transpose(1, 2).flatten(2)
    found = linear_residual(rows, layer.proj.weight, layer.proj.bias, x, window_size=(4, 4), impl="triton")
    expected = x + layer(pad_to_windows(x, (4, 4)))[:, :7, :6]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# --- all


def test_compilers_see_through():
    x, operands, residual = numbers(1, 4, 6, 32), parameters(32, 96), numbers(1, 4, 6, 96)
    ops, layout = torch.ops.swin_lessons, [4, 6, 1, 1, 2, 3]
    torch.library.opcheck(ops.linear.default, (x, *operands, None))
    torch.library.opcheck(ops.linear.default, (x, operands[0], None, residual.half()))
    windows = numbers(4, 6, 32)
    torch.library.opcheck(ops.linear_to_map.default, (windows, *operands, residual, layout))
    torch.library.opcheck(ops.qkv_linear.default, (x, *operands, 2, layout))
    assert linear(x[:0], *operands, impl="triton").shape == (0, 4, 6, 96)
    assert qkv_linear(x[:0], *operands, (2, 3), num_heads=2, impl="triton").shape == (3, 0, 2, 6, 16)


def test_auto_takes_pytorch_for_a_gradient():
    x, (weight, bias) = numbers(4, 24), parameters(24, 40)
    y = linear(x, weight.requires_grad_(), bias)
    y.sum().backward()
    assert weight.grad is not None
    with pytest.raises(
        ValueError, match=r"linear has no gradient in Triton; use torch\.no_grad.*impl='torch'"
    ):
        linear(x, weight, bias, impl="triton")
    with torch.no_grad():
        assert linear(x, weight, bias, impl="triton").shape == (4, 40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, b, r: linear(x, w.t(), b), r"weight \(24, 40\).*must be .*\(N, K\)"),
        (lambda x, w, b, r: linear(x.half(), w, b), "float16 on .*alike.*autocast"),
        (lambda x, w, b, r: linear(x.int(), w.int()), "torch.int32.*floating point"),
        (lambda x, w, b, r: linear(x, w, b, impl="cuda"), "impl='cuda'.*auto, torch, triton"),
        (lambda x, w, b, r: linear_residual(x, w, b, r[..., :5]), r"residual is .*5\).*40\)"),
        (lambda *t: linear_residual(*t, window_size=(2, 3)), r"x is \(1, 4, 6, 24\): windows \(4, 6, 24\)"),
        (lambda x, w, b, r: qkv_linear(x, w, b, (2, 3), num_heads=3), "40 outputs are not 3 x 3 heads"),
        (lambda x, w, b, r: qkv_linear(x[0], w, b, (2, 3), num_heads=1), r"a map of shape \(4, 6, 24\)"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(numbers(1, 4, 6, 24), *parameters(24, 40), numbers(1, 4, 6, 40))


def test_what_is_moved():
    """Stage 1 of Swin-T in fp16, 32 images: QKV 12 TCe, 4 after; proj, windows back, shortcut 11, and 3."""
    T, C = 32 * 56 * 56, 96
    cost, weights = qkv_linear_cost(T, C, 2), (3 * C * C + 3 * C) * 2
    assert (cost.bytes_before - weights, cost.bytes_after - weights) == (12 * T * C * 2, 4 * T * C * 2)
    assert qkv_linear_cost(T, C, 2, shifted=True).bytes_before - cost.bytes_before == 4 * T * C * 2
    cost, weights = linear_residual_cost(T, C, C, 2, window=True, shifted=True), (C * C + C) * 2
    assert (cost.bytes_before - weights, cost.bytes_after - weights) == (11 * T * C * 2, 3 * T * C * 2)
    assert (cost.launches_before, cost.launches_after, cost.flops) == (5, 1, 2 * T * C * C)
    assert linear_cost(T, C, C, 2).bytes_after - weights == 2 * T * C * 2
