"""Training runs that kill themselves with SIGKILL at a chosen moment, and are then resumed.

python killable.py FOLDER/MOMENT-NUMBER ..., where MOMENT is
    step     before the optimiser's step NUMBER
    micro    within step NUMBER, between two micro-batches
    write    while the NUMBERth file of tensors is half written
    rename   when the NUMBERth file is written but not renamed
    log      while the NUMBERth write to a log is at half a line
Each run is forked from this one process, which has no threads, so PyTorch is imported once.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from training_small import small_config, small_model, small_set  # noqa: E402

from swin_lessons.training import checkpoint, files, history, loop  # noqa: E402


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(module, name: str, number: int, action) -> None:
    """Replace module.name: the call with this number (from 1) runs `action(original, args)` instead."""
    original, calls = getattr(module, name), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        return action(original, args) if calls[0] == number else original(*args, **kwargs)

    setattr(module, name, counted)


def half_write(original, args) -> None:
    tensors, path, metadata = args
    original(tensors, path, metadata)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    die()


def half_log(original, args) -> None:
    log = args[0]
    with log.path.open("a") as file:
        file.write("".join(log.waiting)[:-20])
    die()


def arm(moment: str, number: int) -> None:
    if moment == "step":
        on_call(loop, "train_step", number, lambda original, args: die())
    elif moment == "micro":
        # three micro-batches a step: die before the second loss of step NUMBER
        on_call(loop.F, "cross_entropy", 3 * (number - 1) + 2, lambda original, args: die())
    elif moment == "write":
        on_call(checkpoint, "save_file", number, half_write)
    elif moment == "rename":
        on_call(files.os, "replace", number, lambda original, args: die())
    elif moment == "log":
        on_call(history.CsvLog, "flush", number, half_log)


def train_child(folder: Path, moment: str = "never", number: int = 0) -> int:
    """Train in a forked child; returns its exit status, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        arm(moment, number)
        loop.train(small_model(), small_set(), small_set(16, seed=1), small_config(), folder, resume=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:  # what PyTorch imports at the first step, once for all
        loop.train(small_model(), small_set(), small_set(16, seed=1), small_config(), scratch)
    for folder in map(Path, sys.argv[1:]):
        moment, _, number = folder.name.partition("-")
        killed, resumed = train_child(folder, moment, int(number)), train_child(folder)
        (folder / "statuses").write_text(f"{killed} {resumed}")
