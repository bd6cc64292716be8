"""create_model by name: the published sizes, and errors that say what to do."""

import pytest
import torch
from swin_cases import images

from swin_lessons.models import create_model, list_models
from swin_lessons.models.swin import SwinTransformer
from swin_lessons.models.variants import SWIN_VARIANTS

PARAMETERS = {  # shared/reference: counted in the authors' code
    "swin_tiny_patch4_window7_224": 28_288_354,
    "swin_small_patch4_window7_224": 49_606_258,
    "swin_base_patch4_window7_224": 87_768_224,
    "swin_base_patch4_window12_384": 87_903_584,
    "swin_large_patch4_window7_224": 196_532_476,
    "swin_large_patch4_window12_384": 196_735_516,
    "swinv2_tiny_window8_256": 28_347_154,
    "swinv2_tiny_window16_256": 28_347_154,
    "swinv2_small_window8_256": 49_728_418,
    "swinv2_small_window16_256": 49_728_418,
    "swinv2_base_window8_256": 87_918_816,
    "swinv2_base_window16_256": 87_918_816,
    "swinv2_base_window12_192": 87_918_816,
    "swinv2_base_window12to16_192to256": 87_918_816,
    "swinv2_base_window12to24_192to384": 87_918_816,
    "swinv2_large_window12_192": 196_739_932,
    "swinv2_large_window12to16_192to256": 196_739_932,
    "swinv2_large_window12to24_192to384": 196_739_932,
    "swinv2_huge_window12_192": 658_027_922,
    "swinv2_giant_window12_192": 3_001_912_008,
}


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_exactly_the_published_parameters(name):
    with torch.device("meta"):
        assert count(create_model(name)) == PARAMETERS[name]
        config = SWIN_VARIANTS[name]
        headless = create_model(name, num_classes=0)
    assert count(headless) == PARAMETERS[name] - 1000 * (config.dims[-1] + 1)


def test_head_widths_are_32_but_for_c24():
    for name, c in SWIN_VARIANTS.items():
        width = 24 if "c24" in name else 32
        assert [dim // heads for dim, heads in zip(c.dims, c.num_heads, strict=True)] == [width] * len(
            c.depths
        )


def test_extra_norms_of_the_largest_models():
    """One LayerNorm on the main branch after every six blocks of a stage: 3 of them in 18 blocks of 1408 channels."""
    with torch.device("meta"):
        plain, more = (create_model("swinv2_huge_window12_192", extra_norm_every=n) for n in (0, 6))
    assert count(more) - count(plain) == 3 * 2 * 1408


@pytest.mark.parametrize("size", [16, 24])
def test_transferred_models_keep_the_windows_of_pretraining(size):
    config = SWIN_VARIANTS[f"swinv2_base_window12to{size}_192to{16 * size}"]
    assert config.pretrained_window_sizes == (12, 12, 12, 6)
    with torch.device("meta"):
        model = create_model(f"swinv2_base_window12to{size}_192to{16 * size}")
    assert [s.blocks[0].attn.pretrained_window_size for s in model.layers] == [(12, 12)] * 3 + [(6, 6)]
    assert [s.blocks[0].attn.window_size[0] for s in model.layers] == [size] * 3 + [size // 2]


def test_names_are_timms_and_each_is_listed_once():
    timm = pytest.importorskip("timm")
    ours = list_models("swin*")
    assert ours == sorted(set(ours))
    not_in_timm = [name for name in ours if not timm.is_model(name)]
    assert all(
        any(word in name for word in ("micro", "huge", "giant", "c24")) or name in KNOWN
        for name in not_in_timm
    )
    assert list_models("swinv2_*256") == [
        name for name in ours if name.startswith("swinv2") and name.endswith("256")
    ]
    assert list_models("nothing like it") == []


KNOWN = {"swin_tiny_patch4_window12_384", "swin_small_patch4_window12_384"}  # built by nobody else


@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist", "swin_micro_scenes"])
def test_micro_models_run(name):
    model = create_model(name)
    c = model.config
    assert model.training
    assert count(model) * 2 < 1.5e6  # bytes in half precision: they are kept in git
    assert model(images(2, c.in_chans, *c.img_size, dtype=torch.float32)).shape == (2, c.num_classes)


# --- options ---


def test_options_reach_the_model():
    model = create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(64, 96),
        window_size=(4, 6),
        in_chans=5,
        num_classes=3,
        drop_path_rate=0.2,
        depths=[1, 1],
        num_heads=[2, 4],
        embed_dim=16,
        attention="reference",
        checkpointing=True,
        mlp_ratio=2.0,
    )
    c = model.config
    assert (c.img_size, c.window_size, c.in_chans, c.num_classes, c.embed_dim) == ((64, 96), (4, 6), 5, 3, 16)
    assert [stage.checkpointing for stage in model.layers] == [True, True]
    assert [b.attn.attention for stage in model.layers for b in stage.blocks] == ["reference"] * 2
    assert model.layers[0].blocks[0].mlp.fc1.out_features == 32
    assert model.layers[-1].blocks[-1].drop_path1.rate == 0.2
    assert model(images(1, 5, 64, 96, dtype=torch.float32)).shape == (1, 3)


@pytest.mark.parametrize(("given", "expected"), [(6, (6, 6)), ((6, 3), (6, 3))])
def test_a_pretrained_window_is_one_number_or_one_a_stage(given, expected):
    model = create_model("swinv2_micro_fmnist", pretrained_window_size=given)
    assert model.config.pretrained_window_sizes == expected


def test_an_option_changes_no_other_model():
    before = dict(SWIN_VARIANTS)
    create_model("swin_micro_fmnist", depths=(1, 1), img_size=64)
    assert before == SWIN_VARIANTS
    assert create_model("swin_micro_fmnist").config == before["swin_micro_fmnist"]


MICRO = "swin_micro_fmnist"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("swin_tiny_patch4_window7_244", {}, "did you mean .*swin_tiny_patch4_window7_224"),
        ("swin_tiny", {}, "'swin_tiny'; did you mean swin_tiny_patch4_window7_224"),
        ("Swin-T", {}, "no model 'Swin-T'"),
        ("resnet50", {}, "list_models"),
        ("", {}, "list_models"),
        (MICRO, {"kernels": "cuda"}, "kernels='cuda': choose 'torch', 'triton', or parts such as 'norm"),
        ("deit_micro_fmnist", {"attention": "triton"}, "attention='triton' is unknown to DeiT"),
        (MICRO, {"attention": "flash"}, "attention='flash'.*sdpa"),
        (MICRO, {"drop_path": 0.1}, "no option drop_path; it takes .*drop_path_rate"),
        (MICRO, {"drop_path_rate": 1.5}, "drop_path_rate=1.5.*0 to 1"),
        (MICRO, {"drop_path_rate": float("nan")}, "drop_path_rate=nan"),
        (MICRO, {"img_size": 0}, "img_size.*positive"),
        (MICRO, {"img_size": -32}, "img_size.*positive"),
        (MICRO, {"img_size": 32.0}, "whole number.*32.0"),
        (MICRO, {"img_size": (1, 2, 3)}, r"height, width.*\(1, 2, 3\)"),
        (MICRO, {"window_size": 0}, "window_size.*positive"),
        (MICRO, {"window_size": (4, -1)}, "window_size.*positive"),
        (MICRO, {"in_chans": 0}, "in_chans=0"),
        (MICRO, {"num_classes": -1}, "num_classes=-1"),
        (MICRO, {"num_heads": (3, 4)}, "64 channels.*3 heads"),
        (MICRO, {"depths": (2, 2, 2)}, "one value a stage"),
        (MICRO, {"depths": (2, 0)}, "depths.*positive"),
        (MICRO, {"version": 3}, "version=3"),
        (MICRO, {"window_chunk": -1}, "window_chunk=-1"),
        (MICRO, {"mlp_ratio": 0}, "mlp_ratio=0"),
        (MICRO, {"patch_size": 0}, "patch_size=0"),
        (MICRO, {"features_only": True, "out_indices": (2,)}, "out_indices=.2.*0 to 1"),
        (MICRO, {"features_only": True, "out_indices": ()}, "out_indices"),
        (MICRO, {"features_only": True, "out_indices": 1}, "out_indices=1.*list"),
        (MICRO, {"features_only": True, "out_indices": "ab"}, "out_indices='ab'.*whole numbers"),
        (MICRO, {"in_chans": "3"}, "in_chans='3'.*whole number"),
        (MICRO, {"in_chans": 2.0}, "in_chans=2.0.*whole number"),
        (MICRO, {"num_classes": 1.5}, "num_classes=1.5.*whole number"),
        (MICRO, {"num_classes": True}, "num_classes=True.*whole number"),
        (MICRO, {"depths": (2, 2.5)}, r"depths=\(2, 2.5\).*whole numbers"),
        (MICRO, {"drop_path_rate": "0.1"}, "drop_path_rate='0.1'.*a number"),
        (MICRO, {"pretrained_window_size": 8}, "belongs to V2"),
        ("swinv2_micro_fmnist", {"pretrained_window_size": (8, 8, 8)}, "one value a stage"),
        ("deit_tiny_patch16_224", {"window_size": 7}, "no window_size"),
        ("deit_tiny_patch16_224", {"in_chans": 1.0}, "in_chans=1.0.*whole number"),
        ("deit_tiny_patch16_224", {"features_only": True, "out_indices": 3}, "out_indices=3.*list"),
    ],
)
def test_bad_requests_name_the_value_and_the_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)


# --- pretrained weights ---


def test_missing_zoo_weights_say_where_they_should_be(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIN_LESSONS_ZOO", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"swin_micro_fmnist\.safetensors.*swin-lessons zoo --train swin_micro_fmnist"
    ):
        create_model(MICRO, pretrained=True)


def test_zoo_weights_are_loaded_from_the_folder(tmp_path, monkeypatch):
    from swin_lessons.models import save_weights

    monkeypatch.setenv("SWIN_LESSONS_ZOO", str(tmp_path))
    trained = create_model(MICRO)
    save_weights(trained, tmp_path / f"{MICRO}.safetensors")
    loaded = create_model(MICRO, pretrained=True)
    for a, b in zip(loaded.parameters(), trained.parameters(), strict=True):
        assert torch.equal(a, b)
    other_head = create_model(MICRO, pretrained=True, num_classes=3)
    assert torch.equal(
        other_head.layers[0].blocks[0].attn.qkv.weight, trained.layers[0].blocks[0].attn.qkv.weight
    )
    assert other_head.head.fc.weight.shape == (3, 128)


def test_weights_nobody_published_are_refused():
    pytest.importorskip("timm")
    small = {"embed_dim": 32, "depths": (1, 1), "num_heads": (1, 2), "img_size": 32}
    with pytest.raises(ValueError, match=r"no published weights.*never released"):
        create_model("swinv2_giant_window12_192", pretrained=True, **small)


def test_no_network_is_said(monkeypatch):
    pytest.importorskip("timm")
    from swin_lessons.models.checkpoints import hub

    def unreachable(*args, **kwargs):
        raise OSError("no such host")

    monkeypatch.setattr(hub, "_download", unreachable)
    small = {"embed_dim": 32, "depths": (1, 1), "num_heads": (1, 2), "img_size": 32}
    with pytest.raises(ConnectionError, match=r"cannot fetch.*no such host[\s\S]*load_weights"):
        create_model("swin_tiny_patch4_window7_224", pretrained=True, **small)


def test_a_model_built_from_its_configuration_is_the_same():
    model = create_model(MICRO)
    twin = SwinTransformer(model.config)
    twin.load_state_dict(model.state_dict())
    x = images(2, 1, 28, 28, dtype=torch.float32)
    assert torch.equal(twin.eval()(x), model.eval()(x))


def test_pretrained_takes_no_file():
    with pytest.raises(
        ValueError, match=r"pretrained='w\.safetensors' is True or False; for a file: load_weights"
    ):
        create_model("swin_micro_fmnist", pretrained="w.safetensors")
