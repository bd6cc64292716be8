"""A Swin of another library, adopted."""

import pytest
import torch
from swin_cases import assert_near, images, swin
from torch import nn

from swin_lessons.models.adopt import adopt
from swin_lessons.profiling.peers import SwinSpec, build, reference_model

SMALL = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "heads": 2, "num_classes": 5}


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_same_numbers(version, library, in_chans):
    spec = SwinSpec("small", version, **SMALL, in_chans=in_chans)
    weights = reference_model(spec).state_dict()
    theirs = build(library, spec, weights).eval()
    ours = adopt(theirs)
    assert not ours.training
    assert (ours.config.version, ours.config.depths, ours.config.num_heads) == (version, (2, 2), (2, 4))
    assert ours.config.window_size == (4, 4)
    x = images(2, in_chans, 32, 32, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(x)
        assert_near(ours(x), getattr(logits, "logits", logits), 1e-5)


def test_what_parameters_do_not_tell():
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("swinv2_base_window12to16_192to256", depths=(1, 1, 1, 1))
    config = adopt(theirs).config
    assert (config.img_size, config.window_size) == ((256, 256), (16, 16))
    assert config.pretrained_window_sizes == (12, 12, 12, 6)
    rectangular = timm.create_model(
        "swin_tiny_patch4_window7_224",
        depths=(1, 1, 1, 1),
        img_size=(64, 96),
        window_size=(4, 6),
        num_classes=0,
    )
    config = adopt(rectangular).config
    assert (config.img_size, config.window_size, config.num_classes) == ((64, 96), (4, 6), 0)


def test_ours_is_ours_and_a_dtype_stays():
    model = swin()
    assert adopt(model) is model
    spec = SwinSpec("small", 1, **SMALL)
    assert next(adopt(reference_model(spec).double()).parameters()).dtype == torch.float64


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(), nn.Conv2d(3, 8, 4, 4)])
def test_no_swin(model):
    with pytest.raises(TypeError, match=f"{type(model).__name__} is not a Swin Transformer"):
        adopt(model)


def test_another_vision_transformer_is_refused():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(TypeError, match="VisionTransformer is not a Swin"):
        adopt(model)
