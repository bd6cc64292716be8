"""The ladder on paper: counted bytes against bytes worked out by hand, and times from them."""

import pytest
import torch
import torch.nn.functional as F

from swin_lessons.models import create_model
from swin_lessons.profiling import count_macs
from swin_lessons.profiling.ladder_cost import CARDS, AmpOnPaper, Card, RungCost, count_rung
from swin_lessons.profiling.suites.train_ladder import ladder
from swin_lessons.profiling.work import Work

pytest.importorskip("triton")
RUNGS = {rung.name: rung for rung in ladder()}
MICRO = "swin_micro_fmnist"


def test_amp_casts_what_cuda_casts():
    x, weight = torch.zeros(2, 8), torch.zeros(8, 8)
    with AmpOnPaper():
        y = F.linear(x, weight)
        assert y.dtype == torch.float16
        assert F.layer_norm(y, (8,)).dtype == torch.float32
        assert y.softmax(-1).dtype == torch.float32
        assert F.gelu(y).dtype == torch.float16
    assert F.linear(x, weight).dtype == torch.float32


def test_products_of_a_step_are_three_times_those_of_a_pass():
    cost = count_rung(RUNGS["eager fp32"], MICRO, batch=4)
    forward = sum(work.macs for (_, way), work in cost.kinds.items() if way == "forward")
    assert forward == pytest.approx(4 * count_macs(create_model(MICRO), (1, 32, 32)).total, rel=0.02)
    assert 2.8 < cost.total.macs / forward < 3.1


def test_each_rung_moves_less_than_the_one_below():
    costs = {name: count_rung(rung, batch=8) for name, rung in RUNGS.items() if not rung.compiled}
    moved = {name: cost.total.bytes for name, cost in costs.items()}
    assert moved.pop("+ TF32") == moved["eager fp32"]
    assert list(moved.values()) == sorted(moved.values(), reverse=True)
    assert costs["+ AMP"].total.launches > costs["eager fp32"].total.launches  # casts
    assert costs["+ MLP epilogue"].total.launches < costs["eager fp32"].total.launches


def test_counting_is_repeatable_and_leaves_torch_as_it_was():
    first, second = (count_rung(RUNGS["+ attention"], MICRO, batch=2) for _ in range(2))
    assert first == second
    assert not torch.is_autocast_enabled("cpu")


def test_the_optimiser_by_hand():
    """80 bytes a parameter as it comes, 28 fused; 12 more for clipping, 8 for unscaling in fp16."""
    params = sum(p.numel() for p in create_model(MICRO).parameters())
    assert count_rung(RUNGS["eager fp32"], MICRO, 1).update.bytes == 92 * params
    assert count_rung(RUNGS["+ AMP"], MICRO, 1).update.bytes == 100 * params
    assert count_rung(RUNGS["+ attention"], MICRO, 1).update.bytes == 48 * params


def test_a_compiled_rung_cannot_be_counted():
    with pytest.raises(ValueError, match=r"torch.compile fp32: only the compiler knows"):
        count_rung(RUNGS["torch.compile fp32"], MICRO)


def test_a_step_by_hand():
    """100 FLOP at 50 a second in one kind, 60 bytes at 20 in another, 10 in the update; three launches of 0.1."""
    card = Card("toy", 40.0, {"half": 100.0}, memory_share=0.5, product_share=0.5, gap=0.1, host=0.2)
    kinds = {("a", "forward"): Work(50, 10, 1), ("b", "backward"): Work(1, 60, 1)}
    cost = RungCost("half", 1, kinds, Work(0, 10, 1))
    assert card.device_seconds(cost) == pytest.approx(2 + 3 + 0.5 + 0.3)
    assert card.host_seconds(cost) == pytest.approx(0.6)
    assert card.step_seconds(cost) == card.device_seconds(cost)


def test_cards_get_faster_with_shorter_numbers():
    for card in CARDS.values():
        assert card.rates["fp32"] <= card.rates["tf32"] < card.rates["half"]
    assert CARDS["A100"].rates["half"] == 312e12
