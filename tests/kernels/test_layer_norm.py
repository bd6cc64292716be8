"""LayerNorm kernels against PyTorch in fp64: values, gradients, odd shapes, bad input."""

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, DTYPES, TOLERANCE, check, random
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import add_layer_norm, layer_norm
from swin_lessons.kernels.layer_norm import MAX_CHANNELS, add_layer_norm_cost, layer_norm_cost

pytest.importorskip("triton")


def parameters(C: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(C, seed=1), random(C, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5, 96), (2, 7, 7, 24), (1, 50, 192), (9, 768), (2, 1536), (3, 3072)]
)
def test_layer_norm_equals_the_maths(shape, dtype):
    check(layer_norm, (random(*shape, dtype=dtype), *parameters(shape[-1])), eps=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 96), (33, 48), (1, 1, 1, 384), (4, 1537)])
def test_add_layer_norm_equals_the_maths(shape, order, dtype):
    inputs = (random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=3), *parameters(shape[-1]))
    check(add_layer_norm, inputs, order=order)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 96), (33, 48)])
def test_a_branch_in_half_precision_is_added_to_a_sum_in_fp32(shape, order, half):
    """What autocast leaves: fp32 rows, a branch in half, and a norm for a matrix product in half to read."""
    inputs = (random(*shape), random(*shape, dtype=half, seed=3), *parameters(shape[-1]))
    check(add_layer_norm, inputs, order=order, tolerance=TOLERANCE[half])
    with torch.no_grad():
        found = add_layer_norm(*inputs, order=order, dtype=half if order == "pre" else None, impl="triton")
        total = found[0] if order == "pre" else found
        assert total.dtype == torch.float32
        if order == "pre":
            assert torch.equal(total, inputs[0] + inputs[1])
            assert found[1].dtype == half
            exact = F.layer_norm(total.double(), shape[-1:], *(p.double() for p in inputs[2:]))
            torch.testing.assert_close(found[1].double(), exact, rtol=TOLERANCE[half], atol=1e-6)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [None, "pre", "post"])
def test_a_result_in_half_precision_has_gradients(order, half):
    parts = (random(6, 40), *parameters(40))
    if order is None:
        check(layer_norm, parts, dtype=half, reference=_reference(layer_norm), tolerance=TOLERANCE[half])
    else:
        inputs = (parts[0], random(6, 40, seed=3), *parts[1:])
        reference = _reference(add_layer_norm, order=order)
        check(add_layer_norm, inputs, dtype=half, order=order, reference=reference, tolerance=TOLERANCE[half])


def _reference(op, **options):
    return lambda *inputs: op(*inputs, impl="torch", **options)


def test_the_maths_is_pytorchs():
    x, (weight, bias) = random(4, 96).double(), (p.double() for p in parameters(96))
    expected = F.layer_norm(x, (96,), weight, bias, 1e-5)
    assert torch.equal(layer_norm(x, weight, bias, impl="torch"), expected)
    total, normed = add_layer_norm(x, x.sin(), weight, bias, impl="torch")
    assert torch.equal(total, x + x.sin())
    torch.testing.assert_close(normed, F.layer_norm(x + x.sin(), (96,), weight, bias, 1e-5))


@given(st.integers(1, 40), st.integers(3, 200), st.sampled_from(["pre", "post"]))
@settings(max_examples=20, deadline=None)
def test_any_rows_and_channels(rows, C, order):
    """Two channels are +1 and -1 whatever they were: their gradient is rounding alone."""
    check(
        add_layer_norm,
        (random(rows, C), random(rows, C, seed=3), *parameters(C)),
        order=order,
        tolerance=2e-5,
    )


def test_more_rows_than_a_grid_axis_holds():
    x = random(66_000, 8).detach()
    weight, bias = parameters(8)
    got = layer_norm(x, weight, bias, impl="triton")
    torch.testing.assert_close(got, layer_norm(x, weight, bias, impl="torch"))


@pytest.mark.parametrize("strided", ["transposed", "sliced", "expanded"])
def test_non_contiguous_input_and_gradients(strided):
    x = {
        "transposed": random(96, 10).detach().t(),
        "sliced": random(10, 200).detach()[:, 3:99],
        "expanded": random(1, 96).detach().expand(10, 96),
    }[strided].requires_grad_()
    weight, bias = parameters(96)
    loss = layer_norm(x, weight, bias, impl="triton").sum()  # its gradient arrives with stride 0
    expected = layer_norm(x, weight, bias, impl="torch").sum()
    for ours, theirs in zip(
        torch.autograd.grad(loss, (x, weight, bias)),
        torch.autograd.grad(expected, (x, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_strided_parameters():
    """Every second number of a vector, and one number for all channels."""
    x, weight, bias = random(5, 24), random(48, seed=1).detach()[::2], random(1, seed=2).detach().expand(24)
    check(layer_norm, (x, weight.requires_grad_(), bias.requires_grad_()))


def test_padding_stays_out_of_the_variance():
    x = torch.tensor([[9.0, 10.0, 11.0]], device=DEVICE)
    y = layer_norm(x, torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE), eps=0.0, impl="triton")
    torch.testing.assert_close(y.cpu(), torch.tensor([[-1.2247449, 0.0, 1.2247449]]))


def test_large_means_keep_their_digits():
    x = 1000 + random(8, 96).detach()
    exact = F.layer_norm(x.double(), (96,))
    ones, zeros = torch.ones(96, device=DEVICE), torch.zeros(96, device=DEVICE)
    assert (layer_norm(x, ones, zeros, impl="triton") - exact).abs().max() < 1e-3


def test_only_the_sum_is_used():
    """The gradient of the normed rows is then zero, not missing."""
    x, r, (weight, bias) = random(5, 24), random(5, 24, seed=3), parameters(24)
    total, _ = add_layer_norm(x, r, weight, bias, impl="triton")
    dx, dr = torch.autograd.grad(total.sum(), (x, r))
    assert torch.equal(dx, torch.ones_like(dx))
    assert torch.equal(dr, dx)


def test_half_rows_and_full_parameters():
    """As under autocast: half activations, fp32 parameters; statistics and gradients of parameters in fp32."""
    x, (weight, bias) = random(6, 96, dtype=torch.float16), parameters(96)
    y = layer_norm(x, weight, bias, impl="triton")
    assert y.dtype == torch.float16
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float16, torch.float32)


def test_no_rows():
    weight, bias = parameters(96)
    assert layer_norm(random(0, 96), weight, bias, impl="triton").shape == (0, 96)


def test_compilers_see_through():
    x, (weight, bias) = random(6, 96), parameters(96)
    compiled = torch.compile(
        lambda x: layer_norm(x, weight, bias, impl="triton").sin(), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), layer_norm(x, weight, bias, impl="torch").sin())
    op = torch.ops.swin_lessons.norm.default
    for mode in (0, 1, 2):
        second = None if mode == 0 else random(6, 96, seed=3)
        for dtype in (torch.float32, torch.bfloat16):
            torch.library.opcheck(op, (x, second, weight, bias, 1e-5, mode, dtype, torch.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: layer_norm(x, w[:5], w), "one number for each"),
        (lambda x, w: layer_norm(x.long(), w, w), "floating point"),
        (lambda x, w: layer_norm(x, w, w, impl="cuda"), "impl='cuda'.*auto, torch, triton"),
        (
            lambda x, w: layer_norm(x.double(), w, w, impl="triton"),
            "torch.float64 is not among float32.*impl='torch'",
        ),
        (lambda x, w: add_layer_norm(x, x, w, w, order="both"), "order='both'.*'pre'.*'post'"),
        (
            lambda x, w: add_layer_norm(x, x[:1], w, w),
            r"x \(2, 96\) and residual \(1, 96\) must have one shape",
        ),
        (
            lambda x, w: layer_norm(x, w.to("meta"), w, impl="triton"),
            "weight on meta.*all must be on one device",
        ),
        (lambda x, w: add_layer_norm(x, x.to("meta"), w, w), "residual on meta.*on one device"),
        (lambda x, w: layer_norm(x, None, None), "weight is None: a tensor is needed"),
        (lambda x, w: layer_norm(x, w.int(), w), "weight is torch.int32: floating point"),
        (lambda x, w: layer_norm(x.to_sparse(), w, w), "x is torch.sparse_coo: a dense tensor"),
        (lambda x, w: layer_norm(x[:, :0], w[:0], w[:0]), r"x \(2, 0\): at least one channel"),
        (lambda x, w: layer_norm(x, w, w, -1e-5), "eps=-1e-05: a number, at least 0"),
        (lambda x, w: layer_norm(x, w, w, float("nan")), "eps=nan"),
        (lambda x, w: layer_norm(x, w, w, dtype=torch.int32), "dtype=torch.int32: floating point"),
        (lambda x, w: add_layer_norm(x, x.double(), w, w, impl="triton"), "torch.float64 is not among"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(2, 96), torch.ones(96, device=DEVICE))


def test_too_many_channels():
    C = MAX_CHANNELS + 1
    x, ones = random(1, C), torch.ones(C, device=DEVICE)
    with pytest.raises(ValueError, match=r"8193 channels are more than 8192.*impl='torch'"):
        layer_norm(x, ones, ones, impl="triton")
    assert layer_norm(x, ones, ones).shape == (1, C)  # "auto" takes PyTorch


def test_what_is_moved():
    """Stage 1 of Swin-T, one image, fp16: 3,136 rows of 96."""
    rows = 3136
    assert layer_norm_cost(rows, 96, 2).bytes_after == 2 * rows * 96 * 2 + 8 * rows
    assert add_layer_norm_cost(rows, 96, 2).saving == pytest.approx(1.24, abs=0.01)
