"""A run killed with SIGKILL and resumed equals one that was never stopped, bit for bit."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_small import small_config, small_model, small_set

from swin_lessons.models import create_model
from swin_lessons.training import CheckpointError, History, list_checkpoints, read_tensors, train
from swin_lessons.training.history import STEP_COLUMNS, read_rows
from swin_lessons.training.loop import Run

SCRIPT = Path(__file__).with_name("killable.py")


MOMENTS = [
    "step-1",  # before anything is saved
    "step-8",  # in the second epoch, after a checkpoint
    "micro-6",  # between two micro-batches
    "write-3",  # a checkpoint or kept weights half written
    "rename-7",  # written, not renamed
    "log-5",  # half a line in a log
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder of runs, each killed at its moment and then resumed, by one process of its own."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(SCRIPT), *(str(folder / moment) for moment in MOMENTS)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300, check=True)
    return folder


def rows_without_time(path: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader(path.open()))
    return [{name: text for name, text in row.items() if name != "seconds"} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    for log in ("metrics.csv", "evals.csv"):
        assert rows_without_time(one / log) == rows_without_time(other / log)
    for weights in ("last.safetensors", "best.safetensors"):
        first, second = read_tensors(one / weights)[0], read_tensors(other / weights)[0]
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    names = [[path.name for path in list_checkpoints(folder / "checkpoints")] for folder in (one, other)]
    assert names[0] == names[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The run that was never stopped, in this process."""
    folder = tmp_path_factory.mktemp("straight")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    train(small_model(), small_set(), small_set(16, seed=1), small_config(), folder)
    torch.set_num_threads(before)
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_run_ends_as_if_it_had_not_been(killed, straight, moment):
    assert (killed / moment / "statuses").read_text() == f"{-signal.SIGKILL} 0"
    assert_same_run(killed / moment, straight)


@pytest.mark.filterwarnings("ignore:.*holds no checkpoint yet")  # after steps 1 and 2
def test_every_step_can_be_the_last_before_a_stop(tmp_path, straight, monkeypatch):
    """Stop after each of the 12 steps in turn, by an exception in place of a signal: quick, so exhaustive."""
    for stop in range(1, 12):
        folder = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            _stop_after(patch, stop)
            with pytest.raises(InterruptedError):
                train(small_model(), small_set(), small_set(16, seed=1), small_config(), folder)
        train(small_model(), small_set(), small_set(16, seed=1), small_config(), folder, resume=True)
        assert_same_run(folder, straight)


def _stop_after(patch, stop: int) -> None:
    original = Run._after_step

    def stopping(self, epoch, bar):
        original(self, epoch, bar)
        if self.state.step == stop:
            raise InterruptedError

    patch.setattr(Run, "_after_step", stopping)


@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist", "deit_micro_fmnist"])
def test_real_models_resume_exactly(tmp_path, monkeypatch, name):
    """Drop path, bf16, averaging and micro-batches of the models that the lessons train."""
    sets = small_set(img_size=16), small_set(16, seed=1, img_size=16)
    config = small_config(steps=6, precision="bf16", init="xavier", layer_decay=0.8)

    def model():
        torch.manual_seed(0)
        return create_model(name, num_classes=4, img_size=16, drop_path_rate=0.3)

    train(model(), *sets, config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        _stop_after(patch, 4)
        with pytest.raises(InterruptedError):
            train(model(), *sets, config, tmp_path / "stopped")
    train(model(), *sets, config, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_resuming_a_finished_run_changes_nothing(tmp_path, straight):
    train(small_model(), small_set(), small_set(16, seed=1), small_config(), tmp_path)
    model = small_model(3)
    history = train(model, small_set(), small_set(16, seed=1), small_config(), tmp_path, resume=True)
    assert_same_run(tmp_path, straight)
    assert len(history.steps) == 12
    final = read_tensors(straight / "last.safetensors")[0]
    assert all(torch.equal(tensor, final[name]) for name, tensor in model.state_dict().items())


def test_resume_reads_the_newest_checkpoint_not_the_model_it_is_given(tmp_path):
    config = small_config(save_every=6)
    train(small_model(), small_set(), None, config, tmp_path)
    other = small_model(99)
    train(other, small_set(), None, config, tmp_path, resume=True)
    final = read_tensors(tmp_path / "last.safetensors")[0]
    assert all(torch.equal(tensor, final[name]) for name, tensor in other.state_dict().items())


def test_an_old_run_is_not_overwritten(tmp_path):
    train(small_model(), small_set(), None, small_config(steps=2), tmp_path)
    with pytest.raises(FileExistsError, match=r"go on with it .*--resume.*another folder"):
        train(small_model(), small_set(), None, small_config(steps=2), tmp_path)


def test_another_configuration_is_refused_and_bookkeeping_is_not(tmp_path):
    train(small_model(), small_set(), None, small_config(), tmp_path)
    with pytest.raises(CheckpointError, match=r"another run.*lr: 0\.01, 0\.02"):
        train(small_model(), small_set(), None, small_config(lr=2e-2), tmp_path, resume=True)
    train(small_model(), small_set(), None, small_config(keep=1, log_every=5), tmp_path, resume=True)


def test_another_data_set_is_refused(tmp_path):
    train(small_model(), small_set(), None, small_config(), tmp_path)
    with pytest.raises(CheckpointError, match="images: 40, 44"):
        train(small_model(), small_set(44), None, small_config(), tmp_path, resume=True)


def test_another_model_is_refused(tmp_path):
    train(small_model(), small_set(), None, small_config(), tmp_path)
    wider = small_model()
    wider.mlp[0] = torch.nn.Linear(16, 64)
    wider.mlp[2] = torch.nn.Linear(64, 16)
    with pytest.raises(CheckpointError, match=r"another model: 3 tensors differ.*mlp\.0\.bias"):
        train(wider, small_set(), None, small_config(), tmp_path, resume=True)


def test_history_reads_back(straight):
    history = History.read(straight)
    assert history.column("step") == list(range(1, 13))
    assert history.column("step", of="evals") == [4, 8, 12]
    assert history.best["top1"] == max(history.column("top1", of="evals"))


# --- what is gone from a run's folder, or damaged ---


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume(folder: Path, **changes):
    return train(
        small_model(), small_set(), small_set(16, seed=1), small_config(**changes), folder, resume=True
    )


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run stopped after step 8, with checkpoints of steps 3 and 6."""
    with monkeypatch.context() as patch:
        _stop_after(patch, 8)
        with pytest.raises(InterruptedError):
            resume(tmp_path)
    return tmp_path


@pytest.mark.parametrize("run", ["straight", "stopped"])
def test_a_run_whose_checkpoints_are_gone_is_left_as_it_is(run, request, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(run), folder, ignore=lambda *_: ["checkpoints", "copy"])
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"checkpoints are gone.*new folder \(--out\)"):
        resume(folder, save_every=100)  # a later option does not make it a run before its first checkpoint
    assert contents(folder) == before
    assert not (folder / "checkpoints").exists()


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path, straight, monkeypatch):
    with monkeypatch.context() as patch:
        _stop_after(patch, 2)
        with pytest.raises(InterruptedError):
            resume(tmp_path)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv", STEP_COLUMNS)] == [1, 2]
    with pytest.warns(UserWarning, match="no checkpoint yet: the run starts again at step 1"):
        resume(tmp_path)
    assert_same_run(tmp_path, straight)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda log: log.unlink(), r"metrics\.csv is gone"),
        (lambda log: log.write_text(""), r"metrics\.csv lacks steps before 6"),
        (lambda log: log.write_text(log.read_text().replace("\n3,", "\nthree,")), r"line 4 of .*'three,"),
        (lambda log: log.write_text(log.read_text() + "7,junk\n"), r"line 10 of .*metrics\.csv is damaged \('7,junk'"),
        (lambda log: log.write_text("what\n" + log.read_text()), r"line 1 of .*damaged \('what'"),
        (lambda log: log.write_bytes(b"\xff\n" + log.read_bytes()), r"line 1 of .*damaged"),
        (lambda log: log.with_name("evals.csv").unlink(), r"evals\.csv is gone"),
    ],
)  # fmt: skip
def test_a_damaged_log_is_named_and_left_as_it_is(stopped, spoil, message):
    spoil(stopped / "metrics.csv")
    before = contents(stopped)
    with pytest.raises((ValueError, OSError), match=rf"{message}.*new folder \(--out\)"):
        resume(stopped)
    assert contents(stopped) == before


def test_deleted_best_weights_are_written_by_the_next_evaluation(stopped):
    (stopped / "best.safetensors").unlink()
    history = resume(stopped)
    best = max(row["top1"] for row in history.evals if row["step"] > 6)
    assert json.loads(read_tensors(stopped / "best.safetensors")[1]["about"])["val_top1"] == best
