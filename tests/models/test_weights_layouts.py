"""load_weights takes whole checkpoints of every layout, from the libraries that write them where they are installed."""

import pytest
import torch
from torch import nn
from weights_small import (
    images,
    official,
    randomise,
    swin,
    timm_swin,
    torchvision_swin,
    transformers_swin,
)

from swin_lessons.models.checkpoints.layouts import TRANSLATIONS, translate, unfold_to_blocks
from swin_lessons.models.swin import SwinTransformer
from swin_lessons.models.variants import SWIN_VARIANTS
from swin_lessons.models.vit import VisionTransformer, ViTConfig
from swin_lessons.models.weights import WeightsError, load_weights

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def assert_same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# --- whole models of other libraries ---


@VERSIONS
@pytest.mark.parametrize("source", ["auto", "timm"])
def test_timm(version, source):
    ours, theirs = swin(version), timm_swin(version)
    report = load_weights(ours, theirs.state_dict(), source=source)
    assert_same(ours(images()), theirs(images()))
    assert report.source == "timm"
    assert set(report.loaded) == set(ours.state_dict())
    left = [report.resized, report.skipped, report.missing, report.unexpected, report.notes]
    assert not any(left)


@VERSIONS
def test_torchvision(version):
    ours, theirs = swin(version), torchvision_swin(version)
    report = load_weights(ours, theirs.state_dict())
    assert_same(ours(images()), theirs(images()))
    assert report.source == "torchvision"
    assert set(report.loaded) == set(ours.state_dict())
    assert any("relative_position_index" in name for name, _ in report.skipped)


@VERSIONS
@pytest.mark.parametrize("stored", [False, True])
def test_transformers(version, stored, tmp_path):
    ours, theirs = swin(version), transformers_swin(version)
    checkpoint = theirs.state_dict()
    if stored:  # save_pretrained writes other names than those in memory
        theirs.save_pretrained(tmp_path)
        checkpoint = tmp_path
    report = load_weights(ours, checkpoint)
    assert_same(ours(images()), theirs(images()).logits)
    assert report.source == "transformers"
    assert set(report.loaded) == set(ours.state_dict())


def test_transformers_absolute_positions():
    ours, theirs = swin(absolute_pos_embed=True), transformers_swin(use_absolute_embeddings=True)
    load_weights(ours, theirs.state_dict())
    assert_same(ours(images()), theirs(images()).logits)


@VERSIONS
@pytest.mark.parametrize("kind", ["{}Model", "{}ForMaskedImageModeling"])
def test_transformers_without_classifier(version, kind):
    theirs = transformers_swin(version, kind, encoder_stride=8)
    ours = swin(version)
    head = ours.head.fc.weight.clone()
    report = load_weights(ours, theirs.state_dict())
    encoder = getattr(theirs, "swin", getattr(theirs, "swinv2", theirs))
    tokens = encoder(images()).last_hidden_state
    assert_same(ours.forward_features(images()).flatten(1, 2), tokens)
    assert_same(ours.head.fc.weight, head, atol=0)
    assert ("head.fc.weight", "no classifier in the checkpoint: the model keeps its own") in report.skipped


@VERSIONS
def test_transformers_backbone(version):
    theirs = transformers_swin(version, "{}Backbone", out_features=["stage1", "stage2"])
    ours = swin(version, features_only=True, out_norm=version == 1)  # V2's backbone has no output norms
    load_weights(ours, theirs.state_dict())
    x = images(size=64 if version == 1 else 32)  # V1's backbone shifts windows even where one covers the map
    for a, b in zip(ours(x), theirs(x).feature_maps, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("distilled", [False, True])
def test_timm_and_transformers_deit(distilled):
    import timm
    import transformers

    config = ViTConfig(
        img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7, distilled=distilled
    )
    ours = randomise(VisionTransformer(config))
    kinds = timm.models.vision_transformer.VisionTransformer, timm.models.deit.VisionTransformerDistilled
    theirs = kinds[distilled](img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7)
    randomise(theirs, seed=3)
    for source in ("auto", "official"):  # the authors' files carry the same names
        load_weights(ours, {"model": theirs.state_dict()}, source=source)
        assert_same(ours(images()), theirs(images()))
    if distilled:
        sizes = {
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        }
        settings = transformers.DeiTConfig(**sizes, intermediate_size=192, num_labels=7, layer_norm_eps=1e-6)
        other = randomise(transformers.DeiTForImageClassificationWithTeacher(settings), seed=4)
        report = load_weights(ours, other.state_dict())
        assert_same(ours(images()), other(images()).logits)
        assert report.source == "transformers"


@pytest.mark.parametrize("producer", ["timm", "torchvision", "transformers"])
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_published_sizes_name_for_name(producer, name):
    version = SWIN_VARIANTS[name].version
    with torch.device("meta"):
        ours, theirs = SwinTransformer(SWIN_VARIANTS[name]), published(producer, name, version)
    state, layout, _ = translate(theirs.state_dict())
    assert layout == producer
    expected = {k: v.shape for k, v in ours.state_dict().items()}
    assert {k: v.shape for k, v in state.items()} == expected


def published(producer: str, name: str, version: int) -> nn.Module:
    import timm
    import torchvision
    import transformers

    if producer == "timm":
        return timm.create_model(name)
    if producer == "torchvision":
        return torchvision.models.get_model(("swin_t", "swin_v2_t")[version - 1])
    kinds = (
        (transformers.SwinForImageClassification, transformers.SwinConfig),
        (transformers.Swinv2ForImageClassification, transformers.Swinv2Config),
    )
    model, config = kinds[version - 1]
    return model(config(num_labels=1000, window_size=(7, 8)[version - 1]))


# --- the authors' own layout and its relatives, built here by inverting it ---


@VERSIONS
@pytest.mark.parametrize("wrapper", ["model", "state_dict", "module", "model_ema", None])
def test_official(version, wrapper):
    theirs, ours = swin(version, seed=5), swin(version)
    state = official(theirs)
    report = load_weights(ours, {wrapper: state, "epoch": 299} if wrapper else state)
    assert_same(ours(images()), theirs(images()), atol=0)
    assert report.source == "official"
    assert "layers.0.blocks.1.attn_mask" in dict(report.skipped)
    assert not report.unexpected


@pytest.mark.parametrize("source", ["official", "timm_old", "simmim"])
def test_official_by_name(source):
    theirs, ours = swin(seed=5), swin()
    assert load_weights(ours, official(theirs), source=source).source == source
    assert_same(ours(images()), theirs(images()), atol=0)


def test_official_headless():
    theirs, ours = swin(seed=5), swin()
    state = {name: value for name, value in official(theirs).items() if not name.startswith("head")}
    report = load_weights(ours, state)
    assert report.source == "official"  # told by the place of merging, not by the head
    assert_same(ours.forward_features(images()), theirs.forward_features(images()), atol=0)


@VERSIONS
def test_simmim_encoder(version):
    theirs, ours = swin(version, seed=5), swin(version)
    state = {f"encoder.{n.replace('cpb_mlp', 'rpe_mlp')}": v for n, v in official(theirs).items()}
    state = {name: value for name, value in state.items() if "head" not in name}
    extra = {"encoder.mask_token": torch.zeros(1, 1, 24), "decoder.0.weight": torch.zeros(3072, 48, 1, 1)}
    report = load_weights(ours, {"model": state | extra})
    assert report.source == "simmim"
    assert_same(ours.forward_features(images()), theirs.forward_features(images()), atol=0)
    skipped = dict(report.skipped)
    assert "outside the backbone" in skipped["decoder.0.weight"]
    assert "pre-training" in skipped["mask_token"]


@VERSIONS
def test_openmmlab(version):
    theirs, ours = swin(version, seed=5), swin(version)
    report = load_weights(ours, {"state_dict": openmmlab(theirs)})
    assert report.source == "openmmlab"
    assert_same(ours(images()), theirs(images()), atol=0)


def openmmlab(model: SwinTransformer) -> dict[str, torch.Tensor]:
    """Our parameters as mmpretrain stores them: new names, merging in nn.Unfold's channel order."""
    words = {
        "patch_embed.proj.": "patch_embed.projection.",
        "layers.": "stages.",
        ".attn.": ".attn.w_msa.",
        ".mlp.fc1.": ".ffn.layers.0.0.",
        ".mlp.fc2.": ".ffn.layers.1.",
    }
    state = {}
    for name, value in official(model).items():
        if ".downsample." in name and value.shape[-1] in (4 * 24,):
            C = value.shape[-1] // 4
            blocks = value.reshape(-1, 4, C)[:, [0, 2, 1, 3]]  # (.., 2 * row + column, C)
            value = blocks.transpose(1, 2).reshape(value.shape)
        for ours, theirs in words.items():
            name = name.replace(ours, theirs)
        state[name.replace("head.", "head.fc.") if name.startswith("head.") else f"backbone.{name}"] = value
    return state


def test_unfold_order_on_a_tiny_map():
    # one 2 x 2 cell of two channels: nn.Unfold lists channel by channel, row-major inside the cell
    x = torch.arange(8.0).reshape(1, 2, 2, 2)  # (B, C, H, W)
    unfolded = nn.Unfold(2, stride=2)(x)[0, :, 0]  # (4C,)
    cells = x[0].permute(1, 2, 0)  # (H, W, C)
    columns_first = torch.cat([cells[0, 0], cells[1, 0], cells[0, 1], cells[1, 1]])
    assert torch.equal(unfold_to_blocks(unfolded), columns_first)


# --- prefixes, heads and dense backbones ---


@pytest.mark.parametrize(
    "prefix", ["module.", "backbone.", "model.", "encoder.", "_orig_mod.", "module.backbone."]
)
def test_prefixes(prefix):
    theirs, ours = swin(seed=5), swin()
    load_weights(ours, {prefix + name: value for name, value in theirs.state_dict().items()})
    assert_same(ours(images()), theirs(images()), atol=0)


def test_classifier_beside_the_backbone():
    theirs, ours = transformers_swin(), swin()
    load_weights(ours, {f"module.{name}": value for name, value in theirs.state_dict().items()})
    assert_same(ours(images()), theirs(images()).logits)


def test_a_wrapped_target():
    theirs, ours = swin(seed=5), swin()
    load_weights(nn.ModuleDict({"module": ours}), theirs.state_dict())
    assert_same(ours(images()), theirs(images()), atol=0)


def test_features_only_of_timm():
    import timm

    name = "swin_tiny_patch4_window7_224"
    sizes = {"img_size": 32, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
    theirs = timm.create_model(name, features_only=True, out_indices=(0, 1), **sizes)
    randomise(theirs, seed=3)
    ours = swin(features_only=True)
    load_weights(ours, theirs.state_dict())
    for a, b in zip(ours(images()), theirs(images()), strict=True):
        assert_same(a, b.permute(0, 3, 1, 2))


def test_classification_weights_into_a_dense_backbone():
    theirs, ours = swin(seed=5), swin(features_only=True, out_norm=True)
    norm = ours.out_norms["norm0"].weight.clone()
    report = load_weights(ours, official(theirs))
    skipped = dict(report.skipped)
    assert skipped["head.fc.weight"] == "the model has no classifier"
    assert skipped["norm.weight"] == "the model has no final norm"
    assert "keeps its own" in skipped["out_norms.norm0.weight"]
    assert_same(ours.out_norms["norm0"].weight, norm, atol=0)
    assert_same(ours.layers[1].blocks[0].attn.qkv.weight, theirs.layers[1].blocks[0].attn.qkv.weight, atol=0)


def test_dense_weights_into_a_dense_backbone_and_back():
    dense, again = swin(seed=5, features_only=True, out_norm=True), swin(features_only=True, out_norm=True)
    state = {f"backbone.{n.replace('out_norms.', '')}": v for n, v in official(dense).items()}
    state["decode_head.conv_seg.weight"] = torch.zeros(19, 48, 1, 1)
    load_weights(again, {"state_dict": state})
    for a, b in zip(again(images()), dense(images()), strict=True):
        assert_same(a, b, atol=0)
    classifier = swin()
    report = load_weights(classifier, {"state_dict": state})
    assert_same(classifier.norm.weight, dense.out_norms["norm1"].weight, atol=0)
    assert dict(report.skipped)["norm0.weight"] == "an output norm of a dense backbone"


def test_a_pyramid_leaves_later_stages_out():
    theirs, ours = swin(seed=5), swin(features_only=True, out_indices=(0,))
    report = load_weights(ours, theirs.state_dict())
    assert dict(report.skipped)["layers.1.blocks.0.norm1.weight"] == "beyond the last feature map"
    whole = swin(features_only=True)
    load_weights(whole, theirs.state_dict())
    assert_same(ours(images())[0], whole(images())[0], atol=0)


def test_deit_classification_weights_into_a_pyramid():
    config = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
    theirs = randomise(VisionTransformer(ViTConfig(**config)))
    ours = randomise(VisionTransformer(ViTConfig(**config, features_only=True, out_indices=(1,))), seed=2)
    report = load_weights(ours, theirs.state_dict())
    assert dict(report.skipped)["blocks.2.norm1.weight"] == "beyond the last feature map"
    tokens = theirs.blocks[1](theirs.blocks[0](theirs.embed(images())))
    assert_same(ours(images())[0].flatten(2).transpose(1, 2), tokens[:, 1:], atol=1e-12)


# --- what is refused ---


def test_refusal_lists_names_and_shapes_and_changes_nothing():
    ours = swin()
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    state = swin(seed=5).state_dict()
    state["layers.1.blocks.1.mlp.fc2.weight"] = torch.zeros(48, 191)
    state["layers.1.blocks.1.surprise"] = torch.zeros(1)
    del state["patch_embed.norm.bias"]
    with pytest.raises(WeightsError) as error:
        load_weights(ours, state)
    text = str(error.value)
    assert r"layers.1.blocks.1.mlp.fc2.weight: checkpoint (48, 191), model (48, 192)" in text
    assert "1 missing from the checkpoint:\n    patch_embed.norm.bias (24,)" in text
    assert "1 unexpected by the model:\n    layers.1.blocks.1.surprise" in text
    assert "strict=False" in text
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    report = load_weights(ours, state, strict=False)
    assert report.missing == ["patch_embed.norm.bias"]
    assert report.unexpected == ["layers.1.blocks.1.surprise"]
    assert "layers.1.blocks.1.mlp.fc2.weight" in dict(report.skipped)
    assert torch.equal(
        ours.state_dict()["layers.0.blocks.0.norm1.bias"], state["layers.0.blocks.0.norm1.bias"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"embed_dim": 32, "num_heads": (2, 4)},
            r"patch_embed.proj.weight: checkpoint \(32, 3, 4, 4\), model",
        ),
        ({"depths": (2, 4)}, "unexpected by the model:\n    layers.1.blocks.2"),
        ({"depths": (1, 2)}, r"missing from the checkpoint:\n    layers.0.blocks.1.norm1.weight \(24,\)"),
        ({"num_heads": (4, 8)}, "relative_position_bias_table.*another number of heads"),
        ({"version": 2}, "missing.*relative_position_bias_table"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_another_architecture(changes, message, strict):
    state = swin(**changes).state_dict()
    ours = swin()
    if strict:
        with pytest.raises(WeightsError, match=f"(?s){message}"):
            load_weights(ours, state)
    else:
        report = load_weights(ours, state, strict=False)
        assert report.loaded
        assert report.skipped or report.missing or report.unexpected


def test_a_checkpoint_of_which_nothing_fits_is_refused_without_strict_too():
    state = {"patch_embed.proj.weight": torch.zeros(24, 3, 4)}
    with pytest.raises(WeightsError, match=r"patch_embed\.proj\.weight"):
        load_weights(swin(), state, strict=False)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"conv1.weight": torch.zeros(1)}, "no Swin or DeiT weights: .*conv1.weight"),
        ({"epoch": 3}, r"no tensors in the checkpoint, which holds \['epoch'\]"),
        ({}, "no tensors"),
    ],
)
def test_no_weights_at_all(checkpoint, message):
    with pytest.raises(ValueError, match=message):
        load_weights(swin(), checkpoint)


def test_two_networks_in_one_checkpoint():
    state = swin().state_dict()
    both = {f"{who}.{name}": value for who in ("student", "teacher") for name, value in state.items()}
    with pytest.raises(ValueError, match=r"several networks .*'student.', 'teacher.'"):
        load_weights(swin(), both)


def test_wrong_source():
    state = timm_swin().state_dict()
    with pytest.raises(ValueError, match=r"source='torchvision', but .* is timm's name"):
        load_weights(swin(), state, source="torchvision")
    with pytest.raises(ValueError, match=r"source='keras': choose 'auto' or one of"):
        load_weights(swin(), state, source="keras")
    assert {"timm", "official", "torchvision", "transformers"} <= set(TRANSLATIONS)


def test_wrong_types():
    with pytest.raises(TypeError, match=r"checkpoint is a SwinTransformer: pass a path or a state dict"):
        load_weights(swin(), swin())
    with pytest.raises(ValueError, match=r"more than a backbone .*pass the backbone itself, model.encoder"):
        load_weights(nn.ModuleDict({"encoder": swin(), "decoder": nn.Linear(2, 2)}), swin().state_dict())


def test_half_of_a_classifier_is_missing_the_other_half():
    state = swin(seed=5).state_dict()
    del state["head.fc.bias"]
    with pytest.raises(WeightsError, match=r"missing from the checkpoint:\n    head.fc.bias \(7,\)"):
        load_weights(swin(), state)
