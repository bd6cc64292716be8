import pytest
import torch
from torch import nn
from training_small import small_model

from swin_lessons.models import create_model
from swin_lessons.training import EMA, TrainConfig, build_optimizer, init_xavier, param_groups, set_lr


class Layered(nn.Module):
    """Stem, two blocks, head; a table that must not decay."""

    num_layers = 2

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.table = nn.Parameter(torch.zeros(5, 2))
        self.head = nn.Linear(4, 2)

    def no_weight_decay(self):
        return {"table"}

    def layer_id(self, name):
        return {"stem": 0, "table": 1, "head": 3}.get(name.split(".")[0]) or (
            int(name.split(".")[1]) + 1 if name.startswith("blocks") else 0
        )


def by_name(groups, key):
    return {name: group[key] for group in groups for name in group["names"]}


def test_only_matrices_decay():
    decay = by_name(param_groups(Layered(), weight_decay=0.3), "weight_decay")
    assert decay["stem.weight"] == decay["head.weight"] == 0.3
    assert decay["stem.bias"] == decay["table"] == 0
    assert set(decay) == {name for name, _ in Layered().named_parameters()}


def test_rates_fall_by_layer():
    scale = by_name(param_groups(Layered(), layer_decay=0.5), "lr_scale")
    assert scale["head.weight"] == 1
    assert scale["blocks.1.weight"] == 0.5
    assert scale["blocks.0.bias"] == scale["table"] == 0.25
    assert scale["stem.weight"] == 0.125


def test_set_lr_scales_each_group():
    optimizer = build_optimizer(Layered(), TrainConfig(layer_decay=0.5))
    set_lr(optimizer, 0.8)
    lr = by_name(optimizer.param_groups, "lr")
    assert lr["head.bias"] == 0.8
    assert lr["stem.bias"] == pytest.approx(0.1)


def test_layers_of_a_real_swin():
    model = create_model("swin_micro_fmnist")  # blocks of 2 and 2: layers 0 to 5
    scale = by_name(param_groups(model, layer_decay=0.5), "lr_scale")
    decay = by_name(param_groups(model, weight_decay=0.05), "weight_decay")
    assert scale["head.fc.weight"] == scale["norm.weight"] == 1
    assert scale["layers.1.blocks.1.mlp.fc1.weight"] == 0.5
    assert scale["layers.0.blocks.0.attn.qkv.weight"] == 0.5**4
    assert scale["patch_embed.proj.weight"] == 0.5**5
    assert decay["layers.0.blocks.1.attn.relative_position_bias_table"] == 0
    assert decay["layers.1.downsample.reduction.weight"] == 0.05


def test_layer_decay_needs_numbered_layers():
    with pytest.raises(ValueError, match="SmallNet does not number its layers"):
        param_groups(small_model(), layer_decay=0.9)


def test_frozen_parameters_are_left_out():
    model = small_model()
    model.embed.requires_grad_(False)
    assert "embed.weight" not in by_name(param_groups(model), "lr_scale")
    with pytest.raises(ValueError, match="no trainable parameter"):
        param_groups(model.requires_grad_(False))


def test_average_follows_its_formula():
    model = nn.Linear(1, 1, bias=False)
    model.register_buffer("count", torch.zeros(()))
    nn.init.constant_(model.weight, 1.0)
    ema = EMA(model, 0.5)
    expected = 1.0
    for step in range(20):
        nn.init.constant_(model.weight, float(step))
        model.count += 1
        ema.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert ema.module.weight.item() == pytest.approx(expected, rel=1e-6)
    assert ema.module.count == 20
    assert not ema.module.weight.requires_grad


def test_xavier_redraws_linear_weights_within_the_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.Conv2d(3, 4, 2))
    kept = model[0].bias.clone(), model[1].weight.clone()
    init_xavier(model)
    bound = (6 / (48 + 96)) ** 0.5
    assert 0.95 * bound < model[0].weight.abs().max() <= bound
    assert torch.equal(model[0].bias, kept[0])
    assert torch.equal(model[1].weight, kept[1])
