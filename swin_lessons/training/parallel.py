"""One step on several devices: each takes its share of the batch, and gradients are averaged.

* DDP: every process holds the whole model and averages the gradients after the last pass of a step.
* FSDP2: every process holds 1/n of each weight, gradient and moment. A block's weights are gathered when it runs.

Source: PyTorch's `DistributedDataParallel` (arXiv:2006.15704) and `fully_shard` (arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swin_lessons.models.layers import DropPath
from swin_lessons.training.checkpoint import TrainState
from swin_lessons.training.config import TrainConfig
from swin_lessons.training.optim import build_optimizer
from swin_lessons.training.processes import Processes
from swin_lessons.training.seeds import seed_everything

PARALLEL = ("ddp", "fsdp")


class Single:
    """One process, which has the model and the batch for itself."""

    def place(self, state: TrainState, config: TrainConfig) -> None:
        """Make the model ready for `step_state`."""

    def step_state(self, state: TrainState, images: int, seed: int) -> TrainState:
        """The state that `train_step` takes for a step on `images` images; `seed` is the step's."""
        return state

    def leave(self, state: TrainState) -> None:
        """Give the model back as one that knows of no other process's images."""


class Several(Single):
    """What DDP and FSDP2 have in common."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    def step_state(self, state: TrainState, images: int, seed: int) -> TrainState:
        rows = torch.from_numpy(self.processes.share.rows(images * self.processes.count))
        return replace(
            state, model=Passes(self.module(state), rows, len(rows) * self.processes.count, seed, self.sync)
        )

    def leave(self, state: TrainState) -> None:
        _share_drop_path(state.model, None)

    def module(self, state: TrainState) -> nn.Module:
        """What is called with the images of a pass."""
        raise NotImplementedError

    def sync(self, module: nn.Module, on: bool) -> None:
        """Do the next backward pass's gradients travel?"""
        raise NotImplementedError


class Replicas(Several):
    """DDP."""

    def place(self, state: TrainState, config: TrainConfig) -> None:
        device = next(state.model.parameters()).device
        ids = [device] if device.type == "cuda" else None
        self.ddp = nn.parallel.DistributedDataParallel(state.model, device_ids=ids)

    def module(self, state: TrainState) -> nn.Module:
        return self.ddp

    def sync(self, module: nn.Module, on: bool) -> None:
        self.ddp.require_backward_grad_sync = on  # what `no_sync` sets, and it is read in the forward pass


class Shards(Several):
    """FSDP2."""

    def place(self, state: TrainState, config: TrainConfig) -> None:
        shard(state.model, self.processes)
        if state.ema:
            shard(state.ema.module, self.processes)
        state.optimizer = build_optimizer(state.model, config)  # the parameters are others now

    def module(self, state: TrainState) -> nn.Module:
        return state.model

    def sync(self, module: nn.Module, on: bool) -> None:
        module.set_requires_gradient_sync(on)  # type: ignore[operator]


def choose_parallel(name: str | None, processes: Processes) -> Single:
    """How to run on these processes: "ddp" or "fsdp"; None is "ddp" where there are several.

    Raises:
        ValueError: another word, or one process alone.
    """
    if name not in (None, *PARALLEL):
        raise ValueError(f"parallel is {name!r}: use one of {', '.join(PARALLEL)}")
    if processes.count == 1:
        if name:
            raise ValueError(
                f"parallel is {name!r}, but there is one process: start it with torchrun --nproc-per-node N"
            )
        return Single()
    return Shards(processes) if name == "fsdp" else Replicas(processes)


class Passes(nn.Module):
    """The model in one step: gradients travel in the last pass alone, and drop path is that of the whole batch.

    Before each pass the generators are seeded as for a single process, and drop path draws for every image of the
    batch, of which the pass takes its own. So it does not matter how a batch is cut into passes and processes.

    Args:
        model: called with the images of a pass.
        rows: where this process's images lie in the whole batch, of `total` images.
        seed: the step's.
        sync: says whether the gradients of the next backward pass travel.
    """

    def __init__(
        self, model: nn.Module, rows: Tensor, total: int, seed: int, sync: Callable[[nn.Module, bool], None]
    ) -> None:
        super().__init__()
        self.model, self.rows, self.total, self.seed, self.sync = model, rows, total, seed, sync
        self.done = 0

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) of one pass -> logits (B, num_classes)."""
        rows = self.rows[self.done : self.done + len(x)].to(x.device)
        self.done += len(x)
        self.sync(self.model, self.done == len(self.rows))
        seed_everything(self.seed)
        _share_drop_path(self.model, (rows, self.total))
        return self.model(x)


def _share_drop_path(model: nn.Module, share: tuple[Tensor, int] | None) -> None:
    """Let drop path draw for a whole batch and take some rows of it; None lets it draw for its own images again."""
    for module in model.modules():
        if isinstance(module, DropPath):
            module.__dict__.pop("keep", None)
            if share:
                setattr(module, "keep", partial(_keep_rows, module, *share))  # noqa: B010 (mypy: a method)


def _keep_rows(drop_path: DropPath, rows: Tensor, total: int, B: int, like: Tensor) -> Tensor:
    """`DropPath.keep` for the images at `rows` of a batch of `total`."""
    return DropPath.keep(drop_path, total, like)[rows]


def shard(model: nn.Module, processes: Processes) -> None:
    """Cut each parameter along its first axis, one part a process, in place. Blocks are gathered one by one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (processes.count,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What a model repeats: the members of its innermost module lists (Swin), or of its own sequences (ViT)."""
    lists: list[Any] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    lists = lists or [module for module in model.children() if isinstance(module, nn.Sequential)]
    members = [member for each in lists for member in each]
    return [block for block in members if not _has_list(block) and any(True for _ in block.parameters())]


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) for part in module.modules())
