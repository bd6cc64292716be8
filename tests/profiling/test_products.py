"""The products of the linear layers: all of them, of the right shapes, and their number of operations."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from swin_lessons.models import create_model
from swin_lessons.profiling.products import linear_products, products_step


@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_every_linear_layer_is_there_with_its_rows(name):
    model = create_model(name).eval()
    products = linear_products(model, torch.randn(3, 1, 32, 32))
    blocks = [b for stage in model.layers for b in stage.blocks]
    assert len(products) == 4 * len(blocks) + 2  # qkv, proj, fc1, fc2; merging; head
    assert all(rows.shape[1] == weight.shape[1] for rows, weight in products)
    heads = [(r, w) for r, w in products if w.shape == (10, 128)]
    assert [r.shape for r, _ in heads] == [(3, 128)]
    assert not any(m._forward_hooks for m in model.modules())


def test_training_has_three_times_the_operations():
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    products = linear_products(layers, torch.randn(5, 8))
    counts = {}
    for mode, times in (("infer", 1), ("infer", 2), ("train", 1)):
        with FlopCounterMode(display=False) as counter:
            products_step(products, mode, times)()
        counts[mode, times] = counter.get_total_flops()
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    assert counts == {("infer", 1): forward, ("infer", 2): 2 * forward, ("train", 1): 3 * forward}


def test_a_model_without_linear_layers_is_named():
    with pytest.raises(ValueError, match=r"Conv2d has no nn\.Linear"):
        linear_products(nn.Conv2d(1, 1, 1), torch.randn(1, 1, 4, 4))
