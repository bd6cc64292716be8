"""Equal to timm, torchvision and transformers with every parameter random, wherever these agree on what a Swin is."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swin_cases import TINY, assert_near, exact_coordinates, images, readable, scramble, swin
from torch import nn

from swin_lessons.models import create_model, load_weights
from swin_lessons.models.swin import SwinTransformer

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def assert_equal(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    """1e-10 in fp64 on both paths, 1e-5 in fp32, relative to the largest logit."""
    ours, theirs = ours.eval(), theirs.eval()
    with torch.no_grad():
        expected = logits(theirs, x)
        assert_near(ours(x), expected)
        assert_near(readable(ours)(x), expected)
        assert_near(copy.deepcopy(ours).float()(x.float()).double(), expected, 1e-5)


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return getattr(out, "logits", out)


# --- timm: same parameter names ---


def timm_like(model: SwinTransformer) -> nn.Module:
    from timm.models import swin_transformer, swin_transformer_v2

    c = model.config
    kinds = swin_transformer.SwinTransformer, swin_transformer_v2.SwinTransformerV2
    more = {"pretrained_window_sizes": c.pretrained_window_sizes} if c.version == 2 else {}
    theirs = kinds[c.version - 1](
        img_size=c.img_size,
        patch_size=c.patch_size,
        in_chans=c.in_chans,
        num_classes=c.num_classes,
        embed_dim=c.embed_dim,
        depths=c.depths,
        num_heads=c.num_heads,
        window_size=c.window_size,
        qkv_bias=c.qkv_bias,
        **more,
    ).double()
    theirs.load_state_dict(model.state_dict())
    return exact_coordinates(theirs)


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_tiny_window16_256"]
)
def test_the_published_tiny_models_equal_timm(name):
    pytest.importorskip("timm")
    ours = scramble(create_model(name)).double()
    assert_equal(ours, timm_like(ours), images(1, 3, *ours.config.img_size))


FOUR = {"depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 16), "embed_dim": 32}


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (1, {"img_size": (224, 224), "window_size": (7, 7)}),
        (1, {"img_size": (64, 64), "window_size": (8, 8)}),  # windows 8, 8, 4 and 2
        (1, {"img_size": (64, 64), "window_size": (4, 4)}),
        (1, {"img_size": (128, 256), "window_size": (4, 8)}),  # windows wider than high
        (2, {"img_size": (64, 64), "window_size": (8, 8)}),
        (2, {"img_size": (64, 64), "window_size": (16, 16)}),
        (2, {"img_size": (32, 32), "window_size": (8, 8)}),  # the last stage is one token
        (2, {"img_size": (64, 128), "window_size": (8, 8)}),
        (2, {"img_size": (64, 64), "window_size": (8, 8), "qkv_bias": False}),
        (2, {"img_size": (64, 64), "window_size": (8, 8), "pretrained_window_sizes": (6, 6, 3, 1)}),
    ],
)
def test_clamped_and_oblong_windows_equal_timm(version, changes):
    pytest.importorskip("timm")
    ours = swin(version, **FOUR | changes)
    assert_equal(ours, timm_like(ours), images(2, 3, *ours.config.img_size))


@VERSIONS
def test_gradients_equal_those_of_timm(version):
    pytest.importorskip("timm")
    ours = swin(version, embed_dim=32)
    theirs = timm_like(ours)
    x = images(2, 3, 32, 32)
    for model in (ours, theirs):
        model.train()
        for part in model.modules():
            if type(part).__name__ == "DropPath":
                part.eval()
        model(x).square().sum().backward()
    expected = dict(theirs.named_parameters())
    assert set(expected) == {name for name, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        assert_near(p.grad, expected[name].grad)


# --- torchvision: pads, then rolls; windows never shrink ---


def torchvision_small(version: int) -> nn.Module:
    tv = pytest.importorskip("torchvision.models.swin_transformer")
    parts = (
        {"block": tv.SwinTransformerBlock, "downsample_layer": tv.PatchMerging},
        {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2},
    )[version - 1]
    model = tv.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=TINY.embed_dim,
        depths=list(TINY.depths),
        num_heads=list(TINY.num_heads),
        window_size=[4, 4],
        num_classes=TINY.num_classes,
        **parts,
    )
    return exact_coordinates(scramble(model).double())


@pytest.fixture(scope="module", params=[1, 2])
def pair_with_torchvision(request):
    theirs = torchvision_small(request.param)
    ours = swin(request.param, img_size=(64, 64))
    load_weights(ours, theirs.state_dict())
    return ours, theirs


@settings(max_examples=12, deadline=None)
@given(H=st.integers(7, 20), W=st.integers(7, 20))
def test_any_size_equals_torchvision(pair_with_torchvision, H, W):
    """Maps H x W, then half of that, rounded up: with windows of 4 no stage is smaller than its window."""
    assert_equal(*pair_with_torchvision, images(2, 3, 4 * H, 4 * W))


# --- transformers ---


@VERSIONS
@pytest.mark.parametrize("size", [(64, 64), (64, 96), (72, 100)])
def test_common_ground_with_transformers(version, size):
    transformers = pytest.importorskip("transformers")
    name = ("Swin", "Swinv2")[version - 1]
    config = getattr(transformers, f"{name}Config")(
        image_size=64,
        patch_size=4,
        embed_dim=TINY.embed_dim,
        depths=list(TINY.depths),
        num_heads=list(TINY.num_heads),
        window_size=4,
        num_labels=TINY.num_classes,
    )
    theirs = getattr(transformers, f"{name}ForImageClassification")(config)
    theirs = exact_coordinates(scramble(theirs).double())
    ours = swin(version, img_size=(64, 64))
    load_weights(ours, theirs.state_dict())
    assert_equal(ours, theirs, images(2, 3, *size))
