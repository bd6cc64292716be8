"""Checkpoints: whole or not there, refused when damaged, safe to read."""

import pickle
import resource
from contextlib import contextmanager

import pytest
import torch
from training_small import small_config, small_model, small_set

from swin_lessons.training import CheckpointError, list_checkpoints, read_tensors, train, write_tensors


@contextmanager
def full_disk(limit: int):
    """No file may grow beyond `limit` bytes: writing then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def run(tmp_path):
    """A finished run with checkpoints of steps 9 and 12."""
    train(small_model(), small_set(), None, small_config(), tmp_path)
    return tmp_path


def resume(folder):
    return train(small_model(), small_set(), None, small_config(), folder, resume=True)


def test_the_newest_are_kept(run):
    assert [path.stem for path in list_checkpoints(run / "checkpoints")] == ["step-00000009", "step-00000012"]
    assert not list(run.rglob("*.part"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_and_metadata_come_back(tmp_path, dtype):
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": torch.tensor(1).to(dtype)}
    write_tensors(tmp_path / "x.safetensors", tensors, {"note": "hello"})
    read, metadata = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == dtype for name in tensors)
    assert metadata["note"] == "hello"
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o644


def test_shared_memory_is_written_twice(tmp_path):
    tied = torch.ones(3)
    write_tensors(tmp_path / "x.safetensors", {"a": tied, "b": tied}, {})
    assert set(read_tensors(tmp_path / "x.safetensors")[0]) == {"a", "b"}


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_truncated_checkpoint_is_refused(run, kept):
    newest = list_checkpoints(run / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:kept])
    with pytest.raises(
        CheckpointError, match=r"step-00000012.*Delete it to go on from the checkpoint before"
    ):
        resume(run)
    newest.unlink()
    assert len(resume(run).steps) == 12


def test_where_the_first_checkpoint_is_damaged_the_way_out_is_a_new_folder(run):
    first, newest = list_checkpoints(run / "checkpoints")
    newest.unlink()
    first.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000009.*the first one: start again in a new folder"):
        resume(run)


def test_a_flipped_bit_is_found(run):
    newest = list_checkpoints(run / "checkpoints")[-1]
    damaged = bytearray(newest.read_bytes())
    damaged[-3] ^= 4
    newest.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"checksum"):
        resume(run)


def test_code_in_a_file_is_not_run(run, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path / "exploded").touch, ()

    list_checkpoints(run / "checkpoints")[-1].write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"damaged"):
        resume(run)
    assert not (tmp_path / "exploded").exists()


def test_kept_weights_are_no_checkpoint(run):
    newest = list_checkpoints(run / "checkpoints")[-1]
    newest.write_bytes((run / "last.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"not a training checkpoint"):
        resume(run)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    train(small_model(), small_set(), None, small_config(), tmp_path)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    before = newest.read_bytes()
    with full_disk(4000), pytest.raises(CheckpointError, match=r"cannot write .*MB.*Free space"):
        write_tensors(newest, {"a": torch.zeros(10_000)}, {})
    assert newest.read_bytes() == before
    assert not list(tmp_path.rglob("*.part"))


def test_a_run_goes_on_after_the_disk_was_full(tmp_path, run):
    folder = tmp_path / "again"
    config = small_config(log_every=100)
    with full_disk(6000), pytest.raises(CheckpointError, match=r"the run can be resumed"):
        train(small_model(), small_set(), None, config, folder)
    with pytest.warns(UserWarning, match="starts again at step 1"):
        train(small_model(), small_set(), None, config, folder, resume=True)
    expected, found = (read_tensors(path / "last.safetensors")[0] for path in (run, folder))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
