"""`torchrun ... -m swin_lessons train`: what two processes print and write, and how they end."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swin_lessons.cli import main
from swin_lessons.results import load_result
from swin_lessons.training import History

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FAILS = """\
import os
from swin_lessons.cli import main
from swin_lessons.training import loop
original = loop.train_step
def failing(state, *args):
    if state.step == 1 and os.environ["RANK"] == "1":
        raise ValueError("image 7 is no image")
    return original(state, *args)
loop.train_step = failing
raise SystemExit(main())
"""


def start(*words, out: Path, **options) -> subprocess.Popen:
    """Two processes on the CPU, in a session of their own, as a terminal would have started them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    command = [*TORCHRUN, *words, "--device", "cpu", "--out", str(out)]
    return subprocess.Popen(command, env=environment, **pipes, **options)


def train_words(photos, *more) -> list[str]:
    data = f"imagefolder:{photos}"
    words = ["train", "--model", "swin_micro_fmnist", "--data", data, "--steps", "4", "--drop-path", "0.2"]
    return [*words, "--batch-size", "4", "--precision", "fp32", "--augment", "flip=0.5,mixup=0.3", *more]


def test_two_processes_print_and_write_once_and_one_goes_on(photos, tmp_path, capfd):
    one, two = tmp_path / "one", tmp_path / "two"
    options = ("--save-every", "2", "--parallel", "fsdp", "--checkpointing")
    with start("-m", "swin_lessons", *train_words(photos, *options), out=two) as process:
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "4 images a step = 2 processes x 2 images (fsdp, gloo)" in printed
    assert (
        printed.count("swin_micro_fmnist (")
        == printed.count("val top-1  ")
        == printed.count("evaluated in")
        == 1
    )
    assert main([*train_words(photos, "--save-every", "2"), "--device", "cpu", "--out", str(one)]) == 0
    assert_same(one, two)
    newest = max((two / "checkpoints").iterdir())
    assert newest.is_dir()
    newest.rename(tmp_path / newest.name)  # as if it had been stopped after step 2
    assert main([*train_words(photos), "--device", "cpu", "--out", str(two), "--resume"]) == 0
    assert "goes on after step 2 of 4" in capfd.readouterr().out
    assert_same(one, two)


def assert_same(one: Path, two: Path) -> None:
    for name in ("loss", "grad_norm"):
        assert History.read(two).column(name) == pytest.approx(History.read(one).column(name), abs=1e-4)
    first, second = (load_result(folder / "results.json") for folder in (one, two))
    assert second["loss"] == pytest.approx(first["loss"], abs=1e-4)
    assert (second["count"], second["confusion"]) == (first["count"], first["confusion"])
    about = [json.loads((folder / "config.json").read_text()) for folder in (one, two)]
    assert about[0] == about[1]


def test_an_error_on_one_process_ends_all_with_its_message(photos, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    with start(str(tmp_path / "fails.py"), *train_words(photos), out=tmp_path / "run") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "process 1 of 2 stops the run:\nswin-lessons train: image 7 is no image\n" in errors
    assert errors.count("swin-lessons train:") == 1
    assert "Connection closed by peer" not in errors


def test_ctrl_c_ends_all_and_says_how_to_go_on(photos, tmp_path):
    words = train_words(photos, "--steps", "100000", "--eval-every", "5")
    with start("-m", "swin_lessons", *words, out=tmp_path / "run") as process:
        before = list(itertools.takewhile(lambda line: "val loss" not in line, process.stdout))
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert "4 images a step = 2 processes x 2 images (ddp, gloo)\n" in before
    assert "stopped; the same command with --resume goes on with" in printed
    assert errors.count("interrupted\n") == 1
    assert "destroy_process_group" not in errors  # PyTorch's complaint about a group that nobody closed
    deadline = time.monotonic() + 20
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert session_members(process.pid) == []


def session_members(session: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_parallel_without_torchrun_is_refused(photos, tmp_path, capsys):
    assert main([*train_words(photos, "--parallel", "fsdp"), "--out", str(tmp_path / "run")]) == 2
    assert "there is one process: start it with torchrun" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
