"""Quantised and integer layers: equal to each other bit for bit, and right by fp64 and ONNX Runtime."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_cases import numbers
from torch import nn

from swin_lessons.quantization import (
    IntConv2d,
    IntLinear,
    QuantConfig,
    QuantConv2d,
    QuantLinear,
    convert,
    ptq,
)

PRESETS = ("linear", "dynamic", "w8a16", "w4a16", "w4a8")


def pair(layer: nn.Module, x: torch.Tensor, **config) -> tuple[nn.Module, nn.Module]:
    """A layer, calibrated on `x`, and its conversion."""
    preset = config.pop("preset", "linear")
    config = {"activation_observer": "minmax"} | config
    fake = ptq(layer, [x], QuantConfig.preset(preset, **config))
    return fake, convert(fake)


@torch.no_grad()
def assert_equal(fake: nn.Module, integer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = integer(x)
    assert out.dtype == x.dtype
    assert torch.equal(fake(x), out)
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 80),
    st.integers(1, 40),
    st.sampled_from(PRESETS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["tensor", "channel", "group"]),
    st.integers(0, 999),
)
def test_fake_and_converted_are_equal(
    rows, K, outputs, preset, weights, activations, bias, granularity, seed
):
    """Every layout and odd shape: one row, one input, depths that are no multiple of anything."""
    torch.manual_seed(seed)
    x = numbers(2, rows, K, seed=seed)
    fake, integer = pair(
        nn.Linear(K, outputs, bias),
        x,
        preset=preset,
        symmetric_weights=weights,
        symmetric_activations=activations,
        weight_granularity=granularity,
        group_size=16,
    )
    assert_equal(fake, integer, x)
    assert_equal(fake, integer, 3 * x)  # beyond the range


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_a_zero_point_at_the_edge_of_the_grid(granularity):
    """All weights positive: the difference of code and zero point needs 9 bits."""
    layer = nn.Linear(40, 5)
    layer.weight.data.abs_()
    for preset in ("w8a16", "linear"):
        fake, integer = pair(
            layer, numbers(3, 40), preset=preset, symmetric_weights=False, weight_granularity=granularity
        )
        assert_equal(fake, integer, numbers(3, 40))
        difference = integer.float_weight() - layer.weight
        assert difference.abs().max() <= 0.501 * integer.weight_scale.max()


@pytest.mark.parametrize("K", [1040, 1041, 3072])
@pytest.mark.parametrize("symmetric", [True, False])
def test_long_sums_are_exact(K, symmetric):
    """fc2 of Swin-T's last stage sums 3,072 products: beyond 2^24, where fp32 would round."""
    torch.manual_seed(0)
    layer = nn.Linear(K, 8)
    layer.weight.data.abs_().clamp_(min=0.9 * layer.weight.max())
    x = torch.rand(5, K) * 0.1 + 0.9
    fake, integer = pair(layer, x, symmetric_activations=symmetric)
    out = assert_equal(fake, integer, x)
    codes, scale, zero = integer.input_quant.codes(x)
    whole = codes.long() - (0 if zero is None else zero.long())
    total = whole @ integer.weight.long().t()
    assert (total.max() > 1 << 24) == (K == 3072 or not symmetric)
    expected = total.float() * (scale * integer.weight_scale) + integer.bias
    assert torch.equal(out, expected)


def test_the_attributes_rebuild_the_result():
    """What an engine reads: integers, scales, zero points, bias; in fp64 they give the layer's numbers."""
    x = numbers(9, 24)
    _, layer = pair(nn.Linear(24, 10), x)
    assert isinstance(layer, IntLinear)
    assert (layer.weight.dtype, layer.weight.shape) == (torch.int8, (10, 24))
    assert (layer.weight_scale.shape, layer.x_scale.shape, layer.x_zero_point.dtype) == (
        (10,),
        (),
        torch.int32,
    )
    codes = (torch.round(x / layer.x_scale) + layer.x_zero_point).clamp(-128, 127).double()
    product = (codes - layer.x_zero_point) @ layer.weight.double().t()
    expected = product * layer.x_scale.double() * layer.weight_scale.double() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(F.linear(x, layer.float_weight(), layer.bias), layer(x), atol=0.05, rtol=0)
    assert dict(layer.named_parameters()) == {}


def test_as_onnx_runtime_multiplies():
    """QuantizeLinear, MatMulInteger (u8 x s8 -> s32), one scaling in fp32: the same bits."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    x = numbers(13, 37)
    _, layer = pair(nn.Linear(37, 11), x)
    codes, scale, zero = layer.input_quant.codes(x)
    file = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMulInteger", ["x", "w", "z"], ["y"])],
            "m",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 37])],
            [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 11])],
            [
                numpy_helper.from_array(layer.weight.t().contiguous().numpy(), "w"),
                numpy_helper.from_array(np.array(int(zero) + 128, np.uint8), "z"),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    file.ir_version = 9
    session = runtime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    (total,) = session.run(None, {"x": (codes.int() + 128).to(torch.uint8).numpy()})
    expected = torch.from_numpy(total).float() * (scale * layer.weight_scale) + layer.bias
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("preset", ["linear", "w8a16", "w4a8"])
def test_other_dtypes(dtype, preset):
    torch.manual_seed(0)
    x = numbers(6, 40).to(dtype)
    fake, integer = pair(nn.Linear(40, 12).to(dtype), x, preset=preset)
    out = assert_equal(fake, integer, x)
    single = pair(nn.Linear(40, 12), x.float(), preset=preset)[1]
    assert out.shape == single(x.float()).shape
    again = integer.to(torch.float32)
    assert again.weight.dtype in (torch.int8, torch.uint8)
    assert again.weight_scale.dtype == torch.float32


def test_int4_weights_are_half_the_bytes():
    _, layer = pair(nn.Linear(33, 8), numbers(4, 33), preset="w4a16")
    assert (layer.weight.dtype, layer.weight.shape) == (torch.uint8, (8, 17))
    assert (layer.weight_bits, layer.weight_scale.shape) == (4, (8, 2))
    assert layer.weight_codes().shape == (8, 33)
    assert int(layer.weight_codes().abs().max()) == 7


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 1)),
    st.sampled_from([*PRESETS, "tensor"]),
    st.booleans(),
)
def test_convolutions(size, kernel, stride, padding, preset, symmetric):
    B, C, outputs = size
    torch.manual_seed(B)
    conv = nn.Conv2d(C, outputs, kernel, stride, padding, dilation=(1, 2))
    x = numbers(B, C, 9, 8) + 1  # zero, at the edge, is not in the middle of the range
    config = {"symmetric_activations": symmetric}
    if preset == "tensor":
        config, preset = config | {"dynamic": "tensor"}, "linear"
    fake, integer = pair(conv, x, preset=preset, **config)
    assert isinstance(fake, QuantConv2d)
    assert isinstance(integer, IntConv2d)
    out = assert_equal(fake, integer, x)
    if preset in ("linear", "w8a16", "dynamic"):
        assert (out - conv(x)).abs().max() < 0.06 * conv(x).abs().max() + 0.02


def test_the_output_quantiser_stands_before_the_bias():
    """FasterTransformer's "aftergemm": the grid is that of the product, not of the sum."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), numbers(50, 8)
    layer.bias.data.fill_(1000.0)
    kinds = frozenset({"head", "output"})
    fake, integer = pair(layer, x, quantize=kinds, symmetric_activations=True)
    out = assert_equal(fake, integer, x)
    scale = fake.output_quant.scale
    assert scale < 0.1
    steps = (out - 1000) / scale
    assert (steps - steps.round()).abs().max() < 0.02


def test_gradients_are_those_of_rounded_factors():
    torch.manual_seed(0)
    x = numbers(5, 24).requires_grad_()
    fake, _ = pair(nn.Linear(24, 7), x.detach())
    assert isinstance(fake, QuantLinear)
    upstream = numbers(5, 7, seed=2)
    fake(x).backward(upstream)
    rounded = fake.weight_quant(fake.weight).detach()
    torch.testing.assert_close(x.grad, upstream @ rounded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        fake.weight.grad, upstream.t() @ fake.input_quant(x).detach(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(fake.bias.grad, upstream.sum(0))


def test_autocast_keeps_its_dtype():
    x = numbers(4, 16)
    fake, integer = pair(nn.Linear(16, 8), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fake(x).dtype == torch.bfloat16
    torch.testing.assert_close(fake(x), integer(x), atol=0, rtol=0)


def test_one_outlier_channel_spoils_a_tensor_not_the_rest_of_a_token():
    """The residual stream's fault in small: a channel 100 times as large as the others."""
    torch.manual_seed(0)
    x = numbers(64, 32)
    x[:, 3] *= 100
    layer = nn.Linear(32, 32)
    layer.weight.data[:, 3] = 0  # what is read comes from the other channels
    fine = pair(layer, x[:, torch.arange(32) != 3].repeat(1, 2)[:, :32])[0]
    spoiled = pair(layer, x)[0]

    def error(model, values):
        return (model(values) - layer(values)).norm() / (layer(values) - layer.bias).norm()

    plain = x.clone()
    plain[:, 3] = 0
    assert error(spoiled, x) > 20 * error(fine, plain)


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Inherited(nn.Linear):
    """A subclass that only adds words."""


def test_subclasses():
    assert isinstance(ptq(nn.Sequential(Inherited(4, 4)), [numbers(2, 4)])[0], QuantLinear)
    with pytest.raises(ValueError, match=r"0 is a OwnForward with a forward of its own.*skip=\('0',\)"):
        ptq(nn.Sequential(OwnForward(4, 4), nn.Linear(4, 4)), [numbers(2, 4)])
    left = ptq(nn.Sequential(OwnForward(4, 4), nn.Linear(4, 4)), [numbers(2, 4)], QuantConfig(skip=("0",)))
    assert type(left[0]) is OwnForward


@pytest.mark.parametrize(
    "options", [{"groups": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}]
)
def test_convolutions_that_are_no_plain_product(options):
    with pytest.raises(ValueError, match="0 is a convolution with groups or special padding"):
        ptq(nn.Sequential(nn.Conv2d(2, 2, 3, **options)), [numbers(1, 2, 5, 5)])


@pytest.mark.parametrize("preset", PRESETS)
def test_no_row_at_all(preset):
    fake, integer = pair(nn.Linear(6, 3), numbers(4, 6), preset=preset)
    assert assert_equal(fake, integer, numbers(0, 6)).shape == (0, 3)
    conv = pair(nn.Conv2d(2, 3, 2), numbers(1, 2, 4, 4), preset=preset)
    assert assert_equal(*conv, numbers(0, 2, 4, 4)).shape == (0, 3, 3, 3)
