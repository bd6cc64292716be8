"""The processes of a run: this one alone, or several that `torchrun` started, on one machine or on many.

Each process holds one device. All of them call the same functions in the same order, because most of these
wait until every process has called them. The first one prints and writes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swin_lessons.data.batches import Share

T = TypeVar("T")
INTERRUPTED, TERMINATED = 130, 143  # exit statuses, as shells have them: 128 + the signal's number


@dataclass(frozen=True)
class Processes:
    """How many processes take part, and which of them this one is."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Processes:
        """Those of PyTorch's process group; this one alone where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        """Is it this one that prints and writes?"""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """This one's images of each batch."""
        return Share(self.rank, self.count)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all processes' tensors, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            dist.barrier()

    def copy_first(self, model: nn.Module) -> None:
        """Give each process the first one's parameters and buffers."""
        if self.count > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the first process through, then the others: it downloads, they find the files."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()


def launched() -> bool:
    """Did `torchrun` start this process, together with others?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def process_group(device: torch.device) -> Iterator[Processes]:
    """Join the processes that `torchrun` started; alone where it did not.

    CPU tensors travel by gloo, CUDA tensors by NCCL. However it ends, the group is closed: also on Ctrl-C, which
    reaches all processes, and when `torchrun` stops this one because another has failed. Where several processes
    fail, as they do once one of them has gone, the first to fail raises its error and the others leave without a word.
    """
    if not launched():
        yield Processes()
        return
    store, rank, count = next(iter(dist.rendezvous("env://")))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    try:
        with _one_signal():
            yield Processes(rank, count)
    except KeyboardInterrupt:
        if rank:
            raise SystemExit(INTERRUPTED) from None
        raise
    except Exception as error:
        if not _is_first_failure(store):
            raise SystemExit(1) from error
        print(f"process {rank} of {count} stops the run:", file=sys.stderr)
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_signal() -> Iterator[None]:
    """The first SIGINT or SIGTERM ends what runs within; those after it cannot disturb the cleaning up.

    On Ctrl-C a process gets SIGINT from the terminal and a moment later SIGTERM from `torchrun`.
    """

    def end(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(TERMINATED)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def _is_first_failure(store: dist.Store) -> bool:
    try:
        return store.add("swin_lessons_failures", 1) == 1
    except RuntimeError:  # the process that keeps the store has failed and gone
        return False


def local_device(name: str) -> str:
    """ "cuda" becomes this process's own GPU, by the number that `torchrun` gave it on its machine.

    Raises:
        ValueError: the machine has fewer GPUs than processes, or all of them would take the same one.
    """
    if name == "cpu" or not launched():
        return name
    if name != "cuda":
        raise ValueError(f"--device {name} is one GPU for all processes: use cuda, and each takes its own")
    number, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= found:
        raise ValueError(
            f"process {number} of this machine has no GPU, there are {found}: "
            f"use torchrun --nproc-per-node {found}, or --device cpu"
        )
    return f"cuda:{number}"
