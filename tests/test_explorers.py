"""Explorers as HTML, and the attention that they show. What they do in a browser: tests/site/test_explorers.py."""

import json

import pytest
import torch

plt = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("PIL")
pytest.importorskip("IPython")

import numpy as np  # noqa: E402
from test_plots import Page  # noqa: E402

from swin_lessons.models import SwinConfig, SwinTransformer, create_model  # noqa: E402
from swin_lessons.models.attention import WindowAttention  # noqa: E402
from swin_lessons.models.attention_maps import attention_maps  # noqa: E402
from swin_lessons.plots import reach_explorer, scaling_explorer  # noqa: E402
from swin_lessons.plots.bias import bias_explorer, by_offset  # noqa: E402
from swin_lessons.plots.explorer import explorer, script  # noqa: E402
from swin_lessons.plots.explorers import attention_explorer, position_explorer, shift_explorer  # noqa: E402
from swin_lessons.plots.sliders import picture, png_of  # noqa: E402
from swin_lessons.training.scaling import Cluster  # noqa: E402

IMAGE = np.linspace(0, 1, 32 * 32 * 3).reshape(32, 32, 3)


def small(version: int = 1, **changes) -> SwinTransformer:
    """Two stages of two blocks with every parameter random: an 8 x 8 and a 4 x 4 map."""
    options = {
        "img_size": (32, 32),
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": (4, 4),
    }
    config = SwinConfig(version=version, pretrained_window_sizes=(0, 0), num_classes=5, **options | changes)
    torch.manual_seed(0)
    model = SwinTransformer(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model.double().eval()


@pytest.mark.parametrize("version", [1, 2])
def test_attention_maps_are_what_the_blocks_multiply_values_with(version):
    model, x = small(version), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    inside = []
    layers = [m for m in model.modules() if isinstance(m, WindowAttention)]
    handles = [m.register_forward_hook(lambda m, args, out: inside.append((m, args[0], out))) for m in layers]
    maps = attention_maps(model, x)
    for handle in handles:
        handle.remove()
    assert [m.size for m in maps] == [(8, 8), (8, 8), (4, 4), (4, 4)]
    assert [m.shift for m in maps] == [(0, 0), (2, 2), (0, 0), (0, 0)]
    for found, (attn, given, out) in zip(maps, inside, strict=True):
        B, H, W, C = given.shape
        v = attn.project_qkv(given).reshape(B, H * W, 3, attn.num_heads, -1)[:, :, 2].transpose(1, 2)
        expected = (found.weights @ v).transpose(1, 2).reshape(B, H, W, C)
        torch.testing.assert_close(attn.proj(expected), out, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.weights.sum(-1), torch.ones(B, attn.num_heads, H * W).double())


def test_attention_maps_leave_the_model_as_it_was():
    model, x = small(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = model(x)
    attention_maps(model, x)
    assert torch.equal(model(x), before)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_attention_maps_need_windows_that_tile():
    with pytest.raises(ValueError, match=r"\(4, 4\) do not tile a map of \(9, 8\)"):
        attention_maps(small(), torch.randn(1, 3, 36, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="no window attention"):
        attention_maps(create_model("deit_micro_fmnist"), torch.randn(1, 1, 32, 32))


def test_an_explorer_has_a_picture_words_and_its_data():
    html = shift_explorer(IMAGE, tokens=8, windows=(2, 4), shift=1, id="one").data
    page = Page(html)
    assert page.found["figure"][0]["id"] == "one"
    assert (page.found["img"][0]["src"] or "").startswith("data:image/png;base64,")
    assert (page.found["img"][0]["alt"] or "").startswith("An image cut into regular windows")
    assert "figcaption" in page.found
    data = json.loads(page.scripts[0])
    assert (data["tokens"], data["windows"], data["shift"]) == (8, [2, 4], 1)
    assert "http" not in html.replace("http://www.w3.org", "")


def test_an_explorer_refuses_what_a_page_cannot_have():
    with pytest.raises(ValueError, match=r"id='two words'.*letters, digits and hyphens"):
        position_explorer(id="two words")
    with pytest.raises(ValueError, match=r"windows=\(2, 3\) must divide the 8 tokens"):
        shift_explorer(IMAGE, windows=(2, 3))


def test_words_cannot_break_out_of_an_explorer():
    drawn = png_of(IMAGE)
    html = explorer(
        "position", {"windows": ["</script><b>"]}, id="x", picture=drawn, alt='"><b>', caption="<b>1 < 2"
    ).data
    page = Page(html)
    assert "b" not in page.found
    assert json.loads(page.scripts[0]) == {"windows": ["</script><b>"]}
    assert page.found["img"][0]["alt"] == '"><b>'


def test_scripts_are_small_and_have_no_comment_lines():
    for name in ("core", "shift", "position", "attention", "scaling"):
        text = script(name)
        assert 500 < len(text) < 12000
        assert "\n//" not in text
        assert "function" in text


def test_the_attention_explorer_keeps_every_weight_above_zero():
    model, x = small(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    maps = attention_maps(model, x)
    data = json.loads(Page(attention_explorer([IMAGE, IMAGE], ["a", "b"], maps).data).scripts[0])
    assert [b["heads"] for b in data["blocks"]] == [2, 2, 4, 4]
    import base64

    stored = np.frombuffer(base64.b64decode(data["images"][1]["weights"][1]), np.uint8).reshape(2, 64, 64)
    exact = maps[1].weights[1].numpy()
    assert ((stored > 0) == (exact > 0)).all()
    assert np.abs(stored / 255 - exact).max() <= 1 / 255


def test_a_picture_of_pixels_keeps_its_colours():
    import io

    from PIL import Image

    stripes = np.zeros((4, 6, 3))
    stripes[:, ::2] = (1.0, 0.0, 0.0)
    stored = np.asarray(Image.open(io.BytesIO(png_of(stripes))).convert("RGB"))
    assert np.array_equal(stored, (255 * stripes).astype(np.uint8))
    assert picture(plt.figure(figsize=(1, 1))).startswith(b"\x89PNG")


def test_a_bias_by_offset_gives_the_bias_back() -> None:
    attn = small(version=2).all_stages()[0].all_blocks()[0].attn
    bias = attn.relative_position_bias((4, 4)).detach()
    table = by_offset(bias, 4)
    assert table.shape == (2, 7, 7)
    for query, key in [((0, 0), (3, 3)), ((2, 1), (2, 1)), ((3, 0), (1, 2))]:
        (y, x), (i, j) = query, key
        assert torch.equal(table[:, y - i + 3, x - j + 3], bias[:, 4 * y + x, 4 * i + j])


def test_a_table_of_another_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 7, 7\) is not one of a window of 3"):
        bias_explorer({"log": [torch.zeros(2, 7, 7)]}, [3])


def test_a_bias_that_is_the_same_everywhere_can_be_drawn() -> None:
    page = bias_explorer({"log": [torch.full((1, 3, 3), 8.0)]}, [2]).data
    data = json.loads(page.split('<script type="application/json">')[1].split("</script>")[0])
    assert data["kinds"][0]["tables"] == [[[0.0] * 9]]
    assert data["kinds"][0]["ranges"] == [[0.0, 0.01]]


# --- receptive fields


@pytest.mark.parametrize(
    ("options", "row", "column"),
    [
        ({}, 0.0, 0.99),
        ({"img_size": (40, 72), "window_size": 3}, 0.5, 0.3),  # 10 x 18 tokens: windows do not tile
        ({"img_size": (64, 32), "depths": (3, 1, 2), "num_heads": (2, 2, 4)}, 0.7, 0.4),
        ({"img_size": (36, 60), "depths": (2, 2, 2), "num_heads": (2, 2, 2)}, 0.9, 0.9),  # 9 x 15: odd
    ],
)
def test_fields_are_where_gradients_are(options, row, column):
    model = create_model("swin_micro_fmnist", **options).double()
    layers = reach_explorer.layers_of(model)
    blocks = [block for stage in model.all_stages() for block in stage.all_blocks()]
    outputs: list[torch.Tensor] = []
    for block in blocks:
        block.register_forward_hook(lambda module, args, y: outputs.append(y[0]))
    H, W = model.config.img_size
    x = torch.randn(1, 1, H, W, dtype=torch.float64, requires_grad=True)
    model(x)
    for i, y in enumerate(outputs, 1):
        token = int(row * y.shape[0]), int(column * y.shape[1])
        assert layers[i - 1].size == tuple(y.shape[:2])
        score = y[token] @ torch.randn(y.shape[2], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(score, x, retain_graph=True)
        patches = gradient[0, 0].reshape(H // 4, 4, W // 4, 4).abs().sum((1, 3)) > 0
        seen = torch.zeros_like(patches)
        (top, bottom), (left, right) = (reach_explorer.fields(layers[:i], a, token[a])[-1] for a in (0, 1))
        seen[top : bottom + 1, left : right + 1] = True
        assert torch.equal(patches, seen), f"block {i}"


def test_a_field_grows_from_block_to_block():
    layers = reach_explorer.layers_of(create_model("swin_micro_fmnist", img_size=64))
    assert reach_explorer.fields(layers, 0, 3) == [(4, 11), (0, 15), (0, 15), (0, 15)]  # from 8 x 8 tokens
    assert reach_explorer.fields(layers[:2], 0, 3) == [(2, 5), (0, 7)]
    assert reach_explorer.fields(layers[:1], 1, 3) == [(0, 3)]


# --- the scaling calculator


def test_the_models_of_the_calculator_are_the_published_ones():
    names = [f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base", "large")]
    with torch.device("meta"):
        models = [create_model(name) for name in (*names, "swinv2_giant_window12_192")]
    assert list(scaling_explorer.MODELS.values()) == [sum(p.numel() for p in m.parameters()) for m in models]


def test_a_ring_is_as_fast_as_its_slowest_part():
    links = scaling_explorer.Links(within=300.0, between=200.0)
    assert scaling_explorer.cluster_of(8, 1, links) == Cluster(8, 300.0)
    assert scaling_explorer.cluster_of(8, 2, links) == Cluster(16, 200.0)
    assert scaling_explorer.cluster_of(4, 2, scaling_explorer.Links(9.0, 200.0)) == Cluster(8, 9.0)


def test_the_calculator_has_a_printed_form():
    page = Page(scaling_explorer.scaling_explorer().data)
    assert (page.found["img"][0]["src"] or "").startswith("data:image/png;base64,")
    assert len(json.loads(page.scripts[0])["links"]) == len(scaling_explorer.LINKS)
