"""Window attention kernels against PyTorch in fp64: values, gradients, masks, dropout, odd shapes, bad input."""

import math

import pytest
import torch
from compare import DEVICE, DTYPES, check, random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swin_lessons.kernels import compile_report, window_attention
from swin_lessons.kernels import window_attention_blocks as blocks
from swin_lessons.kernels.philox import philox, uniform
from swin_lessons.kernels.window_attention import window_attention_cost
from swin_lessons.kernels.window_attention_tiles import BLOCKS, Tiles, walkers
from swin_lessons.models.attention import WindowAttention, WindowAttentionV2
from swin_lessons.models.windows import shift_mask, window_partition

pytest.importorskip("triton")
FP32 = 1e-5  # of the largest: sums over head_dim and N in another order


def inputs(B, H, W, window, heads, head_dim, *, cosine=False, dtype=torch.float32):
    """qkv and bias, and for V2 factors between 1 and 4."""
    N = window[0] * window[1]
    made = [random(B, H, W, 3 * heads * head_dim, dtype=dtype), random(heads, N, N, seed=1)]
    if cosine:
        made.append((1 + random(heads, seed=3).detach().abs().clamp(max=3)).requires_grad_())
    return made


def attention(window, shift, heads, **options):
    """`window_attention` as a function of its tensors."""

    def op(qkv, bias, factor=None, impl="auto"):
        sizes = {"num_heads": heads, "logit_factor": factor, "impl": impl}
        return window_attention(qkv, bias, window, shift, **sizes, **options)

    return op


def check_shape(B, H, W, window, shift, heads, head_dim, *, cosine=False, dtype=torch.float32, **options):
    tensors = inputs(B, H, W, window, heads, head_dim, cosine=cosine, dtype=dtype)
    tolerance = FP32 if dtype == torch.float32 else None
    op = attention(window, shift, heads, **options)

    def with_factor(qkv, bias, factor, impl):
        """A factor's gradient sums up much that cancels: this adds about 1, to measure errors against."""
        return op(qkv, bias, factor, impl), factor.expand(16, -1)

    reference = (lambda *t: with_factor(*t, impl="torch")) if cosine else (lambda *t: op(*t, impl="torch"))
    check(with_factor if cosine else op, tensors, reference=reference, tolerance=tolerance)


@pytest.fixture
def large_tiles(monkeypatch):
    """Fewer steps for the interpreter, which charges by the step."""
    tile = Tiles(256, 256, 4)
    monkeypatch.setitem(BLOCKS, ("half", 32), dict.fromkeys(("forward", "query", "key", "bias"), tile))


# --- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "cosine"),
    [
        ((1, 14, 7, (7, 7), (3, 3), 3, 32), False),  # N = 49, C = 96, H != W
        ((1, 8, 8, (8, 8), (0, 0), 2, 32), True),  # V2, a window as large as the map
        ((3, 2, 6, (2, 3), (1, 1), 2, 24), True),  # tiny windows, odd batch
        ((1, 4, 16, (4, 8), (2, 0), 2, 24), False),  # half a tile, shifted along one axis
    ],
)
def test_a_window_in_one_tile(shape, cosine, dtype):
    check_shape(*shape, cosine=cosine, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "cosine"),
    [
        ((1, 18, 8, (9, 8), (4, 4), 1, 32), False),
        ((1, 9, 16, (9, 8), (4, 4), 1, 24), True),
    ],
)
def test_a_window_in_blocks(shape, cosine, dtype):
    check_shape(*shape, cosine=cosine, dtype=dtype)


@pytest.mark.parametrize("head_dim", [48, 64])
def test_wide_heads_go_in_blocks(head_dim):
    check_shape(1, 7, 14, (7, 7), (0, 3), 1, head_dim, dtype=torch.float16)


@pytest.mark.parametrize(("window", "cosine"), [((12, 12), False), ((16, 16), True), ((24, 24), True)])
def test_the_windows_of_v2(window, cosine, large_tiles):
    shift = (0, 0) if window[0] > 12 else (6, 6)
    check_shape(1, *window, window, shift, 1, 32, cosine=cosine, dtype=torch.float16)


@given(
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.tuples(st.integers(0, 3), st.integers(0, 4)),
    st.sampled_from([(1, 5), (2, 24), (1, 16)]),
    st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_any_map_window_and_shift(maps, window, shift, heads, cosine):
    B, H, W = maps[0], maps[1] * window[0], maps[2] * window[1]
    check_shape(B, H, W, window, (shift[0] % window[0], shift[1] % window[1]), *heads, cosine=cosine)


def test_logit_factor_up_to_its_limit():
    """100 times a cosine: softmax is nearly one-hot, and sees exponents far from 0."""
    qkv, bias = inputs(1, 7, 7, (7, 7), 1, 32)
    factor = torch.tensor([100.0], device=DEVICE, requires_grad=True)
    check(attention((7, 7), (0, 0), 1), [qkv, bias, factor], tolerance=1e-4)


def test_zero_vectors_have_no_direction():
    """Padded tokens of V2 have keys of zeros: cosine 0, and a gradient of 0 rather than 1e12."""
    qkv, bias, factor = inputs(1, 4, 4, (4, 4), 1, 16, cosine=True)
    qkv = qkv.detach().clone()
    qkv[:, -1, :, :32] = 0.0
    qkv.requires_grad_()
    check(attention((4, 4), (0, 0), 1), [qkv, bias, factor], tolerance=FP32)
    attention((4, 4), (0, 0), 1)(qkv, bias, factor, impl="triton").square().sum().backward()
    assert torch.equal(qkv.grad[:, -1, :, :32].cpu(), torch.zeros(1, 4, 32))


def test_tiles_change_nothing(monkeypatch):
    qkv, bias = (t.detach() for t in inputs(1, 9, 16, (9, 8), 1, 16))
    op = attention((9, 8), (4, 4), 1)
    monkeypatch.setitem(BLOCKS["fp32", 32], "forward", Tiles(16, 128, 4))
    narrow = op(qkv, bias, impl="triton")
    monkeypatch.setitem(BLOCKS["fp32", 32], "forward", Tiles(128, 16, 4))
    torch.testing.assert_close(op(qkv, bias, impl="triton"), narrow)


# --- the model's attention


@pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])
@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [((14, 7), (7, 7), (3, 0)), ((4, 12), (4, 6), (0, 3)), ((5, 5), (5, 5), (0, 0))],
)
def test_the_models_module(kind, size, window, shift):
    """The module's parameters and the kernel give what the module gives."""
    torch.manual_seed(0)
    attn = kind(48, 2, window, shift, attention="reference").to(DEVICE)
    with torch.no_grad():
        for p in attn.parameters():  # V2 is the identity as it starts, V1's bias is zero
            p.copy_(torch.randn_like(p) / p[0].numel() ** 0.5 if p.ndim > 1 else torch.randn_like(p))
    x = random(2, *size, 48).detach()
    factor = attn.logit_factor()
    qkv, bias = attn.project_qkv(x), attn.relative_position_bias(window)
    options = {"scale": factor} if kind is WindowAttention else {"logit_factor": factor}
    out = window_attention(qkv, bias, window, shift, num_heads=2, impl="triton", **options)
    torch.testing.assert_close(attn.proj(out), attn(x), atol=1e-5, rtol=1e-4)


# --- who sees whom


def seen(H, W, window, shift, head_dim):
    """Which key each query of each window sees: zero scores weigh all of them alike, values tell them apart."""
    N = window[0] * window[1]
    qkv = torch.zeros(1, H, W, 3 * head_dim, device=DEVICE)
    place = torch.arange(N, device=DEVICE).view(window).repeat(H // window[0], W // window[1])
    place = place.roll(shift, (0, 1))  # the token's number in its window, where it lies in the map
    qkv[0, :, :, 2 * head_dim :] = torch.eye(head_dim, device=DEVICE)[place]
    bias = torch.zeros(1, N, N, device=DEVICE)
    out = window_attention(qkv, bias, window, shift, num_heads=1, impl="triton")
    return window_partition(out.roll((-shift[0], -shift[1]), (1, 2)), window)[..., :N]  # (n, N, N)


@pytest.mark.parametrize(
    ("size", "window", "shift", "head_dim"),
    [((8, 12), (4, 4), (2, 1), 16), ((6, 8), (3, 4), (0, 3), 16), ((4, 4), (4, 4), (1, 2), 16)],
)
def test_a_query_sees_what_the_mask_allows(size, window, shift, head_dim):
    weights = seen(*size, window, shift, head_dim)
    mask = shift_mask(*size, window, shift, DEVICE)
    assert torch.equal(weights > 0, mask)
    expected = mask / mask.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


def test_opposite_edges_never_mix():
    """A map of 4 x 4 in windows of 2 x 2, shifted by 1: a corner, alone in its part of the last window."""
    qkv, bias = (t.detach() for t in inputs(1, 4, 4, (2, 2), 1, 16))
    op = attention((2, 2), (1, 1), 1)
    before = op(qkv, bias, impl="triton")

    def changed(y, x):
        other = qkv.clone()
        other[0, y, x] += 1.0
        return (op(other, bias, impl="triton") != before).any(-1)[0].nonzero().tolist()

    assert changed(0, 0) == [[0, 0]]
    assert changed(0, 1) == [[0, 1], [0, 2]]  # the top row wrapped round to the bottom windows
    assert changed(1, 3) == [[1, 3], [2, 3]]  # the last column, beside the wrapped first one
    assert changed(2, 1) == [[1, 1], [1, 2], [2, 1], [2, 2]]  # a window in the middle of the map


# --- dropout


def test_philox_is_random123s():
    """The known answer for a counter and a key of zeros; and that of Triton, at offsets of 64 bits."""
    assert philox(0, torch.tensor([0])).tolist() == [0x6627E8D5]
    offset = torch.tensor([0, 1, 2**31, 2**32 + 5, 2**40])
    words = philox(2**33 + 7, offset)
    assert len(set(words.tolist())) == 5
    assert (words >> 32 == 0).all()


def test_numbers_are_uniform():
    dice = uniform(3, torch.arange(40_000))
    assert dice.min() >= 0
    assert dice.max() < 1
    assert dice.mean() == pytest.approx(0.5, abs=0.01)
    assert dice.histc(10, 0, 1).tolist() == pytest.approx([4000] * 10, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "window"), [((8, 4), (4, 4)), ((9, 8), (9, 8))])
def test_dropout_drops_the_same_weights_as_pytorch(size, window, dtype):
    """Values and gradients, so the backward pass throws the dice of the forward pass."""
    check_shape(1, *size, window, (1, 2), 1, 16, cosine=True, dtype=dtype, dropout=0.3, seed=2**33 + 1)


def test_dropout_by_its_properties():
    qkv = torch.zeros(1, 5, 50, 192, device=DEVICE)  # 5 windows of 50 tokens; every weight is 1/50
    qkv[..., 128:178] = torch.eye(50, device=DEVICE).view(5, 10, 50).repeat(1, 5, 1)  # values: who am I
    bias = torch.zeros(1, 50, 50, device=DEVICE)

    def weights(seed):
        options = {"num_heads": 1, "dropout": 0.25, "seed": seed, "impl": "triton"}
        return window_attention(qkv, bias, (5, 10), **options)[..., :50]

    kept = weights(1) > 0
    assert kept.float().mean() == pytest.approx(0.75, abs=0.02)  # of 12,500
    torch.testing.assert_close(weights(1)[kept], torch.full_like(weights(1)[kept], 1 / 50 / 0.75))
    assert torch.equal(weights(1), weights(1))
    assert ((weights(2) > 0) != kept).float().mean() == pytest.approx(2 * 0.25 * 0.75, abs=0.03)
    assert weights(2).mean() == pytest.approx(1 / 50, rel=0.02)  # the expectation stays


# --- how it is called


def test_non_contiguous_input_and_gradients():
    """Channels first underneath, a bias seen through a transpose, a gradient with stride 0."""
    qkv = random(1, 96, 4, 8).detach().permute(0, 2, 3, 1).requires_grad_()
    bias = random(16, 16, 2, seed=1).detach().permute(2, 1, 0).requires_grad_()
    grads = []
    for impl in ("triton", "torch"):
        loss = attention((4, 4), (2, 2), 2)(qkv, bias, impl=impl).sum()
        grads.append(torch.autograd.grad(loss, (qkv, bias)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_half_activations_and_full_bias():
    """As under autocast: the gradient of the bias keeps the precision of the bias."""
    qkv, bias = inputs(1, 4, 4, (4, 4), 1, 16, dtype=torch.float16)
    out = attention((4, 4), (0, 0), 1)(qkv, bias, impl="triton")
    assert out.dtype == torch.float16
    out.float().square().sum().backward()
    assert (qkv.grad.dtype, bias.grad.dtype) == (torch.float16, torch.float32)


def test_every_gradient_is_written(monkeypatch):
    """Results lie in memory that nobody cleared: a number that no program writes would stay NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **o: empty_like(x, **o).fill_(float("nan")))
    for window in ((3, 5), (9, 8)):
        qkv, bias = inputs(1, window[0], 2 * window[1], window, 1, 24)
        attention(window, (1, 2), 1)(qkv, bias, impl="triton").sum().backward()
        assert qkv.grad.isfinite().all()
        assert bias.grad.isfinite().all()


@pytest.mark.parametrize("window", [(2, 2), (9, 8)])
def test_no_images(window):
    qkv, bias, factor = inputs(0, 18, 16, window, 1, 16, cosine=True)
    out = attention(window, (0, 0), 1)(qkv, bias, factor, impl="triton")
    assert out.shape == (0, 18, 16, 16)
    out.sum().backward()
    assert not bias.grad.any()
    assert not factor.grad.any()


@pytest.mark.parametrize("cosine", [False, True])
def test_compilers_see_through(cosine):
    tensors = inputs(1, 4, 6, (2, 3), 1, 16, cosine=cosine)
    op = attention((2, 3), (1, 1), 1)
    compiled = torch.compile(lambda *t: op(*t, impl="triton").sin(), fullgraph=True, backend="aot_eager")
    expected = op(*tensors, impl="torch").sin()
    torch.testing.assert_close(compiled(*tensors), expected)
    gradients = [torch.autograd.grad(y.sum(), tensors) for y in (compiled(*tensors), expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    factor = tensors[2] if cosine else None
    arguments = (tensors[0], tensors[1], factor, [2, 3], [1, 1], 1, 0.25, 0.0, 0)
    torch.library.opcheck(torch.ops.swin_lessons.window_attention.default, arguments)


def test_a_compiler_may_not_know_the_seed():
    """As in training with attention dropout, where each step throws its own."""
    qkv, bias = inputs(1, 2, 2, (2, 2), 1, 16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def dropped(qkv):
        seed = int(torch.randint(2**31, ()))
        return window_attention(qkv, bias, (2, 2), num_heads=1, dropout=0.5, seed=seed, impl="triton")

    assert dropped(qkv).shape == (1, 2, 2, 16)


def test_work_is_shared_evenly():
    assert [walkers(10, p) for p in (1, 3, 4, 9, 10, 99)] == [1, 3, 4, 5, 10, 10]
    assert walkers(0, 8) == 0
    assert walkers(7, 0) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(1, 4, 4, 47)}, "47 channels are not 3 x 2 heads"),
        ({"qkv": torch.zeros(4, 4, 48)}, r"it must be \(B, H, W, 3C\)"),
        ({"qkv": torch.zeros(1, 4, 4, 48).long()}, "floating point"),
        ({"window_size": (3, 2)}, "3 x 2 do not tile a map of 4 x 4: pad it"),
        ({"shift_size": (2, 0)}, r"shift_size=\(2, 0\).*less than the window"),
        ({"shift_size": (0, -1)}, r"shift_size=\(0, -1\)"),
        ({"bias": torch.zeros(4, 4)}, r"it must be \(2, 4, 4\)"),
        ({"scale": 1.0, "logit_factor": torch.ones(2)}, "give one of them"),
        ({"logit_factor": torch.ones(3)}, "3 numbers: it needs one for 2 heads"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": math.nan}, "dropout=nan: a share of weights"),
        ({"qkv": torch.zeros(1, 0, 4, 48)}, "at least one token"),
        ({"qkv": torch.zeros(1, 4, 4, 0)}, "at least one token"),
        ({"bias": torch.zeros(2, 4, 4, device="meta")}, "bias on meta: all must be on one device"),
        ({"bias": torch.zeros(2, 4, 4).int()}, "bias is torch.int32: floating point"),
        ({"logit_factor": torch.ones(2, device="meta")}, "logit_factor on meta"),
        ({"logit_factor": 10.0}, "logit_factor is 10.0: a tensor is needed"),
        ({"scale": torch.ones(())}, r"scale=tensor\(1.\): a number"),
        ({"window_size": 2}, "window_size=2: two numbers"),
        ({"window_size": (2, 2, 2)}, r"window_size=\(2, 2, 2\): two numbers"),
        ({"shift_size": (0.5, 0)}, r"shift_size=\(0.5, 0\): two numbers"),
        ({"num_heads": 2.0}, "num_heads=2.0: a whole number"),
        ({"seed": 1.5}, "seed=1.5: a whole number"),
        ({"seed": 2**63}, "seed=9223372036854775808: a number that 64 bits hold"),
        ({"impl": "cuda"}, "impl='cuda'.*auto, torch, triton"),
        ({"qkv": torch.zeros(1, 4, 4, 48).double(), "impl": "triton"}, "float64 is not among"),
        (
            {"qkv": torch.zeros(1, 4, 4, 480), "impl": "triton"},
            "head_dim 80 is more than 64; choose impl='torch'",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "qkv": torch.zeros(1, 4, 4, 48),
        "bias": torch.zeros(2, 4, 4),
        "window_size": (2, 2),
        "num_heads": 2,
    }
    with pytest.raises(ValueError, match=message):
        window_attention(**(arguments | change))


def test_wide_heads_fall_back():
    qkv, bias = torch.zeros(1, 2, 2, 240), torch.zeros(1, 4, 4)
    assert window_attention(qkv, bias, (2, 2), num_heads=1).shape == (1, 2, 2, 80)


# --- what it costs


def extent(t):
    """Bytes that a tensor takes in memory: an expanded axis takes none."""
    return math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size()


class Traffic(TorchDispatchMode):
    """Counts operations that write memory, and the bytes of all that they read and write; a roll once an axis."""

    launches = moved = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        read, written = (
            [t for t in tree_leaves(part) if isinstance(t, torch.Tensor)] for part in (args, out)
        )
        sources = {t.untyped_storage().data_ptr() for t in read}
        is_view = all(t.untyped_storage().data_ptr() in sources for t in written)
        ours = function in (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.ones_like.default)
        moved = sum(map(extent, (*read, *written)))
        if not is_view and not ours and moved > 200_000:  # making the mask is less
            passes = len(args[1]) if function is torch.ops.aten.roll.default else 1
            self.launches += passes
            self.moved += passes * moved
        return out


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(("side", "shifted"), [(28, False), (28, True), (7, False)])
def test_what_is_moved_before(side, shifted, cosine, backward):
    """The count is that of the operations which PyTorch runs for the model's module, linear layers aside.

    The map of 7 x 7 is a single window, which nobody has to cut.
    """
    kind = WindowAttentionV2 if cosine else WindowAttention
    attn = kind(96, 3, (7, 7), (3, 3) if shifted else (0, 0), attention="reference")
    attn.proj = torch.nn.Identity()
    attn.project_qkv = lambda x: x.repeat(1, 1, 3)
    bias = torch.zeros(3, 49, 49, requires_grad=True)
    attn.current_bias = lambda window: bias
    batch = 4 * 28 * 28 // side**2
    x = torch.randn(batch, side, side, 96, requires_grad=True)
    with Traffic() as forward:
        out = attn(x)
    with Traffic() as reverse:
        out.backward(torch.ones_like(out))
    tokens, found = 4 * 28 * 28, reverse if backward else forward
    repeat = 4 * tokens * 96 * 4  # stands in for the linear layer; its gradient is a sum of three
    options = {"shifted": shifted, "cosine": cosine, "backward": backward, "cuts": side > 7}
    cost = window_attention_cost(tokens, 96, 3, 49, 4, **options)
    assert found.moved - repeat == pytest.approx(cost.bytes_before, rel=0.03 if cosine else 1e-3)
    if not cosine:  # V2 has passes over one number a vector, too small to be told from the mask's
        assert found.launches - 1 == cost.launches_before


def test_what_is_moved_after():
    """Stage 1 of Swin-T, batch 32, fp16, shifted: read qkv, write out, and a little."""
    tokens, x = 32 * 56 * 56, 32 * 56 * 56 * 96 * 2
    cost = window_attention_cost(tokens, 96, 3, 49, 2, shifted=True)
    assert cost.bytes_after == 4 * x + 3 * 49 * 49 * 4 + 4 * tokens * 3
    assert (cost.launches_before, cost.launches_after) == (17, 1)
    assert cost.saving == pytest.approx(9.60, abs=0.01)
    wide = window_attention_cost(tokens, 96, 3, 256, 2, cosine=True)
    assert wide.saving > 15  # scores of 16 x 16 windows weigh five times as much


def test_compiled_for_tensor_cores():
    rows = compile_report("window_attention[w=7 d=32 shifted]", "sm_80", ["fp16"])
    assert [row["name"].split()[-1] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert (row["spill_bytes"], row["mma"], row["vector_bytes"]) == (0, "HMMA.16816.F32", 16)


def test_kernels_have_a_tile_each():
    """A kernel of `window_attention_blocks` that the table does not know could not be launched."""
    kernels = {name.removesuffix("_kernel") for name in vars(blocks) if name.endswith("_kernel")}
    assert all(set(tiles) == kernels for tiles in BLOCKS.values())
