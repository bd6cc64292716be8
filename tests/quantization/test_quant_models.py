"""Whole models: which places are found, fake against converted, peers, and what calibration refuses."""

import copy
from dataclasses import replace

import pytest
import torch
from quant_cases import KINDS, batches, logits, model, numbers, quantised
from swin_cases import assert_near, scramble, swin
from torch import nn
from torch.nn import functional as F

from swin_lessons.models import create_model
from swin_lessons.models.attention import WindowAttention
from swin_lessons.models.attention_maps import attention_maps
from swin_lessons.quantization import (
    IntConv2d,
    IntLinear,
    QuantConfig,
    QuantLinear,
    convert,
    find_points,
    ptq,
    quantizers,
)

EVERYTHING = QuantConfig.preset("all")


def kinds_of(net: nn.Module, config: QuantConfig = EVERYTHING) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer, kind in find_points(net, config):
        found.setdefault(kind, []).append(layer)
    return found


# --- what is found


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_places_in_swin(kind):
    found = kinds_of(model(kind))
    assert {k: len(v) for k, v in found.items()} == {
        "conv": 1,
        "linear": 16,  # 4 blocks of qkv, proj, fc1, fc2; V2's position network is none of them
        "merging": 1,
        "head": 1,
        "output": 14,  # qkv, proj, fc1 of each block, the patch embedding, the head
        "narrow_output": 5,  # fc2 of each block, the merging
        "attention": 4,
        "softmax": 4,
        "layer_norm": 11,
        "gelu": 4,
        "residual": 4,
    }
    assert found["merging"] == ["layers.1.downsample.reduction"]
    assert found["head"] == ["head.fc"]


def test_places_in_deit():
    found = kinds_of(create_model("deit_tiny_distilled_patch16_224", depth=2))
    assert {k: len(v) for k, v in found.items()} == {
        "conv": 1, "linear": 8, "head": 2, "output": 9, "narrow_output": 2,
        "attention": 2, "softmax": 2, "layer_norm": 5, "gelu": 2, "residual": 2,
    }  # fmt: skip
    assert found["head"] == ["head", "head_dist"]


def test_skip_and_dequantize():
    config = QuantConfig(skip=("layers.1.*",), dequantize=frozenset({"head"}))
    layers = {layer for layer, _ in find_points(model("v1"), config)}
    assert layers
    assert not any(layer.startswith(("layers.1.", "head")) for layer in layers)


# --- fake, converted and float


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["linear", "mode1", "mode2", "all", "dynamic", "w8a16", "w4a8"])
def test_fake_and_converted_networks_are_equal(kind, preset):
    """pytorch#111192: fake and converted went apart. Here the whole network agrees bit for bit."""
    fake = quantised(kind, preset)
    integer = convert(fake)
    x = batches(1, seed=70)[0] * 1.5
    assert torch.equal(logits(fake, x), logits(integer, x))
    assert torch.equal(logits(integer, x[:1]), logits(fake, x[:1]))
    assert any(isinstance(m, IntLinear) for m in integer.modules())
    assert not any(isinstance(m, QuantLinear) for m in integer.modules())
    assert isinstance(fake, type(model(kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("preset", "error"), [("linear", 0.08), ("dynamic", 0.08), ("w8a16", 0.06), ("mode1", 0.1)]
)
def test_near_the_float_model(kind, preset, error):
    expected = logits(model(kind))
    found = logits(quantised(kind, preset))
    assert 1e-4 < ((found - expected).norm() / expected.norm()).item() < error


@pytest.mark.parametrize("kind", KINDS)
def test_without_rounding_it_is_the_float_model(kind):
    """The classes that stand in for attention and blocks change nothing but the rounding."""
    fake = quantised(kind, "all")
    for quantizer in quantizers(fake):
        quantizer.quantizing = False
    assert_near(logits(fake), logits(model(kind)), 1e-5)


def test_the_float_model_stays_as_fast_as_it_was():
    net = copy.deepcopy(model("v1"))
    before = [type(m) for m in net.modules()]
    ptq(net, batches(), EVERYTHING)
    assert [type(m) for m in net.modules()] == before
    assert not hasattr(net, "quantization")


def test_integer_weights_are_a_quarter():
    integer = convert(quantised("v1"))
    whole = sum(p.numel() for n, p in model("v1").named_parameters() if p.ndim > 1 and "table" not in n)
    assert sum(m.weight.numel() for m in integer.modules() if isinstance(m, (IntLinear, IntConv2d))) == whole
    assert not any(p.requires_grad for p in integer.parameters())


def test_v2_quantises_normalised_queries_and_keys():
    fake = quantised("v2", "mode1")
    attn = fake.layers[0].blocks[0].attn
    assert attn.core.query.scale.item() * 127 <= 1.0001
    assert attn.core.key.scale.item() * 127 <= 1.0001
    assert attn.core.probabilities.scale.item() == pytest.approx(1 / 127)
    maps = attention_maps(fake, batches(1)[0])
    assert_near(maps[0].weights.sum(-1), torch.ones(()).expand_as(maps[0].weights[..., 0]), 1e-5)


@pytest.mark.parametrize("changes", [{"kernels": "triton"}, {"attention": "triton"}, {"attention": "sdpa"}])
def test_a_model_with_kernels_is_quantised_without_them(changes):
    plain = swin(1, dtype=torch.float32, depths=(2,), num_heads=(2,)).eval()
    fused = swin(1, dtype=torch.float32, depths=(2,), num_heads=(2,), **changes).eval()
    config = QuantConfig.preset(
        "all", quantize=frozenset({"residual", "softmax"}), activation_observer="minmax"
    )
    with torch.no_grad():
        expected = ptq(plain, batches(), config)(batches(1)[0])
        assert_near(ptq(fused, batches(), config)(batches(1)[0]), expected, 2e-2)


def test_other_sizes_pads_and_small_maps():
    fake = quantised("v1", "mode1")
    x = numbers(2, 3, 36, 20, seed=4)
    assert torch.equal(logits(fake, x), logits(convert(fake), x))
    expected = logits(model("v1"), x)
    assert ((logits(fake, x) - expected).norm() / expected.norm()).item() < 0.1


def test_pyramids():
    pyramid = swin(2, dtype=torch.float32, features_only=True).eval()
    fake = ptq(pyramid, batches(), QuantConfig(activation_observer="minmax"))
    assert "head" not in {kind for _, kind in fake.quantization.points}
    for a, b in zip(logits(fake), logits(convert(fake)), strict=True):
        assert torch.equal(a, b)


def test_training_works_through_every_kind():
    fake = quantised("v2", "all").train()
    fake(batches(1)[0]).square().mean().backward()
    for name, p in fake.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name


# --- known faults


def test_one_outlier_channel_in_the_residual_stream():
    """TinyNeuralNetwork#204: a ViT with INT8 additions lost all. Norms hide the large channel from linear layers."""
    net = copy.deepcopy(model("vit"))
    with torch.no_grad():
        net.pos_embed[..., 5] += 100 * numbers(net.pos_embed.shape[1]).sign()
        for norm in (m for m in net.modules() if isinstance(m, nn.LayerNorm)):
            norm.weight.mul_(20)[5] = 0
    x, expected = batches(1, seed=50)[0], logits(net)
    config = QuantConfig(activation_observer="minmax", quantize=frozenset({"linear", "head"}))
    fine = logits(ptq(net, batches(), config), x)
    spoiled = logits(ptq(net, batches(), replace(config, quantize=config.quantize | {"residual"})), x)
    error, worse = ((y - expected).norm() / expected.norm() for y in (fine, spoiled))
    assert error < 0.15
    assert worse > 2 * error


def test_nan_in_calibration_is_refused_by_name():
    bad = batches()
    bad[1][0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"patch_embed\.proj\.input saw NaN in calibration"):
        ptq(model("v1"), bad)


def test_infinity_within_the_network_is_refused_by_name():
    net = copy.deepcopy(model("v1"))
    with torch.no_grad():
        net.layers[1].blocks[0].norm2.weight[3] = float("inf")
    with pytest.raises(ValueError, match=r"layers\.1\.blocks\.0\.mlp\.fc1\.input saw"):
        ptq(net, batches())
    net.layers[1].blocks[0].mlp.fc1.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.blocks\.0\.mlp\.fc1\.weight saw NaN"):
        ptq(net, batches())


def test_exactly_the_batches_given_are_used():
    """FasterTransformer's loop ran one batch more."""
    taken = []

    def stream():
        for i, batch in enumerate(batches(3)):
            taken.append(i)
            yield batch, torch.zeros(3)

    fake = ptq(model("v1"), stream())
    assert taken == [0, 1, 2]
    assert {q.observer.batches for q in quantizers(fake) if q.role == "input"} == {3}


def test_no_batch():
    with pytest.raises(ValueError, match="calibration got no batch"):
        ptq(model("v1"), [])
    assert ptq(model("v1"), [], QuantConfig.preset("dynamic"))
    assert ptq(model("v1"), [], QuantConfig.preset("w4a16"))
    with pytest.raises(TypeError, match="not str"):
        ptq(model("v1"), ["images"])


class Bypass(nn.Module):
    """Its second layer is never called: a function gets its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.blocks[0](x), self.blocks[1].weight, self.blocks[1].bias)


@pytest.mark.parametrize("preset", ["linear", "dynamic", "w8a16"])
def test_a_layer_that_is_never_called_is_refused(preset):
    with pytest.raises(ValueError, match=r"calibration never called blocks\.1: .*skip=\('blocks\.1',\)"):
        ptq(Bypass(), [numbers(2, 6)], QuantConfig.preset(preset))
    ptq(Bypass(), [numbers(2, 6)], QuantConfig.preset(preset, skip=("blocks.1",)))


def test_quantising_and_converting_twice():
    fake = quantised("v1")
    with pytest.raises(ValueError, match="is quantised already"):
        ptq(fake, batches())
    with pytest.raises(ValueError, match="is converted already"):
        convert(convert(fake))
    with pytest.raises(ValueError, match="is not quantised"):
        convert(model("v1"))


def test_a_shared_layer_is_quantised_once():
    shared = nn.Linear(5, 5)
    fake = ptq(nn.Sequential(shared, nn.GELU(), shared), [numbers(4, 5)])
    assert fake[0] is fake[2]
    assert len(fake.quantization.points) == 1
    integer = convert(fake)
    assert integer[0] is integer[2]
    assert torch.equal(integer(numbers(4, 5)), fake(numbers(4, 5)))


# --- peers


def random_weights(net: nn.Module) -> nn.Module:
    return scramble(net, 5).float().eval()


def timm_swin(version: int) -> nn.Module:
    timm = pytest.importorskip("timm")
    name = {1: "swin_tiny_patch4_window7_224", 2: "swinv2_tiny_window8_256"}[version]
    return timm.create_model(
        name, img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4), num_classes=7
    )


def torchvision_swin(version: int) -> nn.Module:
    models = pytest.importorskip("torchvision.models.swin_transformer")
    blocks = {1: models.SwinTransformerBlock, 2: models.SwinTransformerBlockV2}[version]
    merging = {1: models.PatchMerging, 2: models.PatchMergingV2}[version]
    return models.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=7, block=blocks, downsample_layer=merging
    )


def transformers_swin(version: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {1: transformers.SwinConfig, 2: transformers.Swinv2Config}[version]
    kind = {1: transformers.SwinForImageClassification, 2: transformers.Swinv2ForImageClassification}[version]
    sizes = {"image_size": 32, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return Logits(kind(config(**sizes, num_labels=7)))


class Logits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("build", [timm_swin, torchvision_swin, transformers_swin])
def test_other_libraries_swins(build, version):
    net = random_weights(build(version))
    config = QuantConfig(
        activation_observer="minmax",
        quantize=frozenset({"linear", "merging", "head", "conv", "layer_norm", "gelu"}),
    )
    found = kinds_of(net, config)
    split = 6 if build is transformers_swin else 4  # transformers has queries, keys and values apart
    counts = {k: len(v) for k, v in found.items()}
    assert counts == {"conv": 1, "linear": 4 * split, "merging": 1, "head": 1, "layer_norm": 11, "gelu": 4}
    fake = ptq(net, batches(), config)
    expected = logits(net)
    assert 1e-4 < ((logits(fake) - expected).norm() / expected.norm()).item() < 0.1
    assert torch.equal(logits(convert(fake)), logits(fake))


@pytest.mark.parametrize("version", [1, 2])
def test_torchvision_s_attention_becomes_ours(version):
    """It reads its weights without calling its layers, so nothing in it could be quantised otherwise."""
    net = random_weights(torchvision_swin(version))
    fake = ptq(net, batches(), QuantConfig.preset("all", activation_observer="minmax"))
    assert sum(isinstance(m, WindowAttention) for m in fake.modules()) == 4
    assert sum(kind == "attention" for _, kind in fake.quantization.points) == 4
    for quantizer in quantizers(fake):
        quantizer.quantizing = False
    assert_near(logits(fake), logits(net), 1e-5)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_timm_s_deit(name):
    timm = pytest.importorskip("timm")
    net = random_weights(timm.create_model(name, img_size=32, depth=2, num_classes=7))
    fake = ptq(net, batches(), QuantConfig(activation_observer="minmax"))
    assert {k: len(v) for k, v in kinds_of(net, QuantConfig()).items()}["linear"] == 8
    assert torch.equal(logits(convert(fake)), logits(fake))


def test_torchvision_s_vit_is_refused_by_name():
    models = pytest.importorskip("torchvision.models")
    net = models.VisionTransformer(32, 8, 1, 2, 24, 48, num_classes=7).eval()
    with pytest.raises(ValueError, match=r"calibration never called .*self_attention\.out_proj"):
        ptq(net, batches())
    assert ptq(net, batches(), QuantConfig(skip=("*.out_proj",)))


def test_export_sees_no_check():
    fake = quantised("vit", "all")
    exported = torch.export.export(fake, (batches(1)[0],), strict=False).module()
    assert_near(exported(batches(1)[0]), logits(fake, batches(1)[0]), 1e-6)


def test_shapes_on_the_meta_device():
    with torch.device("meta"):
        net = create_model("swin_tiny_patch4_window7_224")
        fake = ptq(net, [], QuantConfig.preset("dynamic"))
        assert fake(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
