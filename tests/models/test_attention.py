"""Window attention does what it says: global attention seen through windows, nothing across the seam."""

import math

import pytest
import torch
from swin_cases import assert_near, images, readable, scramble, swin

from swin_lessons.models import attention as attention_module
from swin_lessons.models import fast
from swin_lessons.models.attention import WindowAttention, WindowAttentionV2
from swin_lessons.models.layout import RowOrder
from swin_lessons.models.rows import attention_rows, kind_bias
from swin_lessons.models.swin import SwinStage

KINDS = {1: WindowAttention, 2: WindowAttentionV2}
VERSIONS = pytest.mark.parametrize("version", [1, 2])


def make(version: int, window=(4, 4), shift=(0, 0), dim=24, heads=2, **more):
    return scramble(KINDS[version](dim, heads, window, shift, **more)).double().eval()


def global_attention(attn: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """Every token looks at every other; a mask and offsets between positions make windows of it."""
    B, H, W, C = x.shape
    (h, w), (dy, dx) = attn.window_size, attn.shift_size
    y, x_ = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    y, x_ = y.reshape(-1), x_.reshape(-1)
    # a shifted window starts at dy - h, dy, dy + h, ...: two tokens share it without crossing the map's edge
    cell = torch.stack([(y - dy).div(h, rounding_mode="floor"), (x_ - dx).div(w, rounding_mode="floor")])
    allowed = (cell[:, :, None] == cell[:, None, :]).all(0)
    q, k, v = (
        attn.project_qkv(x.reshape(B, H * W, C)).view(B, H * W, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    )
    if isinstance(attn, WindowAttentionV2):
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        scale = attn.logit_scale.clamp(max=math.log(100)).exp()
    else:
        scale = (C // attn.num_heads) ** -0.5
    table = attn.relative_position_bias((h, w)).view(attn.num_heads, h, w, h, w)
    corner = torch.zeros(attn.num_heads, 2 * h - 1, 2 * w - 1, dtype=x.dtype)  # bias by offset
    for a in range(h):
        for b in range(w):
            corner[:, a : a + h, b : b + w] = table[:, a, b].flip(1, 2)
    oy = (y[:, None] - y[None, :]).clamp(1 - h, h - 1) + h - 1
    ox = (x_[:, None] - x_[None, :]).clamp(1 - w, w - 1) + w - 1
    scores = q @ k.transpose(-2, -1) * scale + corner[:, oy, ox]
    probs = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return attn.proj((probs @ v).transpose(1, 2).reshape(B, H, W, C))


@VERSIONS
@pytest.mark.parametrize("core", ["reference", "sdpa"])
@pytest.mark.parametrize(
    ("window", "shift"), [((4, 4), (0, 0)), ((4, 4), (2, 2)), ((2, 4), (1, 3)), ((3, 2), (0, 1))]
)
def test_windows_are_masked_global_attention(version, core, window, shift):
    attn = make(version, window, shift, attention=core)
    x = images(2, 12, 8, 24)
    assert_near(attn(x), global_attention(attn, x))


@VERSIONS
def test_bias_depends_on_the_offset_alone(version):
    bias = make(version, (3, 5)).relative_position_bias((3, 5)).view(2, 3, 5, 3, 5)
    assert torch.equal(bias[:, 1, 1, 0, 3], bias[:, 2, 1, 1, 3])
    assert torch.equal(bias[:, 0, 0, 0, 1], bias[:, 2, 3, 2, 4])
    assert not torch.equal(bias[:, 0, 0, 0, 1], bias[:, 0, 1, 0, 0])  # it knows the direction


# --- the seam ---


def stage(version: int, path: str) -> SwinStage:
    """Two blocks, the second one shifted, windows of 7."""
    model = swin(version, depths=(2,), num_heads=(2,), img_size=(56, 56), window_size=(7, 7)).eval()
    return (readable(model) if path == "readable" else model).layers[0]


def change_of(f, x: torch.Tensor, row: int) -> torch.Tensor:
    """How much each output row of `f` moves when row `row` of the map `x` does, `(H,)`."""
    y = x.clone()
    y[:, row] += images(x.shape[-1], seed=9)  # not the same in every channel: LayerNorm would undo that
    with torch.no_grad():
        return (f(y) - f(x)).abs().amax(dim=(0, 2, 3))


@VERSIONS
@pytest.mark.parametrize("path", ["readable", "rows"])
@pytest.mark.parametrize("height", [13, 14, 8, 20])
def test_the_last_rows_do_not_reach_the_first(version, path, height):
    moved = change_of(stage(version, path), images(1, height, 14, 24), height - 1)
    assert moved[height - 1] > 0
    assert (moved[:3] == 0).all()


@VERSIONS
def test_without_the_mask_they_would(version, monkeypatch):
    everyone = attention_module.shift_mask
    monkeypatch.setattr(attention_module, "shift_mask", lambda *args: everyone(*args) | True)
    moved = change_of(stage(version, "readable"), images(1, 13, 14, 24), 12)
    assert moved[0] > 1e-6


@VERSIONS
@pytest.mark.parametrize("path", ["readable", "rows"])
def test_a_map_one_window_high_still_shifts_sideways(version, path):
    x = images(1, 7, 14, 24).transpose(1, 2)  # the long axis is rows here: turn the map
    turned = stage(version, path)
    moved = change_of(lambda m: turned(m.transpose(1, 2)).transpose(1, 2), x, 7)
    assert (moved[3:] > 0).all()  # also 3 to 6, on the other side of the unshifted border
    assert (moved[:3] == 0).all()


def opposed(scale: float) -> WindowAttentionV2:
    """Keys are the opposite of queries: tokens of one side repel each other, tokens across the seam attract."""
    attn = WindowAttentionV2(8, 1, (4, 4), (2, 2), qkv_bias=False).double().eval()
    with torch.no_grad():
        attn.logit_scale.fill_(math.log(scale))
        for p in attn.cpb_mlp.parameters():
            p.zero_()
        q, k, v = attn.qkv.weight.view(3, 8, 8).zero_()
        q[:4, :4], k[:4, :4], v[4:, 4:] = torch.eye(4), -torch.eye(4), torch.eye(4)
        attn.proj.weight.copy_(torch.eye(8))
        attn.proj.bias.zero_()
    attn.fold()
    return attn


def leak(attn: WindowAttentionV2, forward) -> float:
    """What the last rows notice when only the values of row 0 change."""
    x = images(1, 8, 8, 8)
    x[..., :4] = torch.ones(4, dtype=torch.float64)
    x[:, 6:, :, :4] = -1.0  # the two sides of the seam
    y = x.clone()
    y[:, 0, :, 4:] += 1.0
    return (forward(attn, y) - forward(attn, x))[:, 6:].abs().max().item()


def by_rows(attn: WindowAttentionV2, x: torch.Tensor) -> torch.Tensor:
    order = RowOrder(x.shape[0], (x.shape[1], x.shape[2]), attn.window_size, x.device)
    rows = order.from_map(x, attn.shift_size)
    bias = kind_bias(attn.current_bias(attn.window_size), attn.window_size, attn.shift_size)
    return order.to_map(attention_rows(attn, rows, bias, order.layout()))


@pytest.mark.parametrize("scale", [10, 48, 60, 100])
@pytest.mark.parametrize("forward", [lambda attn, x: attn(x), by_rows], ids=["readable", "rows"])
def test_no_logit_is_large_enough_to_cross_the_seam(scale, forward):
    with torch.no_grad():
        assert leak(opposed(scale), forward) == 0.0


def test_a_mask_of_minus_100_would_be_crossed(monkeypatch):
    def additive(q, k, v, bias, mask, drop=0.0):
        scores = q @ k.transpose(-2, -1) + bias
        return (scores if mask is None else scores - 100.0 * ~mask[:, None]).softmax(-1) @ v

    monkeypatch.setattr(attention_module, "attend", additive)
    with torch.no_grad():
        assert leak(opposed(10), lambda attn, x: attn(x)) < 1e-12
        assert leak(opposed(60), lambda attn, x: attn(x)) > 0.1


@VERSIONS
def test_unshifted_windows_know_nothing_of_each_other(version):
    attn = make(version)
    x = images(1, 8, 12, 24)
    whole = attn(x)
    for i in (0, 4):
        for j in (0, 4, 8):
            assert_near(whole[:, i : i + 4, j : j + 4], attn(x[:, i : i + 4, j : j + 4]))


# --- numbers ---


@pytest.mark.parametrize("window", [(4, 4), (1, 1)])
@pytest.mark.parametrize("path", ["readable", "rows"])
def test_v2_on_a_single_token_has_no_nan(window, path):
    model = swin(2, img_size=(32, 32), window_size=window, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2)).eval()
    model = readable(model) if path == "readable" else model
    assert model.config.grids()[-1] == (1, 1)
    x = images(1, 3, 32, 32)
    model(x).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_v2_takes_a_token_of_zeros(dtype):
    attn = make(2).to(dtype)
    with torch.no_grad():
        attn.q_bias.zero_()
    x = images(1, 4, 4, 24, dtype=dtype)
    x[0, 1, 1] = 0
    assert torch.isfinite(attn(x)).all()


@pytest.mark.parametrize("path", ["readable", "rows"])
def test_padding_gives_finite_gradients_in_fp16(path):
    """Padded tokens are zero keys in V2; an epsilon of 1e-12 would make their gradients overflow."""
    model = swin(2, dtype=torch.float32)
    model = readable(model) if path == "readable" else model
    with torch.autocast("cpu", torch.float16):
        loss = model(images(2, 3, 40, 40, dtype=torch.float32)).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@VERSIONS
def test_one_bad_image_does_not_spoil_its_neighbours(version):
    model = swin(version).eval()
    x = images(3, 3, 36, 36)
    good = model(x)
    x[1] = torch.nan
    spoilt = model(x)
    assert spoilt[1].isnan().all()
    assert_near(spoilt[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("path", ["readable", "rows"])
def test_the_cosine_scale_stops_at_100(path):
    model = swin(2)
    model = readable(model) if path == "readable" else model
    scale = model.layers[0].blocks[0].attn.logit_scale
    x = images(1, 3, 32, 32)
    outs = []
    for value in (math.log(100) - 1e-13, 6.0, -3.0):
        scale.data.fill_(value)
        scale.grad = None
        outs.append(model(x))
        outs[-1].square().sum().backward()
        assert (scale.grad.abs() > 0).all() == (value < 6)
    assert_near(outs[1], outs[0])
    assert not torch.allclose(outs[2], outs[0])  # no limit below


@VERSIONS
def test_unit_vectors_have_length_one_or_zero(version):
    x = images(5, 3, 6)
    x[2] = 0
    ours = fast.unit_vectors(x) if version == 1 else fast._unit(x)[0]
    assert_near(ours, torch.nn.functional.normalize(x, dim=-1))


# --- sequential attention ---


@VERSIONS
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_windows_in_chunks_give_the_same_numbers_and_gradients(version, chunk):
    whole, parts = (readable(swin(version, window_chunk=c)) for c in (0, chunk))
    x = images(2, 3, 36, 44)
    assert_near(parts(x), whole(x))
    for model in (whole, parts):
        model(x).square().sum().backward()
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        assert_near(a.grad, b.grad)


def test_a_chunk_never_holds_more_windows_than_asked(monkeypatch):
    seen = []
    core = attention_module.attend
    monkeypatch.setattr(attention_module, "attend", lambda q, *args: seen.append(len(q)) or core(q, *args))
    with torch.no_grad():
        make(1, window_chunk=4, attention="reference")(images(1, 12, 12, 24))
    assert seen == [4, 4, 1]


def test_attention_dropout_is_off_in_evaluation():
    attn = make(1, attn_drop=0.5, attention="sdpa")
    x = images(1, 8, 8, 24)
    assert torch.equal(attn(x), attn(x))
    attn.train()
    assert not torch.equal(attn(x), attn(x))
