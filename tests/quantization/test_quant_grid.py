"""Scale, zero point and rounding: one formula, against PyTorch, NumPy and ONNX Runtime."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_cases import numbers

from swin_lessons.quantization import Grid, scale_and_zero_point
from swin_lessons.quantization.grid import centred

SYMMETRIC, AFFINE = Grid(8), Grid(8, symmetric=False)


def of(low: float, high: float, grid: Grid) -> tuple[float, int]:
    scale, zero_point = scale_and_zero_point(torch.tensor(low), torch.tensor(high), grid)
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)
    return scale.item(), zero_point.item()


@pytest.mark.parametrize(
    ("low", "high", "grid", "scale", "zero_point"),
    [
        (-1.149422, 2.533506, Grid(4), 0.361929, 0),  # pytorch/ao#4824: another formula gave .337801
        (-10.0, 10.0, AFFINE, 0.0784314, -1),  # pytorch#194815
        (-12.7, 6.0, SYMMETRIC, 0.1, 0),
        (-1.0, 1.0, Grid(8, narrow=True), 1 / 127, 0),
        (0.0, 25.5, AFFINE, 0.1, -128),
        (-25.5, 0.0, AFFINE, 0.1, 127),
        (3.0, 25.5, AFFINE, 0.1, -128),  # zero is always within
        (-0.17, 8.0, AFFINE, 8.17 / 255, -123),  # after a GELU (mct#1337)
        (0.0, 0.0, AFFINE, 1.0, -128),
        (0.0, 0.0, SYMMETRIC, 1.0, 0),
    ],
)
def test_numbers(low, high, grid, scale, zero_point):
    found = of(low, high, grid)
    assert found[0] == pytest.approx(scale, rel=2e-6)
    assert found[1] == zero_point


def test_extreme_ranges_have_a_finite_positive_scale():
    largest = torch.finfo(torch.float32).max
    for grid in (SYMMETRIC, AFFINE):
        assert 0 < of(-largest, largest, grid)[0] < np.inf
        assert of(0.0, 1e-45, grid)[0] > 0
        assert np.isnan(of(np.nan, 1.0, grid)[0])


@pytest.mark.parametrize(
    ("grid", "low", "high", "reach"),
    [
        (Grid(8), -128, 127, 128),
        (Grid(8, narrow=True), -127, 127, 127),
        (Grid(8, symmetric=False), -128, 127, 255),
        (Grid(4), -8, 7, 8),
        (Grid(4, narrow=True), -7, 7, 7),
    ],
)
def test_the_integers_of_a_grid(grid, low, high, reach):
    assert (grid.low, grid.high, grid.reach) == (low, high, reach)


def test_halves_go_to_the_even_neighbour():
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert centred(x, torch.tensor(1.0), None, SYMMETRIC).tolist() == [-2, -2, 0, 0, 2, 2]
    odd = torch.tensor(3, dtype=torch.int32)  # the zero point is added after rounding
    assert centred(x, torch.tensor(1.0), odd, AFFINE).tolist() == [-2, -2, 0, 0, 2, 2]


@settings(max_examples=40, deadline=None)
@given(st.floats(-50, 0), st.floats(0.01, 50), st.integers(0, 10**6), st.sampled_from([4, 8]))
def test_as_pytorch_observes_and_rounds(low, high, seed, bits):
    """`torch.ao`'s affine formula, and `torch.fake_quantize`, whose product with 1 / scale may move a tie by a step."""
    grid = Grid(bits, symmetric=False)
    scale, zero_point = scale_and_zero_point(torch.tensor(low), torch.tensor(high), grid)
    observer = torch.ao.quantization.MinMaxObserver(
        torch.qint8, torch.per_tensor_affine, quant_min=grid.low, quant_max=grid.high
    )
    observer(torch.tensor([low, high]))
    theirs = observer.calculate_qparams()
    assert scale.item() == pytest.approx(theirs[0].item(), rel=1e-5)
    assert abs(zero_point.item() - theirs[1].item()) <= 1
    x = numbers(200, seed=seed) * high
    ours = centred(x, scale, zero_point, grid) * scale
    reference = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, grid.low, grid.high)
    step = (ours - reference).abs() / scale
    assert step.max() <= 1.001
    assert (step > 0.5).float().mean() < 0.02


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 1e3), st.integers(-128, 127), st.integers(0, 10**6))
def test_the_gradient_is_pytorch_s(scale, zero_point, seed):
    x = (numbers(300, seed=seed) * scale * 150).requires_grad_()
    s, z = torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32)
    out = centred(x, s, z, AFFINE) * s
    assert torch.equal(
        out, centred(x.detach(), s, z, AFFINE) * s
    )  # the same numbers with and without gradient
    (ours,) = torch.autograd.grad(out.sum(), x)
    reference = torch.fake_quantize_per_tensor_affine(x, s, z, -128, 127)
    (theirs,) = torch.autograd.grad(reference.sum(), x)
    assert set(ours.unique().tolist()) <= {0.0, 1.0}
    assert (ours != theirs).float().mean() < 0.02  # ties at the edge of the grid


def test_codes_are_those_of_onnx_runtime():
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper

    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])]
    given_ = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("z", TensorProto.INT8, []),
    ]
    out = [helper.make_tensor_value_info("y", TensorProto.INT8, ["n"])]
    file = helper.make_model(
        helper.make_graph(nodes, "q", given_, out), opset_imports=[helper.make_opsetid("", 17)]
    )
    file.ir_version = 9
    onnx.checker.check_model(file)
    session = runtime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    for grid, zero in ((SYMMETRIC, 0), (AFFINE, 5), (AFFINE, -128)):
        scale, z = torch.tensor(0.0625), torch.tensor(zero, dtype=torch.int32)
        x = torch.cat([numbers(1000) * 8, torch.arange(-300, 300) * 0.03125])  # every second one is a tie
        ours = centred(x, scale, z, grid) + z
        feed = {"x": x.numpy(), "s": scale.numpy(), "z": np.array(zero, np.int8)}
        assert (ours.numpy() == session.run(None, feed)[0]).all()
