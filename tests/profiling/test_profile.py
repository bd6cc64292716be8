"""Profiles of real steps: what they must contain, and the command."""

import gc
import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from swin_lessons.cli import main
from swin_lessons.models import create_model
from swin_lessons.profiling import Roofline, roof
from swin_lessons.profiling.trace import OpTime, by_kind, ops_table, profile_step


@pytest.fixture(autouse=True)
def some_machine(monkeypatch, tmp_path):
    """A roofline that takes no time to measure, in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow with torch loaded
    monkeypatch.setattr(roof, "measure_roofline", lambda device: Roofline("cpu", 10e9, {"fp32": 100e9}))


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
    kinds = {row["kind"]: row for row in result["kinds"]}
    assert kinds["MLP"]["intensity"] == 2 * kinds["MLP"]["macs"] / kinds["MLP"]["bytes"]
    assert sum(row["share"] for row in kinds.values()) == pytest.approx(1)
    assert result["roofline"]["bandwidth"] == 10e9
    assert len(result["step_seconds"]["samples"]["wall"]) == 7
    assert ("optimiser" in kinds) == (mode == "--train")
    assert ("partition/shift" in kinds) == ("swin" in name)
    if mode == "--train":
        assert result["memory_bytes"]["gradients"] == 4 * params
        assert result["seconds_by_kind"]["optimizer"] > 0
        peak = result["peak_bytes"]
        assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.1)
    else:
        assert result["memory_bytes"] is result["peak_bytes"] is None


def test_command_as_text(capsys, tmp_path):
    trace = tmp_path / "step.json"
    assert (
        main(["profile", "swin_micro_fmnist", "--train", "--layers", "--top", "3", "--trace", str(trace)])
        == 0
    )
    text = capsys.readouterr().out
    assert "layers.1.blocks.1.mlp.fc2" in text
    assert "GMACs an image" in text
    assert "A training step, batch 1, fp32: median" in text
    assert "Roof of this machine: 10.0 GB/s copied" in text
    assert "peak predicted / measured: " in text
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert names >= {"partition/shift", "attention", "optimiser"}


def test_nvtx_steps_on_a_gpu(monkeypatch, capsys):
    from swin_lessons.cli import _runs, build_parser, profile
    from swin_lessons.profiling import kinds

    entered = []
    monkeypatch.setattr(_runs, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(profile, "build", lambda args: (create_model(args.model), *one_image()))
    monkeypatch.setattr(
        kinds,
        "nvtx_ranges",
        lambda model, device, optimizer: nullcontext(entered.append((device, optimizer))),
    )
    args = build_parser().parse_args(
        ["profile", "swin_micro_fmnist", "--train", "--device", "cuda", "--nvtx"]
    )
    assert profile.run(args) == 0
    ((device, optimizer),) = entered
    assert device == "cuda"
    assert isinstance(optimizer, torch.optim.AdamW)
    assert capsys.readouterr().out == "5 steps with NVTX ranges\n"


def one_image():
    return torch.zeros(1, 1, 32, 32), torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swin_micro_fmnist", "--batch", "0"], "at least one image"),
        (["swin_huge_patch4"], "swin_huge_patch4"),
        (
            ["swin_micro_fmnist", "--nvtx"],
            "--nvtx marks what a GPU does: use --device cuda; on a CPU, use --trace",
        ),
        (["swin_micro_fmnist", "--trace", "."], "--trace . is a folder: name a file, such as step.json.gz"),
        (["swin_micro_fmnist", "--rounds", "2"], "--rounds 2 is too few for a median: use at least 7"),
        (["swin_micro_fmnist", "--top", "-3"], "--top -3: how many operations to list, 0 or more"),
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
