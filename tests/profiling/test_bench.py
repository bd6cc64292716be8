"""The CPU suite on models of a few thousand parameters: fairness, plan, and what reaches the JSON."""

import gc
import json

import pytest
import torch
from quiet_show import QuietShow
from torch import nn

from swin_lessons.cli import main
from swin_lessons.profiling.peers import SwinSpec
from swin_lessons.profiling.steps import Contestant, check_equal, images_and_labels
from swin_lessons.profiling.suites import BenchOptions, cpu, find_suite
from swin_lessons.results import load_result

for library in ("timm", "torchvision", "transformers"):
    pytest.importorskip(library)


@pytest.fixture(autouse=True)
def fast_rounds(monkeypatch):
    """Collecting garbage is slow with four libraries loaded."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def models():
    spec = SwinSpec("small", 2, 32, 4, 24, (2, 2), 2, 1, 10)
    return cpu.Models(spec, BenchOptions())


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_case_is_checked_timed_and_complete(models, mode):
    show, options = QuietShow(), BenchOptions()
    rows = cpu.measure(cpu.Case(models.spec, mode, "fp32", 2), models, options, show)
    libraries = ["timm", "ours", "torchvision", "transformers"]
    assert [r["contestant"] for r in rows] == [*libraries, "linear layers alone"]
    assert all(len(r["samples"]["wall"]) == 7 for r in rows)
    assert all(r["relative_difference"] < 1e-4 for r in rows[:4])
    assert rows[0]["ratio"] == rows[0]["speedup"] == 1.0
    assert "bar" not in rows[4]
    assert len(show.calls) == show.samples == 4 * 8 + 7
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_another_function_is_not_timed(mode):
    models = cpu.Models(SwinSpec("small", 1, 32, 4, 24, (2, 2), 2, 1, 10), BenchOptions(against=("timm",)))
    with torch.no_grad():
        models.models["ours"].layers[1].blocks[1].attn.relative_position_bias_table += 0.3 * torch.randn(
            49, 4
        )
    with pytest.raises(ArithmeticError, match="ours differs from the baseline"):
        cpu.measure(cpu.Case(models.spec, mode, "fp32", 2), models, BenchOptions(), QuietShow())


def test_training_leaves_the_weights_and_makes_full_steps(models):
    before = {n: p.clone() for n, p in models.models["ours"].named_parameters()}
    x, y = images_and_labels(2, 1, 32, 10)
    contestant = models.contestant("ours", cpu.Case(models.spec, "train", "fp32", 2))
    contestant.step(x, y)()
    assert all(torch.equal(before[n], p) for n, p in models.models["ours"].named_parameters())
    moments = [state["exp_avg"] for state in contestant.optimizer.state.values()]
    assert len(moments) == len(before)
    assert all(m.abs().sum() > 0 for m in moments)


def test_accumulated_micro_batches_give_the_gradients_of_the_batch(models):
    case = cpu.Case(models.spec, "train", "fp32", 7)
    x, y = images_and_labels(7, 1, 32, 10)
    whole = models.contestant("ours", case).gradients(x, y)
    pieces = models.contestant("ours", case, micro_batch=3).gradients(x, y)  # 3 + 3 + 1: weights matter
    assert check_equal("pieces", pieces, whole, "fp32") < 1e-5


def test_gradients_against_autograd_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
    x, y = images_and_labels(6, 1, 4, 10)
    got = Contestant("linear", "ours", model, "train", micro_batch=4).gradients(x, y)
    error = (model(x).softmax(-1) - nn.functional.one_hot(y, 10)) / 6
    assert torch.allclose(got["1.weight"], error.T @ x.flatten(1), atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_fused_attention_of_timm_is_switched_for_one_model_only():
    models = cpu.Models(SwinSpec("small", 1, 32, 4, 24, (2, 2), 2, 1, 10), BenchOptions(against=("timm",)))
    flags = {
        name: {m.fused_attn for m in models.models[name].modules() if hasattr(m, "fused_attn")}
        for name in ("timm", "timm fused")
    }
    assert flags == {"timm": {False}, "timm fused": {True}}


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_micro_batch_rows_at_large_batches(mode):
    spec = SwinSpec("big images", 1, 128, 4, 24, (1, 1), 2)
    options = BenchOptions()
    names = [
        c.name for c in cpu.line_up(cpu.Case(spec, mode, "fp32", 32), cpu.Models(spec, options), options)
    ]
    assert names[0] == "timm"
    assert "timm, micro-batches" in names
    assert ("ours, micro-batches" in names) == (mode == "train")


def test_the_table_of_a_page_has_a_line_a_case():
    def row(batch, contestant, speed, **more):
        case = {"model": "swin_lesson_c48", "mode": "train", "dtype": "fp32", "batch": batch}
        return case | {"contestant": contestant, "images_per_second": speed, "speedup": speed / 10} | more

    rows = [
        row(8, "timm", 10.0),
        row(8, "ours", 12.0, bar=1.0, met=True),
        row(32, "timm", 10.0),
        row(32, "ours", 11.0),
        row(32, "ours, micro-batches", 12.0, bar=1.25, met=False),
    ]
    first, second = cpu.wide(rows)
    assert (first["ours"], first["speedup"], first["bar"], first["verdict"]) == (12.0, 1.2, 1.0, "yes")
    assert first["ours_micro_batches"] is None
    assert first["short"] == "Swin C48"
    assert cpu.short_name("swinv2_tiny_window8_256") == "SwinV2 tiny"
    assert (second["ours"], second["ours_micro_batches"]) == (11.0, 12.0)
    assert (second["speedup"], second["bar"], second["verdict"]) == (1.2, 1.25, "no")
    assert cpu.wide([row(1, "timm", 10.0)])[0]["bar"] is None


def test_a_missed_bar_is_explained_by_two_profiles(models, monkeypatch):
    bars = {"ours": 1e9}
    monkeypatch.setattr(cpu, "bar_for", lambda case, c: bars.get(c.name))
    case = cpu.Case(models.spec, "infer", "fp32", 2)
    rows = cpu.measure(case, models, BenchOptions(), QuietShow())
    assert [r["contestant"] for r in rows if "profile" in r] == ["timm", "ours"]
    monkeypatch.setattr(cpu, "short_name", lambda model: model)
    timm, ours = cpu.profile_table(rows)
    assert (timm["contestant"], ours["contestant"]) == ("timm", "ours")
    assert all(line["matrix_product"] > 0 and line["norm"] > 0 for line in (timm, ours))
    assert (ours["optimizer"], ours["mode"], ours["batch"]) == (0.0, "infer", 2)
    assert ours["calls"] > 50
    assert ours["rest"] == pytest.approx(ours["norm"] + ours["elementwise"] + ours["other"])
    bars["ours"] = 0.0  # met: nothing to explain
    assert cpu.profile_table(cpu.measure(case, models, BenchOptions(), QuietShow())) == []


@pytest.mark.parametrize(("batch", "micro_batch", "size"), [(32, 4, 4), (33, 4, 3), (37, 5, 1), (32, 64, 32)])
def test_products_are_those_of_the_whole_batch(batch, micro_batch, size, monkeypatch):
    spec = SwinSpec("big images", 1, 128, 4, 24, (1, 1), 2)
    models, seen = cpu.Models(spec, BenchOptions(against=())), []
    monkeypatch.setattr(cpu, "linear_products", lambda model, x, dtype: seen.append(len(x)))
    monkeypatch.setattr(cpu, "products_step", lambda products, mode, times: seen.append(times))
    options = BenchOptions(micro_batch=micro_batch)
    models.products(cpu.Case(spec, "infer", "fp32", batch), torch.zeros(batch, 1, 1, 1), options)
    assert seen == [size, batch // size]
    assert size * (batch // size) == batch


def test_plan_covers_the_bars():
    cases = cpu.plan(BenchOptions())
    models = [c.spec.name for c in cases]
    assert {"swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swin_lesson_c64"} <= set(models)
    big = {(c.mode, c.batch) for c in cases if c.spec.name == "swinv2_tiny_window8_256"}
    assert big == {("infer", 1), ("infer", 8), ("infer", 32), ("train", 8), ("train", 32)}
    assert {c.batch for c in cases if c.spec.name == "swin_lesson_c48"} == {64, 128}
    assert len(cpu.plan(BenchOptions(quick=True))) < 4


@pytest.mark.parametrize(
    ("mode", "batch", "micro_batch", "bar"),
    [
        ("infer", 1, 0, 1.1),
        ("infer", 32, 0, 1.3),
        ("train", 8, 0, 1.0),
        ("train", 32, 4, 1.25),
        ("train", 32, 0, None),
    ],
)
def test_bars_of_the_project(mode, batch, micro_batch, bar):
    case = cpu.Case(SwinSpec.from_name("swin_tiny_patch4_window7_224"), mode, "fp32", batch)
    contestant = Contestant("ours", "ours", nn.Identity(), mode, "fp32", micro_batch)
    assert cpu.bar_for(case, contestant) == bar
    contestant.library = "torchvision"
    assert cpu.bar_for(case, contestant) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"b": torch.ones(2)}, "has no a"),
        ({"a": torch.tensor([1.0, 1.1])}, "differs"),
        ({"a": torch.tensor([1.0, float("nan")])}, "differs"),
    ],
)
def test_check_equal_refuses(values, message):
    with pytest.raises(ArithmeticError, match=message):
        check_equal("x", values, {"a": torch.ones(2)}, "fp32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": ("keras",)}, "against=keras is unknown: use timm, torchvision, transformers"),
        ({"modes": ("fit",)}, "mode=fit"),
        ({"dtypes": ("int8",)}, "dtype=int8"),
        ({"batches": (0,)}, "batch="),
        ({"rounds": 5}, "rounds=5 is too few"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(**options)


def test_unknown_suite_is_named():
    with pytest.raises(ValueError, match="suite='warp' is unknown: use cpu"):
        find_suite("warp")


def test_command_line(tmp_path, capsys):
    out = tmp_path / "new" / "bench.json"
    arguments = "--against timm --models swin_lesson_c48 --batch 1 --mode infer,train --dtype bf16,fp32"
    assert main(["bench", *arguments.split(), "--out", str(out)]) == 0
    result = load_result(out)
    assert {(r["mode"], r["dtype"], r["contestant"]) for r in result["rows"]} == {
        (mode, dtype, who)
        for mode in ("infer", "train")
        for dtype in ("fp32", "bf16")
        for who in ("timm", "ours", "timm fused", "linear layers alone")
    }
    saved = {r["contestant"]: r["bytes_per_image"] for r in result["saved_for_backward"]}
    assert saved["ours"] < 1.05 * saved["timm"]  # layers this small keep their GELU's output, as timm does
    printed = capsys.readouterr().out
    assert "swin_lesson_c48 infer fp32 batch 1" in printed
    assert "\x1b" not in printed


def test_command_line_errors(capsys, tmp_path):
    assert main(["bench", "--models", "resnet50"]) == 2
    assert "'resnet50' is not a model that all libraries share" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["bench", "--out", str(tmp_path / "file" / "x.json")]) == 2
    assert "file" in capsys.readouterr().err
