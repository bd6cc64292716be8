"""What training asks of a Swin: gradients for all, decay groups, layer depths, drop path, pyramids, a fresh head."""

import math

import pytest
import torch
from swin_cases import TINY, assert_near, images, scramble, swin
from torch import nn

from swin_lessons.models import create_model
from swin_lessons.models.layers import DropPath
from swin_lessons.models.swin import SwinTransformer

VERSIONS = pytest.mark.parametrize("version", [1, 2])


# --- initialisation ---


@VERSIONS
def test_a_new_model_has_the_authors_initialisation(version):
    torch.manual_seed(0)
    model = create_model(("swin_micro_fmnist", "swinv2_micro_fmnist")[version - 1])
    for name, p in model.named_parameters():
        if "patch_embed.proj" in name:
            continue  # a convolution keeps PyTorch's own
        if "logit_scale" in name:
            assert (p == math.log(10)).all()
        elif name.endswith(("norm1.weight", "norm2.weight")):
            assert (p == (0.0 if version == 2 else 1.0)).all()
        elif p.ndim == 1:
            assert (p == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all()
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.2), name


def test_blocks_of_v2_start_as_the_identity():
    model = SwinTransformer(create_model("swinv2_micro_fmnist").config)
    x = torch.randn(1, 8, 8, 64)
    assert torch.equal(model.layers[0](x), x)


@VERSIONS
def test_the_meta_device_then_real_weights_is_a_fresh_model(version):
    config = create_model(("swin_micro_fmnist", "swinv2_micro_fmnist")[version - 1]).config
    fresh = SwinTransformer(config)
    with torch.device("meta"):
        meta = SwinTransformer(config)
    assert meta.eval()(torch.empty(2, 1, 20, 44, device="meta")).shape == (2, 10)
    assert sum(p.numel() for p in meta.parameters()) == sum(p.numel() for p in fresh.parameters())
    meta.to_empty(device="cpu")
    for model in (fresh, meta):
        torch.manual_seed(3)
        model.reset_parameters()
    assert_equal_states(fresh, meta)
    scramble(fresh, 1), scramble(meta, 1)  # all buffers are right too
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(fresh.eval()(x), meta.eval()(x))


def assert_equal_states(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- gradients ---


@VERSIONS
def test_every_parameter_learns(version):
    model = swin(version, absolute_pos_embed=True, depths=(2, 2, 2), num_heads=(2, 4, 4), img_size=(64, 64))
    model(images(2, 3, 64, 64)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


@VERSIONS
@pytest.mark.parametrize("out_indices", [(1, 3), (0,), (-1,), None, (2, 1)])
def test_a_pyramid_has_no_idle_parameters(version, out_indices):
    """Idle ones would stop distributed training."""
    four = {"depths": (2, 1, 1, 2), "num_heads": (2, 4, 4, 4), "img_size": (64, 64)}
    model = swin(version, features_only=True, out_indices=out_indices, **four)
    maps = model(images(2, 3, 64, 64))
    stages = sorted(i % 4 for i in (range(4) if out_indices is None else out_indices))
    assert [m.shape for m in maps] == [(2, 24 << i, 16 >> i, 16 >> i) for i in stages]
    assert all(m.is_contiguous() for m in maps)
    sum(m.square().sum() for m in maps).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    full = swin(version, **four)
    full.load_state_dict(model.state_dict(), strict=False)
    seen = []
    for i in stages:
        full.layers[i].register_forward_hook(lambda m, x, y: seen.append(y.permute(0, 3, 1, 2)))
    full(images(2, 3, 64, 64))
    for ours, theirs in zip(maps, seen, strict=True):
        assert_near(ours, theirs)


def test_a_norm_for_each_output_of_a_pyramid():
    names = dict(create_model("swin_micro_fmnist", features_only=True, out_norm=True).named_parameters())
    assert {name for name in names if name.startswith("out_norms")} == {
        f"out_norms.norm{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }


@VERSIONS
def test_checkpointing_works_behind_a_frozen_stem(version):
    model = swin(version, checkpointing=True)
    model.patch_embed.requires_grad_(False)
    model(images(1, 3, 32, 32)).sum().backward()
    assert all(
        p.grad is not None for name, p in model.named_parameters() if not name.startswith("patch_embed")
    )


@VERSIONS
def test_checkpointing_keeps_less(version):
    def kept(checkpointing: bool) -> int:
        model = swin(version)
        model.set_checkpointing(checkpointing)
        storages: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storages[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(images(4, 3, 32, 32))
        return sum(storages.values())

    assert kept(True) < 0.6 * kept(False)


# --- groups ---


@VERSIONS
def test_positions_and_scales_do_not_decay(version):
    model = swin(version)
    keys = {
        1: ("relative_position_bias_table",),
        2: ("logit_scale", "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight"),
    }
    expected = {f"layers.{i}.blocks.{j}.attn.{key}" for i in (0, 1) for j in (0, 1) for key in keys[version]}
    assert model.no_weight_decay() == expected
    assert expected <= {name for name, _ in model.named_parameters()}


@VERSIONS
def test_layer_depths_rise_from_stem_to_head(version):
    model = swin(version, absolute_pos_embed=True, depths=(2, 3, 1), num_heads=(2, 4, 4), img_size=(64, 64))
    depth = {name: model.layer_id(name) for name, _ in model.named_parameters()}
    assert model.num_layers == 6
    assert depth["absolute_pos_embed"] == depth["patch_embed.proj.weight"] == 0
    blocks = [
        depth[f"layers.{i}.blocks.{j}.attn.qkv.weight"] for i, n in enumerate((2, 3, 1)) for j in range(n)
    ]
    assert blocks == [1, 2, 3, 4, 5, 6]
    assert depth["layers.1.downsample.reduction.weight"] == 3  # with the block it feeds
    assert depth["norm.weight"] == depth["head.fc.weight"] == 7
    forward = [depth[name] for name in depth if not name.startswith(("absolute", "patch"))]
    assert sorted(set(depth.values())) == list(range(8))
    for i, n in enumerate((2, 3, 1)):
        for j in range(n):
            assert len({d for name, d in depth.items() if name.startswith(f"layers.{i}.blocks.{j}.")}) == 1
    assert max(forward) == 7


def test_drop_path_grows_linearly_over_all_blocks():
    model = create_model("swin_micro_fmnist", drop_path_rate=0.3, depths=(2, 3))
    rates = [m.rate for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0, 0, 0.075, 0.075, 0.15, 0.15, 0.225, 0.225, 0.3, 0.3])


@VERSIONS
def test_certain_drop_path_leaves_the_residual_alone(version):
    model = swin(version, drop_path_rate=1.0, depths=(1, 1))
    x = images(3, 4, 4, 48)
    assert torch.equal(model.layers[1].blocks[0](x), x)
    stage = model.layers[1]
    stage.downsample = nn.Identity()
    assert_near(stage(x), x)  # the row path
    assert not torch.equal(stage.eval()(x), x)


@VERSIONS
def test_drop_path_keeps_the_mean(version):
    model = swin(version, drop_path_rate=0.5, depths=(1, 1))
    stage = model.layers[1]
    stage.downsample = nn.Identity()
    x = images(1, 4, 4, 48)
    torch.manual_seed(0)
    with torch.no_grad():
        branch = stage.blocks[0].drop_path1(torch.ones(4000, 1, 1, 1))
        assert branch.mean().item() == pytest.approx(1.0, abs=0.06)
        many = stage(x.expand(64, -1, -1, -1))
    assert (
        len({tuple(row.flatten()[:4].tolist()) for row in many}) > 2
    )  # images differ: dropped, kept, half kept


# --- heads and channels ---


def test_a_new_classifier():
    model = swin(1)
    model.requires_grad_(True)
    model.reset_classifier(3)
    out = model(images(2, 3, 32, 32))
    assert out.shape == (2, 3)
    assert out.dtype == torch.float64
    assert model.config.num_classes == 3
    model.reset_classifier(0)
    features = model(images(2, 3, 32, 32))
    assert torch.equal(
        features, model.forward_head(model.forward_features(images(2, 3, 32, 32)), pre_logits=True)
    )
    assert features.shape == (2, 48)
    assert not [name for name in model.state_dict() if name.startswith("head")]


def test_a_pyramid_has_no_classifier():
    model = swin(1, features_only=True)
    for call in (lambda: model.forward_features(images(1, 3, 32, 32)), lambda: model.reset_classifier(3)):
        with pytest.raises(ValueError, match="features_only"):
            call()


@pytest.mark.parametrize("in_chans", [1, 2, 13])
def test_any_number_of_channels(in_chans):
    assert swin(2, in_chans=in_chans)(images(2, in_chans, 32, 32)).shape == (2, TINY.num_classes)


@VERSIONS
def test_bias_of_queries_and_values_may_be_left_out(version):
    model = swin(version, qkv_bias=False)
    assert not [
        name for name, _ in model.named_parameters() if name.endswith(("qkv.bias", "q_bias", "v_bias"))
    ]
    assert torch.isfinite(model(images(1, 3, 36, 36))).all()
