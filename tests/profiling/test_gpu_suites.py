"""What a GPU will run, on a CPU: every kernel through the interpreter, the training ladder small."""

import json

import pytest
import torch
from quiet_show import QuietShow

from swin_lessons.cli import main
from swin_lessons.profiling.peers import SwinSpec, reference_model
from swin_lessons.profiling.suites import BenchOptions, find_suite, gpu, kernels, train_ladder

pytest.importorskip("triton")
pytest.importorskip("timm")
CUDA = torch.cuda.is_available()
SMALL = SwinSpec("swin_lesson_small", 1, 32, 4, 24, (2, 2), 1, 1, 10)


# --- kernels


@pytest.mark.parametrize("case", kernels.cases(small=True), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_every_kernel_passes_its_check(case, dtype):
    device = torch.device("cuda" if CUDA else "cpu")
    tensors = case.tensors(kernels.DTYPES[dtype], device)
    assert 0 <= kernels.check(case, tensors, dtype) < case.limit(dtype)
    assert {t.dtype for i, t in enumerate(tensors) if i in case.whole} <= {torch.int8}
    moved = case.bytes(2)
    assert 0 < moved[0] < moved[-1] if case.gradients else len(moved) == 1 and moved[0] > 0


def test_all_operations_are_there():
    from swin_lessons.kernels import __all__ as names

    operations = set(names) - {
        "FusedAdamW",
        "adamw_",
        "compile_report",
    }  # the optimiser is a rung of the ladder
    assert {case.name.split()[0] for case in kernels.cases()} == operations


def test_a_wrong_kernel_ends_the_run():
    case = kernels.cases(small=True)[0]
    wrong = kernels.Case(
        case.name,
        case.shapes,
        lambda *t, impl: case.call(*t, impl=impl) * (1 + (impl == "triton")),
        case.bytes,
    )
    device = torch.device("cuda" if CUDA else "cpu")
    with pytest.raises(ArithmeticError, match=r"layer_norm 1 x 9 x 9 x 32 in fp32 is off by 1\.0e\+00"):
        kernels.check(wrong, wrong.tensors(torch.float32, device), "fp32")


@pytest.mark.skipif(CUDA, reason="on a GPU there are times")
def test_without_a_gpu_no_clock_is_read():
    result = kernels.run(BenchOptions(dtypes=("fp32",)), QuietShow())
    assert {"seconds", "bound", "over_eager"} & set().union(*result["rows"]) == set()
    assert all(line["triton"] is None for line in result["tables"]["times"])
    assert kernels.summary(result).count("not timed") == len(result["rows"]) == 27
    json.dumps(result, allow_nan=False)


# --- the ladder


def test_rungs_keep_what_they_gained():
    rungs = {rung.name: rung for rung in train_ladder.ladder("fp16")}
    assert list(rungs) == [
        *(
            "eager fp32",
            "+ TF32",
            "+ AMP",
            "+ LayerNorm, AdamW",
            "+ windows",
            "+ attention",
            "+ MLP epilogue",
        ),
        *("torch.compile fp32", "torch.compile tf32", "torch.compile fp16"),
    ]
    assert [rung.triton for rung in rungs.values()] == [False] * 3 + [True] * 4 + [False] * 3
    whole = rungs["+ MLP epilogue"]
    assert (whole.precision, whole.kernels, whole.attention, whole.optimizer) == (
        *("fp16", "norm+mlp"),
        *("triton", "triton"),
    )
    assert set(train_ladder.ARTICLE) <= {name.removeprefix("+ ") for name in rungs}
    assert "tf32" not in {rung.precision for rung in train_ladder.ladder("bf16", cuda=False)}
    assert [rung.name for rung in train_ladder.short_ladder("bf16", cuda=False)] == [
        *("eager fp32", "+ AMP", "+ MLP epilogue", "torch.compile bf16"),
    ]


@pytest.mark.skipif(CUDA, reason="on a GPU all rungs are timed")
def test_all_rungs_train_alike_and_those_of_pytorch_are_timed():
    """The compiler's rungs apart, which take a minute."""
    rungs = [rung for rung in train_ladder.ladder("bf16", cuda=False) if not rung.compiled]
    show = QuietShow()
    weights = reference_model(SMALL).state_dict()
    rows = train_ladder.climb(SMALL, weights, rungs, 4, "bf16", 7, show)
    assert [row["images_per_second"] is not None for row in rows] == [True, True, False, False, False, False]
    assert rows[0]["speedup"] == 1.0
    assert len(show.calls) == show.samples
    for row in rows:
        assert row["losses"][-1] < row["losses"][0]
        assert row["losses"][-1] == pytest.approx(row["eager_losses"][-1], rel=0.05)
        assert (row["peak_bytes"] is None) == (row["speedup"] is None)
    json.dumps(rows, allow_nan=False)


def test_a_rung_that_computes_something_else_ends_the_run():
    base, other = (
        train_ladder.Climber(
            train_ladder.Rung(name), SMALL, reference_model(SMALL).state_dict(), torch.device("cpu")
        )
        for name in ("eager fp32", "wrong")
    )
    with torch.no_grad():
        other.model.layers[0].blocks[1].norm2.weight.mul_(1.5)
    with pytest.raises(ArithmeticError, match="wrong differs from the baseline by"):
        other.check(base, 2)


def gain(name, images, half="fp16", batch=32, **more):
    row = {
        "model": "swin_tiny_patch4_window7_224",
        "half": half,
        "batch": batch,
        "name": name,
        "device": "cuda",
    }
    row |= {"images_per_second": images, "speedup": images and images / 100, "losses": [7.0, 6.5]}
    return row | {"eager_losses": [7.0, 6.6], "peak_bytes": 2**31} | more


def test_bars_take_the_best_batch():
    rows = [
        *(gain("eager fp32", 100.0), gain("+ MLP epilogue", 280.0), gain("torch.compile fp16", 250.0)),
        gain("eager fp32", 110.0, batch=128),
        gain("+ MLP epilogue", 330.0, batch=128),
        gain("torch.compile fp16", 300.0, batch=128),
    ]
    first, second = train_ladder.bars(rows)
    assert (first["ratio"], first["bar"], first["met"]) == (3.0, 2.85, True)
    assert (second["ratio"], second["bar"], second["met"]) == (pytest.approx(1.12), 1.15, False)
    assert train_ladder.bars([gain("eager fp32", 100.0), gain("+ MLP epilogue", None)]) == []


def test_gains_stand_beside_the_articles_on_a_gpu_alone():
    line = train_ladder.gains([gain("+ AMP", 163.0)])[0]
    assert (line["rung"], line["speedup"], line["article"], line["peak_gib"]) == ("+ AMP", 1.63, 1.63, 2.0)
    assert train_ladder.gains([gain("+ AMP", 163.0, device="cpu")])[0]["article"] is None
    result = {"tables": {"gains": [line], "bars": []}}
    assert "Swin tiny + AMP" in train_ladder.summary(result)


def test_names_and_wrong_dtypes():
    assert find_suite("train-ladder") is train_ladder
    with pytest.raises(ValueError, match="dtype=fp32: the ladder's mixed precision is fp16 or bf16"):
        train_ladder.run(BenchOptions(dtypes=("fp32",)), QuietShow())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BenchOptions(dtypes=("fp32",)), "mixed precision is fp16 or bf16"),
        (BenchOptions(models=("nosuch",)), "'nosuch' is not a model"),
    ],
)
def test_what_the_ladder_refuses_is_refused_before_the_kernels_run(monkeypatch, options, message):
    monkeypatch.setattr(kernels, "run", lambda *_: pytest.fail("the kernels ran first"))
    with pytest.raises(ValueError, match=message):
        gpu.run(options, QuietShow())
    with pytest.raises(ValueError, match="suite='ladder' is unknown: use cpu, train_ladder, kernels, gpu"):
        find_suite("ladder")


def test_an_interrupted_ladder_leaves_the_kernels_results(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "run", lambda *_: {"cases": ["all of them"]})
    monkeypatch.setattr(train_ladder, "run", interrupted)
    out = tmp_path / "gpu.json"
    assert main(["bench", "--suite", "gpu", "--quick", "--out", str(out)]) == 130
    kept = json.loads(out.read_text())
    assert kept["suite"] == "gpu"
    assert kept["kernels"] == {"cases": ["all of them"]}
    assert "train_ladder" not in kept
