"""Weights of another size are made to fit, as their producers do it, and reported."""

import pytest
import torch
import torch.nn.functional as F
from weights_small import SMALL, images, official, randomise, swin, timm_swin, transformers_swin

from swin_lessons.models.checkpoints.resize import fit_channels, fit_patch, square_window
from swin_lessons.models.swin import SwinTransformer
from swin_lessons.models.vit import VisionTransformer, ViTConfig
from swin_lessons.models.weights import WeightsError, load_weights, save_weights

TABLE = "layers.0.blocks.0.attn.relative_position_bias_table"


def test_bias_table_is_resized_as_timm_does():
    from timm.layers import resize_rel_pos_bias_table_simple

    ours, theirs = swin(img_size=(64, 64), window_size=(6, 6)), timm_swin()
    report = load_weights(ours, theirs.state_dict())
    table = theirs.state_dict()[TABLE]
    expected = resize_rel_pos_bias_table_simple(table.float(), (6, 6), (121, 2))
    torch.testing.assert_close(ours.state_dict()[TABLE].float(), expected, atol=1e-6, rtol=0)
    assert (TABLE, (49, 2), (121, 2), "bicubic") in report.resized
    assert TABLE in report.loaded
    assert len(report.resized) == 4


def test_bias_table_of_a_non_square_target():
    ours, theirs = swin(window_size=(4, 6)), swin(seed=5)
    with torch.no_grad():  # a bias that depends on the row offset alone must go on doing so
        theirs.get_parameter(TABLE).copy_(torch.arange(7.0).repeat_interleave(7)[:, None].expand(49, 2))
    load_weights(ours, theirs.state_dict())
    table = ours.get_parameter(TABLE).reshape(7, 11, 2)  # row offsets are as before, column offsets are new
    expected = torch.arange(7.0).double()[:, None, None].expand(7, 11, 2)
    torch.testing.assert_close(table, expected, atol=1e-5, rtol=0)


def test_non_square_source_needs_its_window_from_the_file(tmp_path):
    theirs, ours = swin(seed=5, window_size=(2, 4)), swin()
    with pytest.raises(WeightsError, match="21 rows are no square window's"):
        load_weights(ours, theirs.state_dict())
    save_weights(theirs, tmp_path / "w.safetensors")
    load_weights(ours, tmp_path / "w.safetensors")
    old = theirs.get_parameter(TABLE).T.reshape(1, 2, 3, 7)
    new = F.interpolate(old, size=(7, 7), mode="bicubic").reshape(2, 49).T
    torch.testing.assert_close(ours.get_parameter(TABLE), new, atol=1e-6, rtol=0)


def test_square_window():
    assert [square_window(n) for n in (1, 169, 529, 21, 16)] == [(1, 1), (7, 7), (12, 12), None, None]


def test_v2_takes_another_window_without_resizing():
    theirs = swin(2, seed=5, img_size=(64, 64), window_size=(8, 8), pretrained_window_sizes=(4, 4))
    ours = swin(2, img_size=(64, 64))
    report = load_weights(ours, theirs.state_dict())
    assert not report.resized
    assert not report.skipped
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())


def test_v2_keeps_pretrained_window_size_and_notes_a_difference(tmp_path):
    theirs = swin(2, seed=5)
    save_weights(theirs, tmp_path / "w.safetensors", {"accuracy": 0.9})
    same, other = (
        swin(2, img_size=(64, 64), window_size=(8, 8), pretrained_window_sizes=p) for p in ((4, 4), (0, 0))
    )
    assert load_weights(same, tmp_path / "w.safetensors").notes == []
    assert same.config.pretrained_window_sizes == (4, 4)
    assert same.layers[1].blocks[0].attn.pretrained_window_size == (4, 4)
    (note,) = load_weights(other, tmp_path / "w.safetensors").notes
    assert "pretrained_window_size=(4, 4)" in note
    assert other.config.pretrained_window_sizes == (0, 0)


def test_official_configuration_names_the_reference_windows():
    settings = {
        "DATA": {"IMG_SIZE": 48},
        "MODEL": {
            "TYPE": "swinv2",
            "SWINV2": {
                "PATCH_SIZE": 4,
                "DEPTHS": [2, 2],
                "WINDOW_SIZE": 12,
                "PRETRAINED_WINDOW_SIZES": [0, 0],
            },
        },
    }
    checkpoint = {"model": official(swin(2, seed=5)), "config": settings}
    # at 48 px the maps are 12 and 6: the second window was clamped
    (note,) = load_weights(swin(2), checkpoint).notes
    assert "windows [[12, 12], [6, 6]]" in note
    assert load_weights(swin(2, pretrained_window_sizes=(12, 6)), checkpoint).notes == []


def test_transformers_configuration_names_the_reference_windows(tmp_path):
    theirs = transformers_swin(2)
    theirs.config.pretrained_window_sizes = [12, 6]
    theirs.save_pretrained(tmp_path)
    (note,) = load_weights(swin(2), tmp_path).notes
    assert "pretrained_window_size=(12, 6)" in note
    assert load_weights(swin(2, pretrained_window_sizes=(12, 6)), tmp_path).notes == []


@pytest.mark.parametrize("config", [{"MODEL": 3}, {"lr": 1}, "text", {"MODEL": {"TYPE": "swin"}}])
def test_other_configurations_do_no_harm(config):
    checkpoint = {"model": official(swin(2, seed=5)), "config": config}
    assert load_weights(swin(2), checkpoint).notes == []


def test_absolute_position_embedding():
    theirs, ours = swin(seed=5, absolute_pos_embed=True), swin(absolute_pos_embed=True, img_size=(48, 32))
    report = load_weights(ours, theirs.state_dict())
    old = theirs.absolute_pos_embed.reshape(1, 8, 8, 24).permute(0, 3, 1, 2)
    new = F.interpolate(old, size=(12, 8), mode="bicubic").permute(0, 2, 3, 1).reshape(1, 96, 24)
    torch.testing.assert_close(ours.absolute_pos_embed, new)
    assert ("absolute_pos_embed", (1, 64, 24), (1, 96, 24), "bicubic") in report.resized


@pytest.mark.parametrize("channels", [12, 48])
def test_absolute_position_embedding_of_another_width_is_refused(channels):
    ours = swin(absolute_pos_embed=True)
    state = ours.state_dict() | {"absolute_pos_embed": torch.zeros(1, 64, channels)}
    with pytest.raises(WeightsError, match=rf"absolute_pos_embed: checkpoint \(1, 64, {channels}\)"):
        load_weights(ours, state)


@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 3), (3, 4), (3, 2), (3, 6), (4, 3)])
def test_other_channels_see_a_grey_image_alike(old, new):
    theirs, ours = swin(seed=5, in_chans=old), swin(in_chans=new)
    report = load_weights(ours, theirs.state_dict())
    grey = images(in_chans=1)
    torch.testing.assert_close(ours(grey.expand(-1, new, -1, -1)), theirs(grey.expand(-1, old, -1, -1)))
    assert report.resized[0][3] == f"{old} to {new} input channels"


def test_channels_as_the_usual_recipes():
    weight = torch.randn(8, 3, 4, 4)
    torch.testing.assert_close(fit_channels(weight, 1), weight.sum(1, keepdim=True))
    torch.testing.assert_close(fit_channels(weight[:, :1], 3), weight[:, :1].expand(-1, 3, -1, -1) / 3)


@pytest.mark.parametrize("size", [(8, 8), (6, 4), (3, 3)])
def test_patch_is_resized_as_timm_does(size):
    from timm.layers import resample_patch_embed

    weight = torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(
        fit_patch(weight, size), resample_patch_embed(weight, list(size)), atol=1e-4, rtol=0
    )


def test_enlarged_patch_gives_the_same_token():
    weight, image = torch.randn(5, 3, 4, 4).double(), torch.randn(2, 3, 4, 4).double()
    larger = F.interpolate(image, size=(8, 8), mode="bicubic", antialias=True)
    token, again = F.conv2d(image, weight), F.conv2d(larger, fit_patch(weight, (8, 8)))
    torch.testing.assert_close(again, token)
    ours, theirs = swin(patch_size=8, img_size=(64, 64)), swin(seed=5)
    report = load_weights(ours, theirs.state_dict())
    assert report.resized[0][:3] == ("patch_embed.proj.weight", (24, 3, 4, 4), (24, 3, 8, 8))


@pytest.mark.parametrize("distilled", [False, True])
def test_deit_positions_are_resized_as_by_set_input_size(distilled):
    config = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "distilled": distilled}
    theirs = randomise(VisionTransformer(ViTConfig(img_size=32, **config)), seed=5)
    ours = randomise(VisionTransformer(ViTConfig(img_size=(48, 40), **config)))
    report = load_weights(ours, theirs.state_dict())
    theirs.set_input_size((48, 40))
    x = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), atol=0, rtol=0)
    assert report.resized[0][0] == "pos_embed"


def test_a_distilled_checkpoint_is_no_plain_one():
    config = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    theirs, ours = (VisionTransformer(ViTConfig(**config, distilled=d)) for d in (True, False))
    with pytest.raises(WeightsError, match=r"(?s)pos_embed.*1 prefix tokens.*dist_token"):
        load_weights(ours, theirs.state_dict())


# --- the classifier ---


def test_a_classifier_with_other_classes_keeps_its_own():
    theirs, ours = swin(seed=5), swin(num_classes=3)
    before = ours.head.fc.weight.clone()
    report = load_weights(ours, theirs.state_dict())
    assert torch.equal(ours.head.fc.weight, before)
    why = "7 classes in the checkpoint, 3 in the model, which keeps its own"
    assert report.skipped == [("head.fc.weight", why), ("head.fc.bias", why)]
    assert why in str(report)


def test_class_map_picks_rows():
    theirs, ours = swin(seed=5), swin(num_classes=3)
    report = load_weights(ours, theirs.state_dict(), class_map=[6, 0, 2])
    torch.testing.assert_close(ours(images()), theirs(images())[:, [6, 0, 2]])
    assert report.resized[0] == ("head.fc.weight", (7, 48), (3, 48), "rows picked by class_map")


def test_class_map_permutes_equally_many_classes():
    ours, theirs = swin(num_classes=3), swin(seed=5, num_classes=3)
    load_weights(ours, theirs.state_dict(), class_map=[2, 0, 1])
    assert torch.equal(ours.head.fc.weight, theirs.head.fc.weight[[2, 0, 1]])
    with pytest.raises(ValueError, match="class_map has 2 values"):
        load_weights(ours, theirs.state_dict(), class_map=[0, 1])


@pytest.mark.parametrize("class_map", [[0, 1], [0, 1, 7], [0, 1, -1]])
def test_wrong_class_map(class_map):
    ours = swin(num_classes=3)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with pytest.raises(ValueError, match=r"class_map has .* it needs 3, .* from 0 to 6"):
        load_weights(ours, swin(seed=5).state_dict(), class_map=class_map)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_a_model_without_classifier():
    theirs, ours = swin(seed=5), swin(num_classes=0)
    report = load_weights(ours, theirs.state_dict())
    torch.testing.assert_close(
        ours(images()), theirs.head(theirs.forward_features(images()), pre_logits=True)
    )
    assert [name for name, _ in report.skipped] == ["head.fc.weight", "head.fc.bias"]


# --- dtypes, devices, numbers ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_checkpoints_take_the_models_dtype(dtype):
    theirs, ours = swin(seed=5), swin().float()
    state = {name: value.to(dtype) for name, value in theirs.state_dict().items()}
    load_weights(ours, state)
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    assert torch.equal(ours.norm.weight, state["norm.weight"].float())


def test_the_checkpoint_and_the_model_share_no_memory():
    ours, state = swin(), swin(seed=5).state_dict()
    load_weights(ours, state)
    with torch.no_grad():
        ours.norm.weight.zero_()
    assert state["norm.weight"].abs().min() > 0


def test_frozen_parameters_stay_frozen():
    ours = swin()
    ours.norm.weight.requires_grad_(False)
    load_weights(ours, swin(seed=5).state_dict())
    assert not ours.norm.weight.requires_grad
    assert ours.norm.bias.requires_grad


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_on_the_meta_device_becomes_real(version):
    theirs = swin(version, seed=5)
    with torch.device("meta"):
        ours = SwinTransformer(theirs.config)
    load_weights(ours.double().eval(), theirs.state_dict())
    assert not any(p.is_meta for p in ours.parameters())
    torch.testing.assert_close(ours(images()), theirs(images()))


def test_what_stays_on_the_meta_device_is_noted():
    theirs = swin(seed=5)
    with torch.device("meta"):
        ours = SwinTransformer(theirs.config)
    state = {name: value for name, value in theirs.state_dict().items() if not name.startswith("head")}
    (note,) = load_weights(ours, state).notes
    assert "on the meta device: head.fc.weight, head.fc.bias" in note


@pytest.mark.filterwarnings("error")
def test_not_a_number_is_reported():
    ours, state = swin().float(), swin(seed=5).state_dict()
    state["norm.bias"][3] = float("nan")
    with pytest.warns(UserWarning, match="NaN or infinity in norm.bias"):
        report = load_weights(ours, state)
    assert report.nonfinite == ["norm.bias"]
    assert "not finite: norm.bias" in str(report)


def test_overflow_in_the_models_dtype_is_reported():
    ours, state = swin().half(), swin(seed=5).state_dict()
    state["norm.bias"][3] = 1e6
    with pytest.warns(UserWarning, match="norm.bias"):
        assert load_weights(ours, state).nonfinite == ["norm.bias"]


def test_integers_are_no_weights():
    ours, state = swin(), swin(seed=5).state_dict()
    state["layers.0.blocks.0.attn.qkv.weight"] = torch.zeros(72, 24, dtype=torch.int8)
    with pytest.raises(WeightsError, match=r"qkv.weight: .*torch.int8 is no weight to compute with"):
        load_weights(ours, state)


def test_the_report_reads_like_a_page():
    ours = swin(window_size=(6, 6), img_size=(64, 64), num_classes=3)
    text = str(load_weights(ours, official(swin(seed=5))))
    lines = text.splitlines()
    assert lines[0] == f"{len(ours.state_dict()) - 2} parameters loaded from the official layout"
    assert lines[1] == f"  resized {TABLE}: (49, 2) -> (121, 2), bicubic"
    assert any(
        "layers.0.blocks.0.attn.relative_coords_table" in line and "and 6 more" in line for line in lines
    )
    assert SMALL.num_classes == 7
