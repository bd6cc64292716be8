"""Profiles of real steps: what they must contain, and the command."""

import json

import pytest
import torch
from torch import nn

from swin_lessons.cli import main
from swin_lessons.models import create_model
from swin_lessons.profiling.trace import OpTime, by_kind, ops_table, profile_step


def test_operations_and_calls_of_a_step():
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    runs = []
    ops = profile_step(lambda: runs.append(layer(x).relu()), steps=4)
    calls = {op.name: op.calls for op in ops}
    assert len(runs) == 5  # one warms up
    assert calls["aten::addmm"] == calls["aten::relu"] == 1
    assert [op.seconds for op in ops] == sorted((op.seconds for op in ops), reverse=True)
    assert by_kind(ops).keys() >= {"matrix product", "activation"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm_", "matrix product"),
        ("mkldnn::_linear_pointwise", "matrix product"),
        ("aten::mkldnn_convolution", "matrix product"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("aten::native_layer_norm_backward", "norm"),
        ("aten::copy_", "copy"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::add_", "elementwise"),
        ("aten::cumsum", "other"),
    ],
)
def test_kinds(name, kind):
    assert OpTime(name, 1, 0.5).kind == kind


def test_kinds_add_up_and_the_gpu_clock_wins():
    ops = [OpTime("aten::mm", 1, 0.1, 3.0), OpTime("aten::bmm", 1, 1.0), OpTime("aten::gelu", 2, 0.5)]
    assert by_kind(ops) == {"matrix product": 4.0, "activation": 0.5}
    assert "66.7%" in ops_table(ops, top=1)
    assert len(ops_table(ops, top=2).splitlines()) == 3


@pytest.mark.parametrize("mode", ["--infer", "--train"])
@pytest.mark.parametrize("name", ["swinv2_micro_fmnist", "deit_micro_fmnist"])
def test_command_as_json(name, mode, capsys):
    assert main(["profile", name, mode, "--batch", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    params = sum(p.numel() for p in create_model(name).parameters())
    assert result["macs"]["params"] == params
    assert result["seconds_by_kind"]["matrix product"] > 0
    assert result["provenance"]["versions"]["torch"]
    if mode == "--train":
        assert result["memory_bytes"]["gradients"] == 4 * params
        assert result["seconds_by_kind"]["optimizer"] > 0
    else:
        assert result["memory_bytes"] is None


def test_command_as_text(capsys):
    assert main(["profile", "swin_micro_fmnist", "--layers", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "layers.1.blocks.1.mlp.fc2" in text
    assert "GMACs an image" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swin_micro_fmnist", "--batch", "0"], "at least one image"),
        (["swin_huge_patch4"], "swin_huge_patch4"),
        pytest.param(
            ["swin_micro_fmnist", "--device", "cuda"],
            "--device cuda: PyTorch sees no CUDA device here; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_command_errors(arguments, message, capsys):
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err
