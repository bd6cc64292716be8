"""The inference form against the model that it was made from."""

import copy

import pytest
import torch
from swin_cases import assert_near, images, swin
from torch import nn

from swin_lessons.deploy import prepare, products
from swin_lessons.deploy.prepared import to_cosines
from swin_lessons.models import create_model
from swin_lessons.models.fast import unit_vectors
from swin_lessons.profiling.peers import SwinSpec, build, reference_model
from swin_lessons.quantization import QuantConfig, convert, ptq

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


def integers(version, config=None, **changes):
    model = swin(version, dtype=torch.float32, **changes).eval()
    batch = images(8, 3, 32, 32, dtype=torch.float32)
    return convert(ptq(model, [batch], config, progress=False)), batch


@pytest.mark.parametrize("case", ["plain", "no biases", "deep", "no classifier"])
@pytest.mark.parametrize("version", [1, 2])
def test_int8(int8_way, version, case):
    model, batch = integers(version, **CASES[case])
    prepared = prepare(model)
    assert prepared.precision == "int8"
    for x in (batch, images(2, 3, 29, 43, dtype=torch.float32)):
        with torch.no_grad():
            # sums are exact in both; numbers between two codes may round to either, and later layers see it
            assert_near(prepared(x), model(x), 0.03)


@pytest.fixture(params=["packed", "plain"])
def int8_way(request, monkeypatch):
    """oneDNN's integers where this machine has them, and the fallback that others get."""
    if request.param == "plain":
        monkeypatch.setattr(products, "has_int8_products", lambda: False)


MIXED = {
    "some layers in float": QuantConfig(skip=("layers.0.blocks.0.mlp.fc2", "layers.1.*.qkv")),
    "weights alone": QuantConfig.preset("w8a16"),
    "4-bit weights alone": QuantConfig.preset("w4a16", group_size=8),
    "one scale a weight": QuantConfig(weight_granularity="tensor", symmetric_activations=True),
}


@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("version", [1, 2])
def test_partly_int8(version, config):
    model, x = integers(version, config)
    with torch.no_grad():
        assert_near(prepare(model)(x), model(x), 0.03)


SLOW = {
    "mode2": (QuantConfig.preset("mode2"), "quantised"),
    "output": (QuantConfig(quantize={"linear", "output"}), "qkv has a quantised output"),
    "norms": (QuantConfig(quantize={"linear", "layer_norm"}), r"patch_embed.norm \(LayerNorm\) is quantised"),
    "residual": (QuantConfig(quantize={"linear", "residual"}), "blocks.0"),
    "dynamic": (QuantConfig.preset("dynamic"), "finds its scale at run time"),
    "4 bits": (QuantConfig.preset("w4a8", group_size=8), "needs symmetric weights of 8 bits"),
    "affine weights": (QuantConfig(symmetric_weights=False), "needs symmetric weights of 8 bits"),
}


@pytest.mark.parametrize(("config", "message"), SLOW.values(), ids=SLOW)
def test_integers_without_a_fast_form(config, message):
    model, _ = integers(1, config)
    with pytest.raises((ValueError, TypeError), match=message):
        prepare(model)


def test_a_model_that_is_not_converted_yet():
    model = swin(dtype=torch.float32).eval()
    fake = ptq(model, [images(2, 3, 32, 32, dtype=torch.float32)], progress=False)
    with pytest.raises(ValueError, match=r"call quantization\.convert\(model\) first"):
        prepare(fake)
    with pytest.raises(ValueError, match="this model is quantised; leave precision out"):
        prepare(convert(fake), "bf16")
    with pytest.raises(ValueError, match="'int8' needs a converted model"):
        prepare(model, "int8")


def test_cosines():
    qkv = images(6, 3 * 8, dtype=torch.float32)
    qkv[0] = 0.0  # as padding makes it
    scale = torch.tensor([[[2.0], [3.0]], [[1.0], [1.0]]])
    q, k, v = qkv.view(6, 3, 2, 4).unbind(1)
    expected = torch.stack([unit_vectors(q) * scale[0], unit_vectors(k), v], 1).view(6, -1)
    to_cosines(qkv, scale)
    torch.testing.assert_close(qkv, expected)


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
