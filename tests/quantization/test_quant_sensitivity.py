"""Which part hurts, and a model within its budget."""

import pytest
import torch
from quant_cases import batches, logits, model
from torch import nn

from swin_lessons.quantization import (
    KINDS,
    QuantConfig,
    budgeted,
    convert,
    load,
    quantizers,
    save,
    select,
    sensitivity,
)

X = batches(1, seed=50)[0]


def closeness(net: nn.Module) -> float:
    """A score for a model without labels: 1 less the relative error of its logits."""
    expected = logits(model("v1"), X)
    return 1 - ((logits(net, X) - expected).norm() / expected.norm()).item()


def test_one_kind_at_a_time():
    rows = sensitivity(model("v1"), batches(), closeness, progress=False)
    assert {row.name for row in rows} == set(KINDS)
    assert [row.drop for row in rows] == sorted((row.drop for row in rows), reverse=True)
    assert all(0 < row.drop < 0.5 for row in rows)
    assert all(row.drop == pytest.approx(1 - row.score) for row in rows)
    assert sum(len(row.points) for row in rows) == 65


def test_a_bad_layer_is_found():
    """4-bit weights hurt most where a whole tensor shares a scale with one weight that is far too large."""
    import copy

    net = copy.deepcopy(model("v1"))
    net.layers[0].blocks[1].mlp.fc1.weight.data[0, 0] = 60.0

    def score(candidate: nn.Module) -> float:
        return -(logits(candidate, X) - logits(net, X)).norm().item()

    config = QuantConfig(weight_granularity="tensor", activation_observer="minmax", quantize={"linear"})
    rows = sensitivity(net, batches(), score, by="layer", config=config, progress=False)
    assert rows[0].name == "layers.0.blocks.1.mlp.fc1"
    assert rows[0].drop > 2 * rows[1].drop
    found = budgeted(net, batches(), score, 50 * rows[0].drop, by="layer", config=config, progress=False)
    assert found.kept_float[0] == "layers.0.blocks.1.mlp.fc1"


def test_an_unknown_grouping():
    with pytest.raises(ValueError, match="by='stage': choose 'kind' or 'layer'"):
        sensitivity(model("v1"), batches(), closeness, by="stage")


def test_select_switches_the_others_off():
    from quant_cases import quantised

    fake = quantised("v1", "all")
    points = [p for p in fake.quantization.points if p.kind == "gelu"]
    select(fake, points)
    assert {q.kind for q in quantizers(fake) if q.quantizing} == {"gelu"}
    select(fake, [])
    torch.testing.assert_close(logits(fake), logits(model("v1")), atol=1e-4, rtol=1e-4)


class Scripted:
    """A score that depends on which kinds are quantised, so that the search can be foretold."""

    def __init__(self, **costs: float) -> None:
        self.costs, self.calls = costs, 0

    def __call__(self, net: nn.Module) -> float:
        self.calls += 1
        on = {q.kind for q in quantizers(net) if q.quantizing}
        return 0.9 - sum(cost for kind, cost in self.costs.items() if kind in on)


CONFIG = QuantConfig(quantize={"linear", "head", "gelu", "softmax"}, activation_observer="minmax")


@pytest.mark.parametrize(
    ("points", "kept", "score"),
    [
        (10.0, [], 0.81),  # all may stay
        (5.0, ["linear"], 0.87),
        (2.0, ["linear", "gelu"], 0.89),
        (3.0, ["linear"], 0.87),  # to the last digit
        (0.0, ["linear", "gelu", "softmax"], 0.9),
    ],
)
def test_the_budget_is_kept_and_spent(points, kept, score):
    found = budgeted(
        model("v1"),
        batches(),
        Scripted(linear=0.06, gelu=0.02, softmax=0.01),
        points,
        config=CONFIG,
        progress=False,
    )
    assert found.kept_float == kept
    assert found.score == pytest.approx(score)
    assert found.float_score == pytest.approx(0.9)
    assert found.within
    assert {kind for _, kind in found.model.quantization.points} == CONFIG.kinds - set(kept)


def test_what_turns_out_harmless_is_quantised_again():
    class Together(Scripted):
        """GELU hurts alone, but not once linear layers are float."""

        def __call__(self, net: nn.Module) -> float:
            on = {q.kind for q in quantizers(net) if q.quantizing}
            return 0.9 - 0.03 * ("gelu" in on and len(on) == 1) - 0.02 * ("linear" in on)

    found = budgeted(model("v1"), batches(), Together(), 0.5, config=CONFIG, progress=False)
    assert found.kept_float == ["linear"]


def test_a_budget_that_cannot_be_kept_is_said():
    found = budgeted(
        model("v1"),
        batches(),
        Scripted(linear=0.1, head=0.1, gelu=0.1, softmax=0.1),
        1.0,
        config=CONFIG,
        progress=False,
    )
    assert not found.within
    assert len(found.kept_float) == 3
    with pytest.raises(ValueError, match="points=-1"):
        budgeted(model("v1"), batches(), closeness, -1)


def test_the_result_runs_converts_and_saves(tmp_path):
    everything = QuantConfig.preset("all", activation_observer="minmax")
    found = budgeted(model("v1"), batches(), closeness, 0.8, config=everything, progress=False)
    assert found.kept_float
    assert closeness(found.model) == pytest.approx(found.score, abs=1e-6)
    assert found.float_score - found.score <= 0.008
    integer = convert(found.model)
    assert torch.equal(logits(integer), logits(found.model))
    again = load(model("v1"), save(integer, tmp_path / "model.safetensors"))
    assert torch.equal(logits(again), logits(integer))
