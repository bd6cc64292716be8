"""`swin-lessons train` on a user's folder: from a command line to weights, and every way it can go wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from swin_lessons.cli import main
from swin_lessons.data import folders, load_dataset
from swin_lessons.models import create_model
from swin_lessons.models.zoo import zoo_folder
from swin_lessons.results import load_result
from swin_lessons.training import History, read_tensors

ROOT = Path(__file__).parents[2]


def train_args(photos, out, *more):
    data = f"imagefolder:{photos}"
    return ["train", "--model", "swin_micro_fmnist", "--data", data, "--out", str(out), *more]


def test_own_folder_gives_a_model_of_its_classes(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_args(photos, out, "--steps", "3")) == 0
    printed = capsys.readouterr().out
    assert "step      3" in printed  # a line for the one evaluation
    assert "val top-1" in printed
    assert "cat" in printed
    tensors, metadata = read_tensors(out / "best.safetensors")
    about = json.loads(metadata["about"])
    assert about["classes"] == ["cat", "dog"]
    assert about["model_kwargs"] == {"img_size": 32, "in_chans": 3, "num_classes": 2}
    model = create_model(about["model"], **about["model_kwargs"])
    model.load_state_dict(tensors)
    results = load_result(out / "results.json")
    assert (results["count"], results["data"]) == (2, f"imagefolder:{photos}")
    assert [row["step"] for row in results["evals"]] == [1, 2, 3]
    assert results["train_seconds"] == results["evals"][-1]["seconds"] > 0
    assert {path.name for path in out.iterdir()} == {
        "config.json", "metrics.csv", "evals.csv", "checkpoints",
        "best.safetensors", "last.safetensors", "results.json",
    }  # fmt: skip


def test_the_same_command_trains_cifar10(tmp_path):
    """On files in CIFAR's binary format: a label byte, then red, green and blue planes."""
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    (tmp_path / "batches.meta.txt").write_text("\n".join(f"kind_{i}" for i in range(10)) + "\n")
    for name in names:
        records = rng.integers(0, 256, (20, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (tmp_path / name).write_bytes(records.tobytes())
    out = tmp_path / "run"
    words = ["train", "--model", "swin_micro_fmnist", "--data", "cifar10", "--root", str(tmp_path)]
    assert main([*words, "--out", str(out), "--steps", "2"]) == 0
    results = json.loads((out / "results.json").read_text())
    assert (results["split"], results["count"]) == ("test", 20)
    config = json.loads((out / "config.json").read_text())
    assert config["model_kwargs"] == {"img_size": 32, "in_chans": 3, "num_classes": 10}


@pytest.mark.parametrize("model", ["swinv2_micro_fmnist", "deit_micro_fmnist", "swin_micro_scenes"])
def test_every_micro_model_trains_on_a_folder(photos, tmp_path, model):
    words = ["train", "--model", model, "--data", f"imagefolder:{photos}", "--out", str(tmp_path / "run")]
    assert main([*words, "--steps", "1", "--batch-size", "2"]) == 0


def test_defaults_learn_three_images_a_class(photos, tmp_path):
    """Without any option: dark and bright images are told apart."""
    assert main(train_args(photos, tmp_path / "run")) == 0
    losses = History.read(tmp_path / "run").column("loss")
    assert losses[-1] < 0.2 * losses[0]
    assert json.loads((tmp_path / "run" / "results.json").read_text())["top1"] == 1


def test_resume_goes_on_and_repeats_the_recipe(photos, tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    options = (
        "--steps",
        "4",
        "--save-every",
        "1",
        "--keep",
        "9",
        "--drop-path",
        "0.2",
        "--augment",
        "flip=0.5",
    )
    assert main(train_args(photos, straight, *options)) == 0
    assert main(train_args(photos, stopped, *options)) == 0
    for step in (3, 4):  # as if it had been stopped after step 2
        (stopped / "checkpoints" / f"step-{step:08d}.safetensors").unlink()
    assert main(train_args(photos, stopped, "--resume")) == 0
    one, other = (read_tensors(folder / "last.safetensors")[0] for folder in (straight, stopped))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert History.read(straight).column("loss") == History.read(stopped).column("loss")


def test_steps_by_fused_kernels_are_those_of_pytorch(photos, tmp_path):
    """Blocks, attention and optimiser; without a GPU in Triton's interpreter. Ten steps: tests/models/test_fused.py."""
    pytest.importorskip("triton")
    options = ("--steps", "3", "--eval-every", "3", "--batch-size", "2", "--drop-path", "0.2", "--ema", "0.9")
    fused = ("--kernels", "triton", "--attention", "triton", "--optimizer", "triton")
    losses = []
    for name, more in (("plain", ()), ("fused", fused)):
        words = [
            "train",
            "--model",
            "swinv2_micro_fmnist",
            "--data",
            f"imagefolder:{photos}",
            "--out",
            str(tmp_path / name),
        ]
        assert main([*words, "--precision", "fp32", *options, *more]) == 0
        losses.append(History.read(tmp_path / name).column("loss"))
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    assert config["train"]["optimizer"] == "triton"


def test_wrong_ways_to_run_are_named(photos, tmp_path, capsys):
    words = train_args(photos, tmp_path / "run", "--steps", "1")
    expect_error(capsys, [*words, "--kernels", "fast"], "kernels='fast': choose 'torch', 'triton', or parts")
    expect_error(capsys, [*words, "--attention", "flash"], "attention='flash'")
    expect_error(
        capsys, [*words, "--optimizer", "sgd"], "TrainConfig.optimizer is 'sgd': use one of adamw, triton"
    )


def test_eval_only_changes_nothing_but_the_results(photos, tmp_path, capsys):
    out = tmp_path / "run"
    main(train_args(photos, out, "--steps", "2"))
    before = (out / "best.safetensors").read_bytes()
    capsys.readouterr()
    assert main(train_args(photos, out, "--eval-only")) == 0
    assert "val top-1" in capsys.readouterr().out
    assert (out / "best.safetensors").read_bytes() == before


def expect_error(capsys, arguments, *parts, status=2):
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("swin-lessons train: ")
    for part in parts:
        assert part in error


def test_errors_about_the_folder(photos, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    expect_error(capsys, train_args(empty, tmp_path / "run"), str(empty), "class folders")
    expect_error(capsys, train_args(tmp_path / "nowhere", tmp_path / "run"), "does not exist")
    for path in (photos / "dog").iterdir():
        path.unlink()
    (photos / "dog").rmdir()
    expect_error(capsys, train_args(photos, tmp_path / "run"), "one class, 'cat'", "at least two")


def test_a_truncated_image_is_named_and_skipped_only_when_asked(photos, tmp_path, capsys):
    bad = photos / "cat" / "bad.png"
    bad.write_bytes((photos / "cat" / "0.png").read_bytes()[:200])
    expect_error(capsys, train_args(photos, tmp_path / "run"), str(bad))
    with pytest.warns(UserWarning, match="bad"):
        assert main(train_args(photos, tmp_path / "run", "--steps", "1", "--skip-bad")) == 0


def test_too_small_an_image_is_named(photos, tmp_path, capsys):
    Image.new("RGB", (2, 2)).save(photos / "cat" / "dot.png")
    expect_error(capsys, train_args(photos, tmp_path / "run"), "dot.png")


def test_errors_about_the_run_folder(photos, tmp_path, capsys):
    out = tmp_path / "run"
    expect_error(capsys, train_args(photos, out, "--resume"), "holds no run", "without --resume")
    main(train_args(photos, out, "--steps", "1"))
    expect_error(capsys, train_args(photos, out), "holds a run already", "--resume")
    expect_error(capsys, train_args(photos, out, "--resume", "--lr", "0.5"), "another run", "lr: ")
    other = ["train", "--model", "deit_micro_fmnist", "--data", f"imagefolder:{photos}", "--out", str(out)]
    expect_error(capsys, [*other, "--resume"], "swin_micro_fmnist, not deit_micro_fmnist")
    (tmp_path / "file").write_text("")
    expect_error(
        capsys, train_args(photos, tmp_path / "file" / "run"), "cannot write", "choose another folder"
    )


def test_errors_about_the_recipe(photos, tmp_path, capsys):
    out = tmp_path / "run"
    expect_error(capsys, train_args(photos, out, "--lr", "-1"), "TrainConfig.lr is -1.0")
    expect_error(capsys, train_args(photos, out, "--augment", "twist=1"), "twist")
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(photos, tmp_path, capsys):
    expect_error(capsys, train_args(photos, tmp_path / "run", "--device", "cuda"), "--device cpu")


def test_a_diverging_run_stops_with_its_step(photos, tmp_path, capsys):
    options = "--steps", "40", "--lr", "1e30", "--clip-norm", "1e30", "--warmup", "0", "--precision", "fp32"
    expect_error(
        capsys, train_args(photos, tmp_path / "run", *options), "at step ", "smaller lr", "--out", status=1
    )


# --- what a kept run must not silently become ---


@pytest.fixture
def kept_run(photos, tmp_path):
    """A finished run of two steps: its folder, its data, and the command's words."""
    out = tmp_path / "kept"
    words = train_args(photos, out, "--steps", "2")
    assert main(words) == 0
    return out, photos, words


@pytest.mark.parametrize("mode", ["--resume", "--eval-only"])
def test_renamed_classes_are_refused(kept_run, mode, capsys):
    _, data, words = kept_run
    (data / "cat").rename(data / "zebra")
    assert main([*words, mode]) == 2
    assert "trained on other classes: cat there, zebra here" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--drop-path 0.9", "--window-size 2", "--img-size 48"])
def test_another_model_is_refused(kept_run, option, capsys):
    _, _, words = kept_run
    assert main([*words, *option.split(), "--resume"]) == 2
    assert f"{option}: the run in" in capsys.readouterr().err


def test_weights_of_another_model_are_refused(kept_run, capsys):
    out, _, words = kept_run
    shutil.copy(zoo_folder() / "swinv2_micro_fmnist.safetensors", out / "best.safetensors")
    assert main([*words, "--eval-only"]) == 2
    assert "is of another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is damaged"), ("[]", "is damaged"), ("{}", "lacks classes")]
)
def test_a_damaged_config_is_named(kept_run, text, message, capsys):
    out, _, words = kept_run
    (out / "config.json").write_text(text)
    assert main([*words, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error
    assert message in error


def test_checkpoints_without_resume_are_not_picked_up(kept_run, capsys):
    out, _, words = kept_run
    (out / "config.json").unlink()
    assert main(words) == 2
    assert "holds checkpoints of another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --model swin_micro_fmnist --data digits --threads -2", "'-2': use a whole number from 1"),
        ("train --model swin_micro_fmnist --data digits --threads 100000", "'100000': use a whole number"),
        ("profile swin_micro_fmnist --threads 0", "'0': use a whole number from 1"),
        ("bench --threads x", "'x': use a whole number"),
    ],
)
def test_threads_are_checked(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["train --model swin_micro_fmnist --data digits", "profile swin_micro_fmnist"]
)
def test_an_unknown_device_is_named(command, capsys):
    assert main([*command.split(), "--device", "gpu"]) == 2
    assert "--device 'gpu' is unknown: use auto, cpu, cuda" in capsys.readouterr().err


def test_a_batch_of_nothing_is_named(tmp_path, capsys):
    words = f"train --model swin_micro_fmnist --data digits --batch-size 0 --out {tmp_path / 'x'}"
    assert main(words.split()) == 2
    assert "TrainConfig.batch_size is 0" in capsys.readouterr().err


# --- what is wrong is said before anything is written ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--augment shiftt=1", "no 'shiftt=1'; write none, light"),
        ("--augment shift=32", "shift=32 moves the whole image out"),
        ("--augment rand_augment=x", "rand_augment=x: timm knows no such words"),
        ("--img-size 0", "--img-size 0 is too small for swin_micro_fmnist: use 8 or more"),
        ("--img-size 5", "--img-size 5 is too small"),
        ("--seed -1", "TrainConfig.seed is -1"),
        ("--seed 99999999999999999999", "TrainConfig.seed is 99999999999999999999: use"),
        ("--warmup 1000 --steps 3", "warmup is 1000 steps, but the run has 3"),
    ],
)
def test_a_wrong_option_leaves_no_folder(photos, tmp_path, capsys, options, message):
    out = tmp_path / "run"
    expect_error(capsys, train_args(photos, out, *options.split()), message)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--attention triton", "--attention triton: tensors on cpu need a CUDA GPU"),
        ("--kernels norm --optimizer triton", "--kernels norm, --optimizer triton: tensors on cpu need"),
        ("--kernels cuda", "kernels='cuda': choose 'torch', 'triton', or parts"),
    ],
)
def test_kernels_that_cannot_run_leave_no_folder(photos, tmp_path, capsys, monkeypatch, options, message):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    out = tmp_path / "run"
    expect_error(capsys, train_args(photos, out, "--device", "cpu", *options.split()), message)
    assert not out.exists()


@pytest.mark.parametrize("mode", [[], ["--resume"], ["--eval-only"]])
def test_a_file_is_no_run_folder(photos, tmp_path, capsys, mode):
    (tmp_path / "file").write_text("kept")
    expect_error(
        capsys, train_args(photos, tmp_path / "file", *mode), "is a file, not a folder; choose another"
    )
    assert (tmp_path / "file").read_text() == "kept"


def test_eval_only_without_a_run_speaks_of_no_other_option(photos, tmp_path, capsys):
    words = train_args(photos, tmp_path / "no", "--eval-only")
    expect_error(capsys, words, "holds no run", "train without --eval-only first")


def test_a_resumed_run_says_where_it_stands(kept_run, capsys):
    out, _, words = kept_run
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "finished: 2 of 2 steps" in printed.split("val top-1")[0]
    (out / "checkpoints" / "step-00000002.safetensors").unlink()  # as if it had been stopped after step 1
    assert main([*words, "--resume"]) == 0
    assert "goes on after step 1 of 2" in capsys.readouterr().out


def test_the_page_s_program_uses_the_trained_model(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photos.rename("my_pictures")
    shutil.copy("my_pictures/dog/1.png", "one.jpg")
    page = (ROOT / "book" / "how_to_run.md").read_text(encoding="utf-8").split("### Use what you have")[1]
    words = "train --model swin_micro_fmnist --data imagefolder:my_pictures --steps 2"
    assert main(words.split()) == 0
    capsys.readouterr()
    names = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert capsys.readouterr().out in ("cat\n", "dog\n")
    folder = load_dataset("imagefolder:my_pictures", split="all", img_size=32)
    as_in_training = folder[[str(path) for path in folder.files].index("my_pictures/dog/1.png")][0]
    torch.testing.assert_close(names["image"], as_in_training)


@pytest.fixture
def bad_photo(photos, monkeypatch):
    """An image that is found to be cut short when training reads it, and its whole bytes."""
    monkeypatch.setattr(folders, "CHECK_BYTES", 0)
    path = photos / "cat" / "1.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    return path, whole


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_way_out_of_a_bad_image_works(photos, bad_photo, workers, tmp_path, capsys):
    path, whole = bad_photo
    options = "--steps", "2", "--batch-size", "2", "--workers", workers
    expect_error(
        capsys, train_args(photos, tmp_path / "run", *options), str(path), "--resume", "--skip-bad", "--out"
    )
    with pytest.warns(UserWarning, match="skipped 1 of 6 images: "):
        assert main(train_args(photos, tmp_path / "new", *options, "--skip-bad")) == 0
    path.write_bytes(whole)
    with pytest.warns(UserWarning, match="starts again at step 1"):
        assert main(train_args(photos, tmp_path / "run", *options, "--resume")) == 0


def test_damaged_best_weights_can_be_replaced_by_the_last(kept_run, capsys):
    out, _, words = kept_run
    (out / "best.safetensors").write_bytes(b"")
    for mode in ("--eval-only", "--resume"):
        assert main([*words, mode]) == 2
        assert f"Copy {out / 'last.safetensors'} over it" in capsys.readouterr().err
    shutil.copy(out / "last.safetensors", out / "best.safetensors")
    assert main([*words, "--eval-only"]) == 0


def test_damaged_best_weights_of_a_stopped_run_are_written_again(photos, tmp_path, capsys):
    out = tmp_path / "run"
    words = train_args(photos, out, "--steps", "4", "--save-every", "2", "--eval-every", "2")
    assert main(words) == 0
    (out / "checkpoints" / "step-00000004.safetensors").unlink()  # as if it had been stopped after step 2
    (out / "last.safetensors").unlink()
    (out / "best.safetensors").write_bytes(b"")
    assert main([*words, "--eval-only"]) == 2
    assert "Delete it and go on with --resume" in capsys.readouterr().err
    (out / "best.safetensors").unlink()
    assert main([*words, "--resume"]) == 0


def test_a_folder_may_be_written_in_another_way(kept_run, monkeypatch, capsys):
    _, data, words = kept_run
    monkeypatch.chdir(data.parent)
    words = [f"imagefolder:./{data.name}" if word.startswith("imagefolder:") else word for word in words]
    assert main([*words, "--resume"]) == 0
    shutil.copytree(data, data.parent / "other")
    words = ["imagefolder:other" if word.startswith("imagefolder:") else word for word in words]
    assert main([*words, "--resume"]) == 2
    assert "not imagefolder:other: set --out" in capsys.readouterr().err
