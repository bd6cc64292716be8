"""Two processes do what one does: same losses, same weights, every image counted once. Either resumes the other.

The two processes run in `two_processes.py`, all cases at once; the runs of one process are made here.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import two_processes
from training_small import small_set
from two_processes import CASES, FP16, STOP, config, overflowing, sets8, swin

from swin_lessons.training import (
    CheckpointError,
    History,
    consolidate,
    evaluate,
    list_checkpoints,
    read_tensors,
    train,
)
from swin_lessons.training.parallel import blocks, choose_parallel
from swin_lessons.training.processes import Processes, local_device

SCRIPT = Path(two_processes.__file__)
STARTED_HERE = ("one-then-ddp", "one-then-fsdp")


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """A folder with the run of each case."""
    folder = tmp_path_factory.mktemp("several")
    for name in STARTED_HERE:
        two_processes.run(folder / name, swin(), stop=STOP)
    command = [sys.executable, str(SCRIPT), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """From a model's name to the run of one process, made when first asked for."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("single")
        two_processes.run(folder, swin(name))
        return folder

    return run


def assert_same_numbers(one: Path, other: Path) -> None:
    """Losses, norms and evaluations to 1e-5, final weights to what eight steps of Adam make of rounding."""
    first, second = History.read(one), History.read(other)
    assert first.column("lr") == second.column("lr")
    for name in ("loss", "grad_norm"):
        assert second.column(name) == pytest.approx(first.column(name), abs=1e-5)
    assert len(first.evals) == len(second.evals) > 0
    for mine, theirs in zip(first.evals, second.evals, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert (theirs["top1"], theirs["top5"]) == (mine["top1"], mine["top5"])
    for name in ("last.safetensors", "best.safetensors"):
        assert_close_weights(read_tensors(one / name), read_tensors(other / name))


def assert_close_weights(one, other) -> None:
    assert one[0].keys() == other[0].keys()
    torch.testing.assert_close(other[0], one[0], atol=2e-4, rtol=0)
    assert one[1].keys() == other[1].keys()


V1, V2, DEIT = "swin_micro_fmnist", "swinv2_micro_fmnist", "deit_micro_fmnist"


@pytest.mark.parametrize(
    ("case", "model"),
    [
        ("ddp", V1), ("fsdp", V1), ("fsdp-v2", V2), ("deit", DEIT), ("ddp-passes", V1), ("fsdp-passes", V1),
        ("ddp-recomputed", V1), ("fsdp-recomputed", V1), ("one-then-ddp", V1), ("one-then-fsdp", V1),
        ("fsdp-then-ddp", V1),
    ],
)  # fmt: skip
def test_two_processes_equal_one(several, single, case, model):
    """With drop path, mixing, erasing and averaging on; "passes" are 3 images and 1."""
    assert_same_numbers(single(model), several / case)


@pytest.mark.parametrize("case", ["ddp-then-one", "fsdp-then-one"])
def test_one_process_goes_on_with_what_two_began(several, single, case):
    newest = list_checkpoints(several / case / "checkpoints")[-1]
    assert newest.name == ("step-00000004" if case.startswith("fsdp") else "step-00000004.safetensors")
    two_processes.run(several / case, swin(), resume=True)
    assert_same_numbers(single(V1), several / case)


def test_drop_path_and_the_test_itself_matter(single, several, tmp_path):
    """Without drop path the losses differ by far more than 1e-5, so the draws of the others were the same."""
    two_processes.run(tmp_path, swin(drop_path=0.0))
    one, other = (History.read(folder).column("loss") for folder in (single(V1), tmp_path))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3


@pytest.mark.parametrize("case", ["ddp-fp16", "fsdp-fp16"])
def test_an_overflow_on_one_process_skips_the_step_on_all(several, case, tmp_path):
    train(overflowing(), *sets8(), config(**FP16), tmp_path)
    one, two = History.read(tmp_path), History.read(several / case)
    assert two.column("lr") == one.column("lr")
    assert one.column("lr")[1] == one.column("lr")[2]  # step 2 is the skipped one
    assert two.column("loss") == pytest.approx(one.column("loss"), abs=2e-3)  # fp16's rounding
    state = state_of(list_checkpoints(several / case / "checkpoints")[-1])
    assert (state["skipped"], state["scaler"]["scale"]) == (1, 32768)


def state_of(checkpoint: Path) -> dict:
    if checkpoint.is_dir():
        return json.loads(json.loads((checkpoint / "state.json").read_text())["state"])
    return json.loads(read_tensors(checkpoint)[1]["state"])


@pytest.mark.parametrize("count", [23, 3, 1])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_evaluation_counts_each_image_once(several, kind, count):
    expected = evaluate(swin(), small_set(count, seed=2, img_size=16))
    for rank in (0, 1):
        loss, top1, top5, confusion = json.loads(
            (several / "evaluation" / f"{kind}-{count}-{rank}.json").read_text()
        )
        assert loss == pytest.approx(expected.loss, abs=1e-5)
        assert (top1, top5) == (expected.top1, expected.top5)
        assert confusion == expected.confusion.tolist()
        assert sum(map(sum, confusion)) == count


# --- checkpoints ---


def test_a_sharded_checkpoint_consolidated_is_the_file_of_one_process(several, single, tmp_path):
    folders = list_checkpoints(several / "fsdp" / "checkpoints")
    assert [path.name for path in folders] == ["step-00000004", "step-00000008"]
    consolidate(folders[0], tmp_path / "step-00000004.safetensors")
    found = read_tensors(tmp_path / "step-00000004.safetensors")
    expected = read_tensors(single(V1) / "checkpoints" / "step-00000004.safetensors")
    assert_close_weights(expected, found)
    assert {name: t.dtype for name, t in found[0].items()} == {
        name: t.dtype for name, t in expected[0].items()
    }
    mine, theirs = (json.loads(metadata["state"]) for _, metadata in (found, expected))
    assert mine == theirs


def test_each_process_writes_its_own_part(several):
    checkpoint = several / "fsdp" / "checkpoints" / "step-00000004"
    whole = sum(
        t.nbytes
        for t in read_tensors(several / "ddp" / "checkpoints" / "step-00000004.safetensors")[0].values()
    )
    sizes = [path.stat().st_size for path in sorted(checkpoint.glob("*.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * whole
    assert not list(several.rglob("*.part"))


def test_a_flipped_bit_in_a_part_is_found_by_all(several):
    for rank in (0, 1):
        error = (several / "damaged" / f"error-{rank}").read_text()
        assert error.startswith("CheckpointError: ")
        assert "shard-00001-model-00001-of-00001.safetensors is damaged: its checksum does not fit" in error
        assert "It is the first one: start again in a new folder" in error


def test_a_missing_part_is_named(several, tmp_path):
    path = list_checkpoints(several / "damaged" / "checkpoints")[-1]
    (path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard-00002.* is gone"):
        consolidate(path, tmp_path / "x.safetensors")


def test_a_folder_without_its_last_file_is_no_checkpoint(tmp_path):
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000008.part").mkdir()
    assert list_checkpoints(tmp_path) == []


# --- choices ---


def test_blocks_are_the_members_of_the_innermost_lists():
    assert [type(block).__name__ for block in blocks(swin())] == ["SwinBlock"] * 4
    assert len(blocks(swin(DEIT))) == len(swin(DEIT).blocks)
    assert blocks(torch.nn.Linear(2, 2)) == []


def test_parallel_needs_processes_and_a_known_word():
    with pytest.raises(ValueError, match="'fsdp', but there is one process: start it with torchrun"):
        choose_parallel("fsdp", Processes())
    with pytest.raises(ValueError, match="'tp': use one of ddp, fsdp"):
        choose_parallel("tp", Processes(0, 2))
    assert choose_parallel(None, Processes()).__class__.__name__ == "Single"
    assert choose_parallel(None, Processes(0, 2)).__class__.__name__ == "Replicas"
    assert choose_parallel("fsdp", Processes(1, 2)).__class__.__name__ == "Shards"


def test_each_process_takes_its_own_gpu(monkeypatch):
    assert local_device("cuda:1") == "cuda:1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda") == "cuda:1"
    assert local_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="cuda:1 is one GPU for all processes: use cuda"):
        local_device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ValueError, match=r"process 2 .* has no GPU, there are 2: use torchrun --nproc-per-node 2"
    ):
        local_device("cuda")


def test_every_case_is_looked_at():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in CASES if f'"{name}"' not in source] == []
