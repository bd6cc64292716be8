"""Several processes by hand, for lesson 13: the same few steps four times, and what each of them sends and keeps.

    torchrun --nproc-per-node 2 -m swin_lessons.training.by_hand FOLDER

trains a small Swin with gradients averaged by hand, with DDP, with DDP in two passes, and with FSDP2, and writes
FOLDER/report.json and the sharded weights, FOLDER/shards. One process, without torchrun, does the first alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.training.parallel import shard
from swin_lessons.training.processes import Processes, process_group
from swin_lessons.training.shards import write_shards

IMAGES, STEPS, LR = 16, 4, 1e-3


def small_swin() -> nn.Module:
    """The same weights in every process."""
    from swin_lessons.models import create_model

    torch.manual_seed(0)
    return create_model("swin_micro_fmnist")


def batch() -> tuple[Tensor, Tensor]:
    """Images (16, 1, 32, 32) and labels (16,): the whole batch, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, 1, 32, 32, generator=generator)
    return x, torch.randint(10, (IMAGES,), generator=generator)


def average_gradients(model: nn.Module) -> None:
    """What data parallel training adds to a step: afterwards all processes have the mean of their gradients."""
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)  # the sum, in place
        p.grad /= dist.get_world_size()


def fit(model: nn.Module, rank: int = 0, count: int = 1, average: Any = None, passes: int = 1) -> list[float]:
    """A few steps on this process's images; the losses of the whole batch.

    Args:
        model: trained in place; DDP and FSDP2 average the gradients themselves.
        rank, count: which process this is, of how many: it takes images rank, rank + count, ...
        average: called with the model between backward pass and optimiser.
        passes: the images in so many parts, whose gradients add up.
    """
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    x, y = (tensor[rank::count] for tensor in batch())
    losses = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for i, (images, labels) in enumerate(zip(x.chunk(passes), y.chunk(passes), strict=True), 1):
            quiet = isinstance(model, nn.parallel.DistributedDataParallel) and i < passes
            with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
                loss = F.cross_entropy(model(images), labels) / passes
                loss.backward()
            total += loss.detach()
        if average:
            average(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(Processes(rank, count).sum(total).item() / count)
    return losses


def ddp_counted(model: nn.Module) -> tuple[nn.Module, list[int]]:
    """The model in DDP, and a list to which each step's all-reduces add the bytes of their buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped, sizes = nn.parallel.DistributedDataParallel(model), []

    def hook(group, bucket):  # no annotations: DDP would compare them with its own
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    return wrapped, sizes


def run(processes: Processes, folder: Path) -> dict[str, Any]:
    """All four ways."""
    mine: Callable[..., list[float]] = lambda model, **more: fit(  # noqa: E731
        model, processes.rank, processes.count, **more
    )
    report: dict[str, Any] = {"by hand": {"losses": mine(small_swin(), average=average_gradients)}}
    for passes in (1, 2):
        model, sizes = ddp_counted(small_swin())
        losses = mine(model, passes=passes)
        report[f"DDP, {passes} pass" + "es" * (passes > 1)] = {"losses": losses, "bytes": sum(sizes) // STEPS}
    sharded = small_swin()
    shard(sharded, processes)
    losses = mine(sharded)
    kept = sum(p.to_local().nbytes for p in sharded.parameters())  # type: ignore[attr-defined]
    report["FSDP2"] = {"losses": losses, "kept": kept}
    write_shards(folder / "shards", sharded.state_dict(), {})
    return report


def main(folder: Path) -> None:
    """Run, and let the first process write."""
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")) as processes:
        report = run(processes, folder) if processes.count > 1 else {"one": {"losses": fit(small_swin())}}
        if processes.first:
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
