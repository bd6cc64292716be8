"""The inference form against the model that it was made from."""

import copy

import pytest
import torch
from swin_cases import assert_near, images, swin
from torch import nn

from swin_lessons.deploy import prepare, products
from swin_lessons.models import create_model
from swin_lessons.profiling.peers import SwinSpec, build, reference_model

CASES = {
    "plain": {},
    "window 3 x 5": {"window_size": (3, 5)},
    "no biases": {"qkv_bias": False, "patch_norm": False},
    "absolute positions": {"absolute_pos_embed": True},
    "no classifier": {"num_classes": 0},
    "deep": {"depths": (3, 4), "extra_norm_every": 2},
    "narrow MLP": {"mlp_ratio": 1.5, "drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2},
}


@pytest.fixture(params=["packed", "plain"])
def way(request, monkeypatch):
    """oneDNN where this machine has it, and the fallback that others get."""
    if request.param == "plain":
        monkeypatch.setattr(products, "has_packed_products", lambda: False)
    else:
        monkeypatch.setattr(products, "PACK_FROM", 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", [1, 2])
def test_equal_at_any_size(way, version, case):
    model = swin(version, dtype=torch.float32, **CASES[case]).eval()
    prepared = prepare(model)
    exact = copy.deepcopy(model).double()
    for H, W in ((32, 32), (32, 48), (29, 43), (17, 90), (5, 3)):
        x = images(3, 3, H, W)
        with torch.no_grad():
            assert_near(prepared(x.float()).double(), exact(x), 1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_pyramids(version):
    model = swin(version, dtype=torch.float32, features_only=True).eval()
    x = images(2, 3, 29, 43, dtype=torch.float32)
    with torch.no_grad():
        for found, expected in zip(prepare(model)(x), model(x), strict=True):
            assert_near(found, expected, 1e-5)


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
@pytest.mark.parametrize("version", [1, 2])
def test_models_of_other_libraries(version, library):
    spec = SwinSpec(
        "small", version, img_size=32, window_size=4, embed_dim=24, depths=(2, 2), heads=2, num_classes=5
    )
    theirs = build(library, spec, reference_model(spec).state_dict()).eval()
    x = images(2, 3, 32, 32, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(x)
        assert_near(prepare(theirs)(x), getattr(logits, "logits", logits), 1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_bf16(version):
    model = swin(version, dtype=torch.float32).eval()
    x = images(4, 3, 29, 43, dtype=torch.float32)
    prepared = prepare(model, "bf16")
    with torch.no_grad():
        found = prepared(x)
        assert found.dtype == torch.float32
        assert_near(found, model(x), 0.05)
        assert (found - model(x)).abs().max() > 1e-6  # it did compute in bf16


def test_micro_batches_are_invisible(monkeypatch):
    model = swin(dtype=torch.float32).eval()
    prepared, x = prepare(model), images(5, 3, 32, 32, dtype=torch.float32)
    whole = prepared(x)
    monkeypatch.setattr("swin_lessons.deploy.prepared.MICRO_BATCH_BYTES", 1)
    assert prepared.micro_batch_size(x) == 1
    assert_near(prepared(x), whole, 1e-6)


def test_the_model_stays_as_it_is():
    model = swin(dtype=torch.float32).train()
    before = copy.deepcopy(model.state_dict())
    prepared = prepare(model)
    x = images(1, 3, 32, 32, dtype=torch.float32)
    logits = prepared(x)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model(x).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(prepared(x), logits)
    assert not logits.requires_grad
    assert not list(prepared.parameters())


def test_under_inference_mode_and_back():
    model = swin(dtype=torch.float32).eval()
    x = images(1, 3, 32, 32, dtype=torch.float32)
    with torch.inference_mode():
        prepared = prepare(model)
        first = prepared(x)
    assert torch.equal(prepared(x), first)


def test_tables_are_bounded():
    prepared = prepare(swin(dtype=torch.float32).eval())
    for side in range(4, 80, 4):
        prepared(images(1, 3, side, 8, dtype=torch.float32))
    assert all(len(b.attn.tables) <= 8 for stage in prepared.stages for b in stage.blocks)


def test_refusals():
    model = swin(dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="precision='fp8': choose 'fp32' or 'bf16'"):
        prepare(model, "fp8")
    with pytest.raises(ValueError, match=r"on meta: prepare works on the CPU"):
        prepare(copy.deepcopy(model).to("meta"))
    with pytest.raises(TypeError, match="Linear is not a Swin Transformer"):
        prepare(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="VisionTransformer is not a Swin Transformer"):
        prepare(create_model("deit_micro_fmnist"))
    prepared = prepare(model)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        prepared.train()
    with pytest.raises(ValueError, match="takes 3 channels"):
        prepared(images(1, 1, 32, 32, dtype=torch.float32))

    class Adapted(nn.Linear):
        """A layer that does more than its weights say."""

    model.layers[1].blocks[0].mlp.fc1 = Adapted(48, 192)
    with pytest.raises(TypeError, match=r"layers\.1\.blocks\.0\.mlp\.fc1 is a Adapted"):
        prepare(model)
