"""Kernels between map and windows against PyTorch in fp64: values, gradients, odd shapes, whole blocks, bad input."""

import copy
import math

import pytest
import torch
from compare import DEVICE, DTYPES, TOLERANCE, check, close, random
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.kernels import compile_report, reverse_unshift, shift_partition
from swin_lessons.kernels.launch import tl, triton
from swin_lessons.kernels.reverse_unshift import reverse_unshift_cost
from swin_lessons.kernels.shift_partition import shift_partition_cost
from swin_lessons.kernels.window_rows import map_rows, window_shape
from swin_lessons.models.blocks import make_block
from swin_lessons.models.config import SwinConfig
from swin_lessons.models.windows import (
    cyclic_shift,
    pad_to_windows,
    shift_mask,
    window_partition,
    windows_along,
)

pytest.importorskip("triton")

# B, H, W, C, window, shift: square, H != W both ways, padded, one token, a window larger than the map, one axis shifted
MAPS = [
    (1, 8, 8, 96, (4, 4), (2, 2)),
    (1, 14, 28, 24, (7, 7), (3, 3)),
    (1, 28, 14, 24, (7, 7), (3, 3)),
    (3, 5, 9, 96, (4, 4), (2, 2)),
    (2, 9, 5, 7, (4, 4), (2, 2)),
    (5, 1, 1, 96, (4, 4), (0, 0)),
    (3, 1, 1, 8, (1, 1), (0, 0)),
    (1, 7, 5, 48, (8, 3), (0, 1)),
    (2, 6, 4, 192, (3, 4), (1, 0)),
]
CASES = [(*MAP, torch.float32) for MAP in MAPS]
CASES += [(*MAP, dtype) for MAP in MAPS[3:5] for dtype in DTYPES[1:]]


def parameters(C):
    return random(C, seed=1), random(C, seed=2)


def windows_for(B, H, W, C, window, dtype=torch.float32):
    return random(*window_shape((B, H, W, C), window), dtype=dtype, seed=5)


# --- values and gradients


@pytest.mark.parametrize(("B", "H", "W", "C", "window", "shift", "dtype"), CASES)
def test_shift_partition_with_norm(B, H, W, C, window, shift, dtype):
    inputs = (random(B, H, W, C, dtype=dtype), *parameters(C))
    check(
        lambda x, w, b, impl: shift_partition(x, window, shift, w, b, 1e-4, impl=impl),
        inputs,
    )


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize(("B", "H", "W", "C", "window", "shift", "dtype"), CASES)
def test_reverse_unshift_with_norm(B, H, W, C, window, shift, order, dtype):
    inputs = (windows_for(B, H, W, C, window, dtype), random(B, H, W, C, dtype=dtype), *parameters(C))
    check(
        lambda x, s, w, b, impl: reverse_unshift(x, s, window, shift, w, b, 1e-4, order=order, impl=impl),
        inputs,
    )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [None, "pre", "post"])
def test_windows_in_half_precision_join_a_map_in_fp32(order, half):
    """What autocast leaves: an fp32 map whose windows attention reads, and returns, in half."""
    window, shift, limit = (3, 4), (1, 2), TOLERANCE[half]
    norm = parameters(24) if order else ()
    inputs = (windows_for(2, 5, 9, 24, window, half), random(2, 5, 9, 24), *norm)

    def back(windows, shortcut, *norm, impl):
        return reverse_unshift(windows, shortcut, window, shift, *norm, order=order, impl=impl)

    check(back, inputs, tolerance=limit)
    found = back(*inputs, impl="triton")
    assert (found[0] if order == "pre" else found).dtype == torch.float32
    if order == "pre":
        found = reverse_unshift(*inputs[:2], window, shift, *norm, order=order, dtype=half, impl="triton")
        assert [y.dtype for y in found] == [torch.float32, half]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_map_in_fp32_is_cut_into_windows_in_half_precision(half):
    window, shift = (3, 4), (1, 2)
    inputs = (random(2, 5, 9, 24), *parameters(24))

    def cut(x, weight, bias, impl, dtype=None):
        return shift_partition(x, window, shift, weight, bias, dtype=dtype, impl=impl)

    check(cut, inputs, dtype=half, reference=lambda *t: cut(*t, impl="torch"), tolerance=TOLERANCE[half])
    assert cut(*inputs, impl="triton", dtype=half).dtype == half


@pytest.mark.parametrize(("B", "H", "W", "C", "window", "shift", "dtype"), CASES)
def test_moves_are_exact(B, H, W, C, window, shift, dtype):
    """Bit for bit: the package's own steps, the way back, and both gradients."""
    x = random(B, H, W, C, dtype=dtype)
    windows = shift_partition(x, window, shift, impl="triton")
    assert torch.equal(windows, window_partition(cyclic_shift(pad_to_windows(x, window), shift), window))
    back = reverse_unshift(windows, torch.zeros_like(x), window, shift, impl="triton")
    assert torch.equal(back, x)
    gradient = random(*windows.shape, dtype=dtype, seed=3).detach()
    ours, theirs = (
        torch.autograd.grad(shift_partition(x, window, shift, impl=impl), x, gradient)[0]
        for impl in ("triton", "torch")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("B", "H", "W", "C", "window", "shift", "dtype"), CASES)
def test_reverse_unshift_adds_the_shortcut(B, H, W, C, window, shift, dtype):
    inputs = (windows_for(B, H, W, C, window, dtype), random(B, H, W, C, dtype=dtype))
    check(lambda x, s, impl: reverse_unshift(x, s, window, shift, impl=impl), inputs)


SIDE, SPAN = st.integers(1, 11), st.integers(1, 5)


@given(SIDE, SIDE, SPAN, SPAN, st.integers(-3, 12), st.integers(-3, 12), st.sampled_from([1, 3, 40]))
@settings(max_examples=8, deadline=None)
def test_any_map_window_and_shift(H, W, h, w, dy, dx, C):
    x, window, shift = random(3, H, W, C), (h, w), (dy, dx)
    windows = shift_partition(x, window, shift, impl="triton")
    assert torch.equal(windows, shift_partition(x, window, shift, impl="torch"))
    inputs = (windows.detach().requires_grad_(), x, *parameters(C))
    check(
        lambda v, s, weight, bias, impl: reverse_unshift(
            v, s, window, shift, weight, bias, order="pre", impl=impl
        ),
        inputs,
        tolerance=2e-5,
    )


def test_where_tokens_go():
    """A map of 2 x 3 in windows of 2 x 2, rolled left by 1: padding sits between the last column and the first."""
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]], device=DEVICE).reshape(1, 2, 3, 1)
    windows = shift_partition(x, (2, 2), (0, 1), impl="triton")
    assert windows.squeeze(-1).tolist() == [[2, 3, 5, 6], [0, 1, 0, 4]]


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # 1 / deviation of padding
def test_padding_is_zero_after_the_norm():
    """Not the bias; what lies there is dropped on the way back and gets a gradient of zero."""
    x, (weight, bias) = random(1, 3, 3, 16), parameters(16)
    windows = shift_partition(x, (4, 4), (0, 0), weight, bias, impl="triton")
    padding = torch.tensor([n // 4 == 3 or n % 4 == 3 for n in range(16)])
    assert (windows[0, padding] == 0).all()
    assert (windows[0, ~padding] != 0).all()
    filled = torch.where(padding[:, None].to(DEVICE), torch.nan, windows.detach()).requires_grad_()
    total, normed = reverse_unshift(
        filled, x, (4, 4), (0, 0), weight, bias, eps=0.0, order="pre", impl="triton"
    )
    (gradient,) = torch.autograd.grad((total * normed).sum(), filled)
    assert total.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient[0, padding] == 0).all()
    assert (gradient[0, ~padding] != 0).all()


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results_is_used(used):
    windows, x, (weight, bias) = windows_for(1, 5, 6, 24, (4, 4)), random(1, 5, 6, 24), parameters(24)
    ours, theirs = (
        torch.autograd.grad(
            reverse_unshift(windows, x, (4, 4), (2, 2), weight, bias, order="pre", impl=impl)[used]
            .sin()
            .sum(),
            (windows, x),
        )
        for impl in ("triton", "torch")
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strided", ["channels first", "sliced", "expanded"])
def test_non_contiguous_input_parameters_and_gradients(strided):
    x = {
        "channels first": random(2, 24, 5, 6).detach().permute(0, 2, 3, 1),
        "sliced": random(2, 5, 8, 30).detach()[:, :, 1:7, 3:27],
        "expanded": random(2, 1, 1, 24).detach().expand(2, 5, 6, 24),
    }[strided].requires_grad_()
    weight = random(48, seed=1).detach()[::2].requires_grad_()
    bias = random(1, seed=2).detach().expand(24).requires_grad_()

    def score(impl):
        windows = shift_partition(x, (4, 4), (2, 2), weight, bias, impl=impl)
        moved = windows.transpose(1, 2).contiguous().transpose(1, 2)
        kept, normed = reverse_unshift(moved, x, (4, 4), (2, 2), weight, bias, order="pre", impl=impl)
        last = reverse_unshift(moved, normed, (4, 4), (2, 2), weight, bias, order="post", impl=impl)
        return reverse_unshift(moved, last, (4, 4), (2, 2), impl=impl).sum() + kept.sum()  # stride 0

    ours, theirs = (torch.autograd.grad(score(impl), (x, weight, bias)) for impl in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


@triton.jit
def _places_kernel(row_ptr, place_ptr, is_token_ptr, rows, H, W, shift_y, shift_x, WINDOW: tl.constexpr):
    at = tl.arange(0, 4)
    place, is_token = map_rows(tl.load(row_ptr + at), rows, H, W, shift_y, shift_x, WINDOW, WINDOW)
    tl.store(place_ptr + at, place)
    tl.store(is_token_ptr + at, is_token)


def test_rows_beyond_two_billion_numbers():
    """The last rows of 10,000,000 images of 13 x 14: 196 rows each, and of each image the last is padding."""
    row = torch.tensor(
        [65_537, 1_959_999_998, 1_959_999_999, 1_960_000_000], dtype=torch.int32, device=DEVICE
    )
    place = torch.empty(4, dtype=torch.int64, device=DEVICE)
    is_token = torch.empty(4, dtype=torch.int32, device=DEVICE)
    _places_kernel[(1,)](row, place, is_token, 1_960_000_000, 13, 14, 0, 3, 7)
    # 65,537 is row 73 of image 334: window 1, token 24, at (3, 10) before the roll, (3, 13) after it
    assert place[0] == 334 * 182 + 3 * 14 + 13
    # the last row of the last window is (13, 13), rolled to (13, 2): below the map; its neighbour likewise
    assert place[2] == 9_999_999 * 182 + 13 * 14 + 2
    assert is_token.tolist() == [1, 0, 0, 0]


def test_half_tokens_and_full_parameters():
    x, (weight, bias) = random(1, 3, 5, 96, dtype=torch.float16), parameters(96)
    windows = shift_partition(x, (2, 2), (1, 1), weight, bias, impl="triton")
    assert windows.dtype == torch.float16
    windows.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float16, torch.float32)


def test_no_images():
    weight, bias = parameters(8)
    x = random(0, 4, 4, 8)
    windows = shift_partition(x, (2, 2), (1, 1), weight, bias, impl="triton")
    assert windows.shape == (0, 4, 8)
    assert reverse_unshift(windows, x, (2, 2), impl="triton").shape == (0, 4, 4, 8)


# --- whole blocks


def block_of(version, seed=0):
    """A shifted block whose norms and logit scales are random: V2 starts as the identity."""
    config = SwinConfig(
        version=version,
        embed_dim=32,
        depths=(2,),
        num_heads=(2,),
        pretrained_window_sizes=(0,),
        window_size=(4, 4),
        img_size=(20, 36),
    )
    block = make_block(config, stage=0, i=1, drop_path=0.0)
    generator = torch.Generator().manual_seed(seed)
    for name, p in block.named_parameters():
        middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        middle = math.log(10) if "logit_scale" in name else middle
        p.data = middle + 0.3 * torch.randn(p.shape, generator=generator)
    return block.to(DEVICE)


def in_windows(block, windows, H, W):
    """The block's attention, told what may meet."""
    h, w = window = block.attn.window_size
    mask = shift_mask(windows_along(H, h) * h, windows_along(W, w) * w, window, block.attn.shift_size, DEVICE)
    return block.attn.attend_windows(windows, window, mask.repeat(len(windows) // len(mask), 1, 1))


def block_v1(block, x):
    moves = (block.attn.window_size, block.attn.shift_size)
    windows = shift_partition(x, *moves, block.norm1.weight, block.norm1.bias, impl="triton")
    windows = in_windows(block, windows, *x.shape[1:3])
    norm = (block.norm2.weight, block.norm2.bias)
    x, normed = reverse_unshift(windows, x, *moves, *norm, order="pre", impl="triton")
    return x + block.mlp(normed)


def block_v2(block, x):
    moves = (block.attn.window_size, block.attn.shift_size)
    windows = in_windows(block, shift_partition(x, *moves, impl="triton"), *x.shape[1:3])
    norm = (block.norm1.weight, block.norm1.bias)
    x = reverse_unshift(windows, x, *moves, *norm, order="post", impl="triton")
    return x + block.norm2(block.mlp(x))


@pytest.mark.parametrize(("version", "fused"), [(1, block_v1), (2, block_v2)])
def test_a_block_of_these_is_the_package_s_block(version, fused):
    """Shifted, padded, H != W, fp32 beside fp64; the gradient of every parameter."""
    block = block_of(version)
    exact = copy.deepcopy(block).double()
    x = random(2, 5, 9, 32)
    x64 = x.detach().double().requires_grad_()
    ours, theirs = fused(block, x), exact(x64)
    close(ours, theirs, 1e-5, "output")
    assert (theirs - x64).abs().max() > 0.1  # no identity
    weight = random(*ours.shape, seed=9).detach()
    found = torch.autograd.grad((ours * weight).sum(), (x, *block.parameters()))
    wanted = torch.autograd.grad((theirs * weight.double()).sum(), (x64, *exact.parameters()))
    names = ["x", *(name for name, _ in block.named_parameters())]
    for name, a, b in zip(names, found, wanted, strict=True):
        close(a, b, 3e-5, name)


# --- compilers


def test_compilers_see_through():
    x, (weight, bias) = random(1, 5, 6, 16), parameters(16)

    def both(x, impl):
        windows = shift_partition(x, (4, 4), (2, 2), weight, bias, impl=impl)
        total, normed = reverse_unshift(windows, x, (4, 4), (2, 2), weight, bias, order="pre", impl=impl)
        return reverse_unshift(
            shift_partition(total, (4, 4), (1, 2), impl=impl), normed, (4, 4), (1, 2), impl=impl
        ).sin()

    compiled = torch.compile(lambda x: both(x, "triton"), fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(x), both(x, "torch")
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), x)[0],
        torch.autograd.grad(theirs.sum(), x)[0],
        atol=1e-4,
        rtol=1e-4,
    )


def test_registered_properly():
    layout, ops = (5, 6, 1, 2, 4, 4), torch.ops.swin_lessons
    x, windows, norm = random(1, 5, 6, 16), windows_for(1, 5, 6, 16, (4, 4)), (*parameters(16), 1e-5)
    torch.library.opcheck(ops.cut.default, (x, layout))
    torch.library.opcheck(ops.paste.default, (windows, x, layout))
    torch.library.opcheck(ops.shift_partition.default, (x, *norm, layout, torch.bfloat16))
    for mode in (1, 2):
        dtypes = (torch.bfloat16, torch.float32)
        torch.library.opcheck(ops.reverse_unshift.default, (windows, x, *norm, mode, layout, *dtypes))


# --- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: shift_partition(x[0], (2, 2)), r"shape \(4, 6, 8\).*\(B, H, W, C\)"),
        (lambda x, w: shift_partition(x[:, :0], (2, 2)), r"shape \(1, 0, 6, 8\).*at least one token"),
        (lambda x, w: shift_partition(x.long(), (2, 2)), "int64: floating point"),
        (lambda x, w: shift_partition(x, (2, 0)), r"window_size=\(2, 0\).*at least 1"),
        (lambda x, w: shift_partition(x, (2, 2), (1,)), r"shift_size=\(1,\).*two numbers"),
        (lambda x, w: shift_partition(x, (2, 2), (1, 1), w), "weight and bias.*both"),
        (lambda x, w: shift_partition(x, (2, 2), (1, 1), w[:5], w), "one number for each"),
        (lambda x, w: shift_partition(x.double(), (2, 2), impl="triton"), "float64.*impl='torch'"),
        (lambda x, w: shift_partition(x, 2), r"window_size=2: two numbers of at least 1"),
        (lambda x, w: shift_partition(x, (2.0, 2.0)), r"window_size=\(2.0, 2.0\).*whole"),
        (lambda x, w: shift_partition(x, (2, 2), 1), "shift_size=1: two numbers"),
        (lambda x, w: shift_partition(x, (2, 2), (1, 1), w.to("meta"), w.to("meta")), "weight on meta"),
        (
            lambda x, w: shift_partition(x, (2, 2), (1, 1), w, w, dtype=torch.int8),
            "dtype=torch.int8: floating",
        ),
        (
            lambda x, w: reverse_unshift(x.reshape(6, 4, 8).to("meta"), x, (2, 2)),
            "windows on meta.*one device",
        ),
        (
            lambda x, w: reverse_unshift(x.reshape(6, 4, 8).int(), x, (2, 2)),
            "windows is torch.int32: floating",
        ),
        (lambda x, w: reverse_unshift(x, x, (2, 2)), r"\(1, 4, 6, 8\).*cut into \(6, 4, 8\)"),
        (lambda x, w: shift_partition(x, (2, 2), dtype=torch.half), "dtype=torch.float16: a pure move keeps"),
        (
            lambda x, w: reverse_unshift(x.reshape(6, 4, 8), x, (2, 2), dtype=torch.half),
            "dtype=torch.float16: an addition without LayerNorm gives torch.float32",
        ),
        (lambda x, w: reverse_unshift(x.reshape(6, 4, 8), x, (2, 2), order="mid"), "order='mid'.*'post'"),
        (lambda x, w: reverse_unshift(x.reshape(6, 4, 8), x, (2, 2), order="pre"), "order='pre'.*weight"),
        (
            lambda x, w: reverse_unshift(x.reshape(6, 4, 8), x, (2, 2), (1, 1), w, w),
            "order=None.*needs an order",
        ),
        (
            lambda x, w: reverse_unshift(x.reshape(6, 4, 8), x, (2, 2), (1, 1), w, order="post"),
            "'post'.*bias",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(1, 4, 6, 8), torch.ones(8, device=DEVICE))


# --- what to expect


def test_what_is_moved():
    """Stage 1 of Swin-T, one image, fp16, in maps that are read or written: 8 before, 2 after."""
    stage, maps, statistics = (1, 56, 56, 96), 56 * 56 * 96 * 2, 8 * 56 * 56
    cost = shift_partition_cost(stage, (7, 7), (3, 3), 2)
    assert (cost.launches_before, cost.launches_after) == (4, 1)
    assert cost.bytes_before == 8 * maps + statistics
    assert cost.bytes_after == 2 * maps + statistics
    assert shift_partition_cost(stage, (7, 7), (0, 0), 2).bytes_before == 4 * maps + statistics
    moved = shift_partition_cost(stage, (7, 7), (3, 3), 2, norm=False)
    assert (moved.bytes_before, moved.bytes_after) == (6 * maps, 2 * maps)
    pre = reverse_unshift_cost(stage, (7, 7), (3, 3), 2, order="pre")
    assert (pre.launches_before, pre.launches_after) == (5, 1)
    assert pre.bytes_before == 11 * maps + statistics
    assert pre.bytes_after == 4 * maps + statistics
    post = reverse_unshift_cost(stage, (7, 7), (3, 3), 2, order="post")
    assert (post.bytes_before, post.bytes_after) == (11 * maps + statistics, 3 * maps + statistics)
    back = reverse_unshift_cost(stage, (7, 7), (3, 3), 2, order="pre", backward=True)
    assert (back.bytes_before, back.bytes_after) == (14 * maps + statistics, 5 * maps + statistics)


def test_a_roll_over_two_axes_copies_twice():
    """What the formula counts, PyTorch does: one roll for each axis, and for each a new map."""
    x = torch.randn(1, 8, 8, 4, device="cpu")
    with torch.profiler.profile() as profiled:
        x.roll((-3, -3), (1, 2))
    assert sum(event.count for event in profiled.key_averages() if event.key == "aten::cat") == 2


def test_padding_costs():
    """5 x 9 in windows of 4 is 8 x 12: 96 numbers where 45 are read."""
    plain = shift_partition_cost((1, 5, 9, 1), (4, 4), (0, 0), 1, norm=False)
    assert (plain.bytes_before, plain.launches_before) == ((96 + 45 + 45) + (96 + 96), 3)  # fill, copy; cut
    assert plain.bytes_after == 45 + 96
    back = shift_partition_cost((1, 5, 9, 1), (4, 4), (2, 2), 1, norm=False, backward=True)
    assert (back.bytes_before, back.bytes_after) == (3 * 192, 90)


def test_a_compiler_spills_nothing():
    """Forward and backward; whole rows, 16 bytes a thread at once."""
    rows = compile_report("reverse_unshift[C=96, pre]", "sm_80", dtypes=["fp16"])
    assert [(row["spill_bytes"], row["vector_bytes"]) for row in rows] == [(0, 16), (0, 16)]
