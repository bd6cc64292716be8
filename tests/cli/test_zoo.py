import json

import pytest
import torch

from swin_lessons.cli import main, zoo
from swin_lessons.data import load_dataset
from swin_lessons.models import create_model, list_models, load_weights
from swin_lessons.models.zoo import zoo_folder
from swin_lessons.training import evaluate, read_tensors


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The zoo's commands on a tiny set, and folders of their own."""
    pytest.importorskip("sklearn")
    monkeypatch.setitem(zoo.RECIPES, "swin_micro_fmnist", "--data digits --steps 6 --save-every 2")
    return ["zoo", "--folder", str(tmp_path / "zoo"), "--runs", str(tmp_path / "runs")]


def test_every_recipe_is_a_model_and_a_command():
    from swin_lessons.cli import build_parser

    assert set(zoo.RECIPES) == set(list_models("*_micro_*"))
    for name in zoo.RECIPES:
        args = build_parser().parse_args(zoo.recorded_command(name).split()[1:])
        assert args.model == name


def test_trained_by_its_command_and_measured_again(quick, tmp_path, capsys):
    assert main([*quick, "--train", "swin_micro_fmnist"]) == 0
    path = tmp_path / "zoo" / "swin_micro_fmnist.safetensors"
    tensors, metadata = read_tensors(path)
    about = json.loads(metadata["about"])
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert about["provenance"]["command"] == zoo.recorded_command("swin_micro_fmnist")
    model = create_model("swin_micro_fmnist")
    load_weights(model, path)
    result = evaluate(model, load_dataset("digits", split="test", img_size=32))
    assert result.top1 == about["test_top1"]
    capsys.readouterr()
    assert main([*quick, "--check", "swin_micro_fmnist"]) == 0
    measured = f"{result.top1:.2%}"
    assert capsys.readouterr().out.count(measured) == 2


def test_a_missing_model_says_how_to_get_it(quick, capsys):
    assert main([*quick, "--check", "deit_micro_fmnist"]) == 2
    assert "swin-lessons zoo --train deit_micro_fmnist" in capsys.readouterr().err


def test_the_list_says_how_to_get_what_is_missing(quick, capsys):
    assert main(quick) == 0
    assert "swin-lessons zoo --train deit_micro_fmnist" in capsys.readouterr().out


KEPT = sorted(zoo_folder().glob("*.safetensors"))


def test_every_recipe_has_its_weights():
    assert {path.stem for path in KEPT} == set(zoo.RECIPES)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_weights_are_as_accurate_as_recorded(path):
    result, about = zoo.measure(path, download=False)
    assert path.stat().st_size < 1.5e6
    assert result.top1 == pytest.approx(about["test_top1"], abs=1e-3)  # other processors round differently


def test_the_best_swin_reaches_92_percent():
    """On Fashion-MNIST's test images. The record is measured above."""
    swins = [path for path in KEPT if path.stem.startswith("swin") and path.stem.endswith("fmnist")]
    assert max(zoo.read_about(path)["test_top1"] for path in swins) >= 0.92


def test_resume_without_train_is_named(quick, capsys):
    assert main([*quick, "--resume"]) == 2
    assert "add --train NAME" in capsys.readouterr().err


def test_a_damaged_file_says_how_to_get_it_again(quick, tmp_path, capsys):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "deit_micro_fmnist.safetensors").write_bytes(b"")
    assert main([*quick, "--check", "deit_micro_fmnist"]) == 2
    assert "Train it again: swin-lessons zoo --train deit_micro_fmnist" in capsys.readouterr().err
