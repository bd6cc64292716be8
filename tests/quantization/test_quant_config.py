"""The configuration: presets, JSON, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

from swin_lessons.quantization import KINDS, QuantConfig, find_points

PRESETS = ("linear", "mode1", "mode2", "all", "dynamic", "w8a16", "w4a16", "w4a8")


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    config = QuantConfig.preset(name, skip=("head.*",), dequantize={"conv"})
    assert QuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "conv" not in config.kinds


def test_what_the_presets_leave_in_float():
    assert QuantConfig().kinds == {"linear", "merging", "head", "conv"}
    float_in_mode1 = KINDS.keys() - QuantConfig.preset("mode1").kinds
    assert float_in_mode1 == {"head", "conv", "layer_norm", "gelu", "softmax", "residual"}
    assert QuantConfig.preset("mode1").kinds - QuantConfig.preset("mode2").kinds == {"narrow_output"}
    assert QuantConfig.preset("all").kinds == set(KINDS)
    assert QuantConfig.preset("w4a16", quantize=frozenset(KINDS)).kinds == {
        "linear",
        "merging",
        "head",
        "conv",
    }
    assert not QuantConfig.preset("linear").symmetric_activations
    assert QuantConfig.preset("mode1").symmetric_activations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize": {"softmaxx"}}, r"unknown kinds: 'softmaxx'; choose among linear"),
        ({"dequantize": "head"}, r"give a set of kinds, such as \{'head'\}"),
        ({"weight_bits": 2}, "weight_bits is 2: choose 8 or 4"),
        ({"weight_bits": 8.0}, "weight_bits is 8.0: choose 8 or 4"),
        ({"activation_bits": 16}, "activation_bits is 16: choose 8, 4 or None"),
        ({"weight_observer": "moving"}, "weight_observer is 'moving': choose minmax"),
        ({"activation_observer": "median"}, "activation_observer is 'median'"),
        ({"weight_granularity": "row"}, "weight_granularity is 'row': choose one of tensor"),
        ({"symmetric_weights": 1}, "symmetric_weights is 1: choose True or False"),
        ({"percentile": 0.9999}, "percentile is 0.9999: use more than 50"),
        ({"momentum": 0}, "momentum is 0: use more than 0"),
        ({"group_size": 0}, "group_size is 0: use a whole number"),
        ({"skip": "head"}, "skip is 'head': give a tuple"),
        ({"dynamic": "row"}, "dynamic is 'row': choose None"),
        ({"dynamic": "token", "activation_bits": None}, "dynamic chooses scales of activations"),
        ({"dynamic": "token", "learnable_scale": True}, "learnable_scale needs scales that are kept"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(**changes)


def test_the_reference_page_lists_every_kind():
    page = Path(__file__).parents[2] / "book" / "reference" / "quantization.md"
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == KINDS


def test_unknown_names():
    with pytest.raises(ValueError, match="no preset 'mode3': choose one of linear, mode1"):
        QuantConfig.preset("mode3")
    with pytest.raises(ValueError, match="no field bits"):
        QuantConfig.from_dict({"bits": 8})


def test_a_pattern_that_fits_nothing():
    with pytest.raises(ValueError, match=r"no layer is called heads\.\*"):
        find_points(nn.Sequential(nn.Linear(2, 2)), QuantConfig(skip=("heads.*",)))


def test_nothing_to_quantise():
    with pytest.raises(ValueError, match="Sequential has nothing to quantise of kind conv"):
        find_points(nn.Sequential(nn.ReLU()), QuantConfig(quantize={"conv"}))
