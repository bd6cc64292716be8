"""Any image a Swin can take, and set_input_size: another size is the model one would have built for it."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swin_cases import assert_near, attentions, images, readable, swin
from torch import nn

from swin_lessons.models.config import pair
from swin_lessons.models.layers import PatchEmbed, PatchMerging

VERSIONS = pytest.mark.parametrize("version", [1, 2])
MODELS = {version: swin(version, depths=(2, 2, 1), num_heads=(2, 4, 4)).eval() for version in (1, 2)}


def windows(model: nn.Module) -> list[tuple]:
    return [(a.window_size, a.shift_size) for a in attentions(model)]


# --- any image ---


@VERSIONS
@settings(max_examples=15, deadline=None)
@given(B=st.integers(1, 3), H=st.integers(1, 70), W=st.integers(1, 70))
def test_any_size_works_the_same_on_both_paths(version, B, H, W):
    model, x = MODELS[version], images(B, 3, H, W)
    with torch.no_grad():
        out = model.forward_features(x)
        assert out.shape == (B, -(-H // 16), -(-W // 16), model.num_features)
        assert_near(out, readable(model).forward_features(x))


@VERSIONS
@pytest.mark.parametrize("size", [(4, 1024), (1024, 4), (1, 300), (33, 1)])
def test_extreme_shapes(version, size):
    model = MODELS[version]
    with torch.no_grad():
        assert_near(model(images(2, 3, *size)), readable(model)(images(2, 3, *size)))


@VERSIONS
def test_an_image_does_not_depend_on_its_batch(version):
    model, x = MODELS[version], images(5, 3, 36, 52)
    whole = model(x)
    for i in range(5):
        assert_near(model(x[i : i + 1]), whole[i : i + 1])


@VERSIONS
def test_padding_of_patches_equals_black_pixels(version):
    model, x = MODELS[version], images(1, 3, 30, 33)
    black = torch.zeros(1, 3, 32, 36, dtype=torch.float64)
    black[:, :, :30, :33] = x
    assert torch.equal(model(x), model(black))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 32, 32), r"\(B, 3, H, W\).*\(3, 32, 32\)"),
        (torch.zeros(1, 4, 32, 32), "takes 3 channels.*have 4.*in_chans=4"),
        (torch.zeros(1, 32, 32, 3), "takes 3 channels"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "uint8.*convert"),
        (torch.zeros(0, 3, 32, 32), "empty"),
        (torch.zeros(1, 3, 0, 32), "empty"),
    ],
)
def test_wrong_images_are_named(x, message):
    with pytest.raises(ValueError, match=message):
        MODELS[1](x)


def test_the_wrong_precision_is_refused_not_misread():
    for model, x in ((swin(1), images(1, 3, 32, 32).float()), (swin(1).float(), images(1, 3, 32, 32))):
        with pytest.raises(RuntimeError, match="dtype"):
            model(x)


@pytest.mark.parametrize(
    ("value", "expected"), [(7, (7, 7)), ([7, 9], (7, 9)), (np.int64(5), (5, 5)), ((3, 4), (3, 4))]
)
def test_sizes_are_one_number_or_two(value, expected):
    assert pair(value) == expected


@pytest.mark.parametrize("value", [7.0, "77", (1, 2, 3), (1.5, 2), None, ()])
def test_other_sizes_are_refused(value):
    with pytest.raises(ValueError, match="whole number"):
        pair(value)


# --- patch embedding and merging ---


def test_merging_concatenates_column_by_column():
    merge = PatchMerging(1)
    merge.norm, merge.reduction = nn.Identity(), nn.Identity()
    cell = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).view(1, 2, 2, 1)
    assert merge(cell).flatten().tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("size", "merged"), [((4, 5), (2, 3)), ((5, 4), (3, 2)), ((1, 1), (1, 1)), ((1, 6), (1, 3))]
)
@pytest.mark.parametrize("post_norm", [False, True])
def test_merging_pads_odd_sizes_below_and_right(size, merged, post_norm):
    merge = PatchMerging(8, post_norm).double()
    x = images(2, *size, 8)
    full = torch.zeros(2, 2 * merged[0], 2 * merged[1], 8, dtype=torch.float64)
    full[:, : size[0], : size[1]] = x
    assert merge(x).shape == (2, *merged, 16)
    assert torch.equal(merge(x), merge(full))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patch_embedding_is_its_convolution(dtype):
    embed = PatchEmbed(3, 2, 8).to(dtype)
    x = images(2, 2, 12, 15, dtype=dtype)
    expected = embed.norm(
        nn.functional.conv2d(x, embed.proj.weight, embed.proj.bias, stride=3).permute(0, 2, 3, 1)
    )
    assert_near(embed(x), expected, 1e-5 if dtype == torch.float32 else 1e-10)


# --- set_input_size ---


@pytest.mark.parametrize(("size", "window"), [(64, None), (64, 8), ((40, 72), (2, 5)), (16, None), (128, 16)])
def test_v2_at_another_size_is_the_model_built_for_it(size, window):
    model = swin(2, img_size=(32, 32)).eval()
    model.set_input_size(size, window)
    window = pair(window or 4)
    built = swin(2, img_size=pair(size), window_size=window).eval()
    built.load_state_dict(model.state_dict())
    assert windows(model) == windows(built)
    assert model.config == built.config
    x = images(2, 3, *pair(size))
    with torch.no_grad():
        assert_near(model(x), built(x))


@VERSIONS
@pytest.mark.parametrize("window", [None, 4])
def test_the_present_size_changes_nothing(version, window):
    model = swin(version, img_size=(32, 40)).eval()
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    config, layout = model.config, windows(model)
    out = model(images(1, 3, 32, 40))
    model.set_input_size((32, 40), window)
    assert model.config == config
    assert windows(model) == layout
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert torch.equal(model(images(1, 3, 32, 40)), out)


def test_v1_tables_are_resized_and_stay_what_they_were():
    model = swin(1, img_size=(64, 64), window_size=(4, 4)).eval()
    for attn in attentions(model):  # a smooth table: a plane, which a bicubic resize keeps a plane inside
        ramp = torch.linspace(-1, 1, 7, dtype=torch.float64)
        attn.relative_position_bias_table.data = (
            (ramp[:, None] + 2 * ramp).reshape(-1, 1).repeat(1, attn.num_heads)
        )
        attn.relative_position_bias_table.requires_grad_(False)
    model.set_input_size(128, 8)
    for attn in attentions(model):
        table = attn.relative_position_bias_table
        assert table.dtype == torch.float64
        assert not table.requires_grad
        maps = table.T.view(-1, 15, 15)
        assert maps[0, 7, 7].abs() < 1e-12  # no offset, no bias
        assert_near(maps, -maps.flip(1, 2))
        assert (maps[:, 4:11, 4:11].diff(dim=1) > 0).all()
    assert torch.isfinite(model(images(1, 3, 128, 128))).all()


def test_windows_shrink_with_the_map_and_grow_back():
    model = swin(2, img_size=(64, 64), window_size=(8, 8))
    start = windows(model)
    assert start == [((8, 8), (0, 0)), ((8, 8), (4, 4))] * 2
    model.set_input_size(32)
    assert windows(model) == [((8, 8), (0, 0)), ((8, 8), (4, 4)), ((4, 4), (0, 0)), ((4, 4), (2, 2))]
    model.set_input_size(64)
    assert windows(model) == start


@pytest.mark.parametrize("bad", [0, -32, 7.5, (32, 0)])
def test_a_bad_size_changes_nothing(bad):
    model = swin(1)
    before = model.config, windows(model)
    with pytest.raises(ValueError, match=r"size"):
        model.set_input_size(bad)
    assert (model.config, windows(model)) == before


@VERSIONS
def test_absolute_positions_follow_the_size(version):
    model = swin(version, absolute_pos_embed=True).eval()
    assert model.absolute_pos_embed.shape == (1, 64, 24)
    with torch.no_grad():
        native = model(images(1, 3, 32, 32))
        model.absolute_pos_embed.mul_(-1)
        assert not torch.allclose(model(images(1, 3, 32, 32)), native)
        on_the_fly = model(images(1, 3, 48, 64))
        model.set_input_size((48, 64), 4)
        assert model.absolute_pos_embed.shape == (1, 12 * 16, 24)
        assert_near(model(images(1, 3, 48, 64)), on_the_fly)
    assert "absolute_pos_embed" in model.no_weight_decay()
    assert model.absolute_pos_embed.requires_grad
