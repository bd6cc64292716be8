"""Linear layer with GELU against PyTorch in fp64: values, gradients, odd shapes, autocast, bad input."""

import sys

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, DTYPES, check, close, random
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import linear_gelu, products
from swin_lessons.kernels.linear_gelu import KEY, _forward_kernel, linear_gelu_cost
from swin_lessons.kernels.products import Tile, float_tiles, precision, tuned

pytest.importorskip("triton")


def parameters(K: int, N: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return random(N, K, dtype=dtype, seed=1, scale=K**-0.5), random(N, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "N"),
    [
        ((1, 1), 1),  # far below a tile
        ((3, 5, 7, 96), 384),  # stage 1, H != W, odd B
        ((2, 49, 192), 100),  # columns that fill no tile
        ((131, 50), 130),  # rows, steps along K and columns: all with a rest
        ((1100, 16), 24),  # more rows of tiles than a group
    ],
)
def test_equals_the_maths(shape, N, dtype):
    check(linear_gelu, (random(*shape, dtype=dtype), *parameters(shape[-1], N, dtype)))


def test_the_maths_is_pytorchs():
    x, weight, bias = random(3, 4, 24).double(), random(40, 24).double(), random(40).double()
    layer = torch.nn.Linear(24, 40, dtype=torch.float64, device=DEVICE)
    layer.load_state_dict({"weight": weight, "bias": bias})
    assert torch.equal(linear_gelu(x, weight, bias, impl="torch"), F.gelu(layer(x)))


def test_numbers_by_hand():
    """GELU(1) = 0.8413, GELU(-1) = -0.1587, GELU(0) = 0; its slope at 0 is a half, at 1 it is 1.0833."""
    x = torch.tensor([[1.0], [-1.0], [0.0]], device=DEVICE, requires_grad=True)
    y = linear_gelu(x, torch.ones(1, 1, device=DEVICE), torch.zeros(1, device=DEVICE), impl="triton")
    assert y.flatten().tolist() == pytest.approx([0.8413447, -0.1586553, 0.0], abs=1e-6)
    y.sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([1.0833155, -0.0833155, 0.5], abs=1e-6)


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 150))
@settings(max_examples=15, deadline=None)
def test_any_sizes(M, K, N):
    check(linear_gelu, (random(M, K), *parameters(K, N)))


@given(st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=5, deadline=None)
def test_any_map_of_half_numbers(H, W):
    check(linear_gelu, (random(3, H, W, 96, dtype=torch.float16), *parameters(96, 136, torch.float16)))


def test_many_rows(monkeypatch):
    """More than 65,536, and many blocks for each program of the backward pass; narrow tiles, for the interpreter."""
    module = sys.modules[linear_gelu.__module__]
    monkeypatch.setattr(products, "FULL", [Tile(256, 16, 16, 4, 3)])
    monkeypatch.setattr(module, "BLOCK_R", 128)
    monkeypatch.setattr(module, "BLOCK_C", 16)
    x, (weight, bias) = random(65_600, 3).detach(), parameters(3, 2)
    y = linear_gelu(x, weight, bias, impl="triton")
    exact = linear_gelu(x.double(), weight.double(), bias.double(), impl="torch")
    close(y, exact, 2e-6, "output")
    found, expected = (torch.autograd.grad(z.sum(), bias)[0] for z in (y, exact))
    close(found, expected.double(), 1e-5, "gradient of the bias")


@pytest.mark.parametrize("strided", ["transposed", "sliced", "expanded"])
def test_non_contiguous_input_and_gradients(strided):
    x = {
        "transposed": random(96, 10).detach().t(),
        "sliced": random(10, 200).detach()[:, 3:99],
        "expanded": random(1, 96).detach().expand(10, 96),
    }[strided].requires_grad_()
    weight, bias = random(96, 40, seed=1, scale=0.1).detach().t().requires_grad_(), random(80).detach()[::2]
    found, expected = (
        torch.autograd.grad(linear_gelu(x, weight, bias, impl=impl).sum(), (x, weight))  # of stride 0
        for impl in ("triton", "torch")
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def kept(function) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps while `function` runs."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        function()
    return shapes


def test_what_entered_is_kept_only_for_a_gradient():
    x, (weight, bias) = random(6, 24), parameters(24, 40)
    assert kept(lambda: linear_gelu(x, weight, bias, impl="triton")) == [(6, 24), (40, 24), (6, 40)]
    op = torch.ops.swin_lessons.linear_gelu.default
    y, linear = op(x.detach(), weight.detach(), bias.detach(), False)
    assert (y.shape, linear.numel()) == ((6, 40), 0)
    with torch.no_grad():
        assert not linear_gelu(x, weight, bias, impl="triton").requires_grad
    assert not linear_gelu(*(t.detach() for t in (x, weight, bias)), impl="triton").requires_grad


def test_only_the_bias_learns():
    x, (weight, bias) = random(6, 24).detach(), parameters(24, 40)
    linear_gelu(x, weight.detach(), bias, impl="triton").sum().backward()
    expected = torch.autograd.grad(linear_gelu(x, weight.detach(), bias, impl="torch").sum(), bias)[0]
    torch.testing.assert_close(bias.grad, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_autocast_casts_as_it_does_for_linear(impl):
    x, (weight, bias) = random(6, 96), parameters(96, 40)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = linear_gelu(x, weight, bias, impl=impl)
        expected = F.gelu(F.linear(x, weight, bias))
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected.double(), 1.6e-2, "output")
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (torch.float32,) * 3


def test_large_numbers_pass_or_vanish():
    """GELU(z) is z or 0 out there, and so is its slope 1 or 0: no infinity times zero."""
    x = torch.tensor([[3e4], [-3e4]], dtype=torch.float16, device=DEVICE, requires_grad=True)
    one, zero = torch.ones(1, 1, device=DEVICE).half(), torch.zeros(1, device=DEVICE).half()
    y = linear_gelu(x, one, zero, impl="triton")
    y.sum().backward()
    assert y.flatten().tolist() == [3e4, 0]
    assert x.grad.flatten().tolist() == [1, 0]


def test_no_rows():
    weight, bias = parameters(96, 40)
    x = random(0, 7, 96)
    y = linear_gelu(x, weight, bias, impl="triton")
    assert y.shape == (0, 7, 40)
    assert all(not gradient.any() for gradient in torch.autograd.grad(y.sum(), (x, weight, bias)))


def test_compilers_see_through():
    x, (weight, bias) = random(6, 96), parameters(96, 40)
    compiled = torch.compile(
        lambda x: linear_gelu(x, weight, bias, impl="triton").sin(), fullgraph=True, backend="aot_eager"
    )
    found, expected = compiled(x), linear_gelu(x, weight, bias, impl="torch").sin()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), weight)[0] for y in (found, expected)))
    op = torch.ops.swin_lessons.linear_gelu.default
    torch.library.opcheck(op, (x, weight, bias, True))
    torch.library.opcheck(op, (x.detach(), weight.detach(), bias.detach(), False))
    torch.library.opcheck(torch.ops.swin_lessons.gelu_backward.default, (x.detach(), x.detach().sin()))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("K", [48, 96, 192, 384, 768, 1024])
def test_a_gpu_has_a_few_tiles_to_try(K, itemsize):
    """None reaches beyond Swin's rows by half a step, and all have sides that `tl.dot` takes."""
    choices = float_tiles(K, itemsize)
    assert 3 <= len(choices) == len(set(choices)) <= 4
    assert all(min(t.BLOCK_M, t.BLOCK_N, t.BLOCK_K) >= 16 for t in choices)
    assert all(-K % t.BLOCK_K <= t.BLOCK_K // 2 for t in choices)
    assert [config.kwargs for config in tuned(_forward_kernel, tuple(choices), KEY).configs] == [
        t.sides for t in choices
    ]


def test_tf32_only_where_asked_for():
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        found = []
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            found.append(precision())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert found == ["ieee", "tf32"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, b: linear_gelu(x, w.t(), b), r"weight \(24, 40\).*must be .*\(N, K\)"),
        (lambda x, w, b: linear_gelu(x, w, b[:5]), r"bias \(5,\)"),
        (lambda x, w, b: linear_gelu(x.half(), w, b), "float16, torch.float32.*must be alike.*autocast"),
        (lambda x, w, b: linear_gelu(x, w, b.to("meta")), "x on .*, bias on meta: all must be on one device"),
        (lambda x, w, b: linear_gelu(x, w, None), "bias is None: a tensor is needed"),
        (lambda x, w, b: linear_gelu(x.int(), w, b), "x is torch.int32: floating point"),
        (lambda x, w, b: linear_gelu(x, w, b, impl="cuda"), "impl='cuda'.*auto, torch, triton"),
        (
            lambda *args: linear_gelu(*(t.double() for t in args), impl="triton"),
            "torch.float64 is not among float32.*impl='torch'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(2, 24), *parameters(24, 40))


def test_what_is_moved():
    """Stage 1 of Swin-T in fp16, 32 images: 100,352 rows; fc1 and GELU move 13 TCe, the kernel 5 (beside 8 CCe)."""
    T, C = 32 * 56 * 56, 96
    cost, weights = linear_gelu_cost(T, C, 4 * C, 2), (4 * C * C + 4 * C) * 2
    assert cost.bytes_before - weights == 13 * T * C * 2
    assert cost.bytes_after - weights == 5 * T * C * 2
    assert cost.flops == 8 * T * C * C
    training = linear_gelu_cost(T, C, 4 * C, 2, training=True)
    assert training.bytes_before - training.bytes_after == 4 * T * C * 2
    backward = linear_gelu_cost(T, C, 4 * C, 2, backward=True)
    assert backward.bytes_before - backward.bytes_after == 4 * T * C * 2
