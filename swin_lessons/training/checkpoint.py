"""Checkpoints as safetensors: nothing in them can run code, and each is whole or not there.

A checkpoint holds the weights, their moving average, the optimiser's moments and a few numbers. It holds no
generator state: every random number of a run is a function of the seed and the step (see `seeds`).

One process and DDP write a file. FSDP, whose processes hold parts, writes a folder (see `shards`). Each kind can be
resumed by the other, on any number of processes.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from swin_lessons.training.config import TrainConfig
from swin_lessons.training.ema import EMA
from swin_lessons.training.files import PART, atomic_write
from swin_lessons.training.processes import Processes
from swin_lessons.training.shards import STATE, read_shards, write_shards

FORMAT = "swin-lessons checkpoint 1"
FOLDER = "checkpoints"
_NEW_FOLDER = "It is the first one: start again in a new folder (--out)"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used for this run."""


@dataclass
class TrainState:
    """What changes while a run goes on: `step` counts batches, `skipped` those whose gradients overflowed in fp16."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None = None
    step: int = 0
    best: float = -1.0
    skipped: int = 0

    @property
    def updates(self) -> int:
        """Steps of the optimiser, which the learning rate and the average follow."""
        return self.step - self.skipped

    @property
    def averaged(self) -> nn.Module:
        """The model to evaluate and to keep: the moving average where there is one."""
        return self.ema.module if self.ema else self.model


def save_checkpoint(folder: Path, state: TrainState, config: TrainConfig, data: Mapping[str, Any]) -> Path:
    """Write `folder`/step-<step>, then delete all but the `config.keep` newest; every process of a run calls it.

    A sharded model makes a folder of files, any other a file, step-<step>.safetensors, by the first process.

    Raises:
        CheckpointError: it cannot be written; earlier checkpoints are untouched.
    """
    numbers = {
        "step": state.step,
        "best": state.best,
        "skipped": state.skipped,
        "scaler": state.scaler.state_dict(),
        "config": config.to_dict(),
        "data": dict(data),
    }
    tensors, metadata = _tensors(state), {"format": FORMAT, "state": json.dumps(numbers)}
    path, first = folder / f"step-{state.step:08d}", Processes.current().first
    if any(map(is_part, tensors.values())):
        _write_folder(path, tensors, metadata)
    else:
        path = path.with_suffix(".safetensors")
        if first:
            write_tensors(path, tensors, metadata)
    for old in list_checkpoints(folder)[: -config.keep] if first else ():
        _delete(old)
    return path


def _write_folder(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    try:
        write_shards(path, tensors, metadata)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _delete(path: Path) -> None:
    if path.is_dir():
        (path / STATE).unlink()  # without it, what is left is no checkpoint
        shutil.rmtree(path)
    else:
        path.unlink()


def load_checkpoint(path: Path, state: TrainState, config: TrainConfig, data: Mapping[str, Any]) -> None:
    """Bring `state` to where the checkpoint was written.

    Raises:
        CheckpointError: the file is damaged, or belongs to another model, data set or configuration.
    """
    tensors, metadata = _read_checkpoint(path, state)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a training checkpoint ({FORMAT}): name a file from a run's {FOLDER} folder"
        )
    numbers = json.loads(metadata["state"])
    _check_same_run(path, numbers, config, data)
    _fill(path, state, tensors)
    state.scaler.load_state_dict(numbers["scaler"])
    state.step, state.best = numbers["step"], numbers["best"]
    state.skipped = numbers.get("skipped", 0)  # files written before it was counted lack it


def _read_checkpoint(path: Path, state: TrainState) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        return _read_folder(path, state) if path.is_dir() else read_tensors(path)
    except CheckpointError as error:
        first = path in list_checkpoints(path.parent)[:1]
        remedy = _NEW_FOLDER if first else "Delete it to go on from the checkpoint before it"
        raise CheckpointError(f"{error}. {remedy}") from error


def _read_folder(path: Path, state: TrainState | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a sharded checkpoint: as this process's parts where the state is sharded."""
    mine = _named(state) if state else {}

    def target(name: str, whole: Tensor) -> Tensor:
        like = mine.get(name if name in mine else "model." + name.split(".", 2)[-1])
        if like is not None and is_part(like) and like.shape == whole.shape:
            return torch.zeros_like(like, dtype=whole.dtype)
        return torch.zeros_like(whole, device="cpu")

    try:
        return read_shards(path, target)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or cannot be read: {error}") from error


def consolidate(path: Path, out: Path) -> None:
    """Write a sharded checkpoint, the folder `path`, as the file `out` that a single process would have written.

    Raises:
        CheckpointError: the folder is damaged, or the file cannot be written.
    """
    tensors, metadata = _read_folder(path)
    write_tensors(out, tensors, metadata)


def is_part(tensor: Tensor) -> bool:
    """Is it a `DTensor`, of which each process holds a part?"""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Where processes hold parts, each of them calls it."""
    return tensor.full_tensor() if is_part(tensor) else tensor  # type: ignore[attr-defined]


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` on the device of `like`, and in parts where `like` is."""
    if not is_part(like) or is_part(tensor) or tensor.shape != like.shape:
        return tensor.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def load_weights_into(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """`model.load_state_dict(weights)`, whether the model is in parts or not."""
    mine = model.state_dict()
    model.load_state_dict({name: placed_like(tensor, mine[name]) for name, tensor in weights.items()})


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first: files, and the folders of sharded ones."""
    found = (path for path in folder.glob("step-*") if path.suffix != PART)
    return sorted(path for path in found if path.suffix == ".safetensors" or (path / STATE).exists())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and a checksum of their bytes, whole or not at all. Raises CheckpointError."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        with atomic_write(path) as part:
            save_file(copies, part, {**metadata, "crc32": _crc32(copies)})
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in copies.values()) / 1e6
        raise CheckpointError(
            f"cannot write {path} ({size:.1f} MB): {error}. Free space there or choose another folder; "
            "files written before are intact, so the run can be resumed"
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote. Raises CheckpointError for a damaged file; what helps, the caller knows."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or cannot be read: {error}") from error
    if metadata.get("crc32", _crc32(tensors)) != _crc32(tensors):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its bytes")
    return tensors, metadata


def _crc32(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(_bytes(tensors[name]), zlib.crc32(name.encode(), value))
    return f"{value:08x}"


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory as a buffer; NumPy has no bfloat16, but bytes it has."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _tensors(state: TrainState) -> dict[str, Tensor]:
    tensors = _named(state)
    for name, moments in _moments(state).items():
        tensors |= {f"optimizer.{key}.{name}": tensor for key, tensor in moments.items()}
    return tensors


def _named(state: TrainState) -> dict[str, Tensor]:
    """The weights and their average."""
    tensors = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    if state.ema:
        tensors |= {f"ema.{name}": tensor for name, tensor in state.ema.module.state_dict().items()}
    return tensors


def _moments(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The optimiser's tensors by parameter name."""
    names = {id(param): name for name, param in state.model.named_parameters()}
    return {names[id(param)]: moments for param, moments in state.optimizer.state.items()}


def _check_same_run(
    path: Path, numbers: dict[str, Any], config: TrainConfig, data: Mapping[str, Any]
) -> None:
    changed = TrainConfig.from_dict(numbers["config"]).differences(config)
    before = numbers["data"]
    changed += [
        f"{key}: {before.get(key)!r}, {value!r}" for key, value in data.items() if before.get(key) != value
    ]
    if changed:
        raise CheckpointError(
            f"{path} is of another run (there, here): {'; '.join(changed)}. "
            "Resume with the settings it was written with, or start in a new folder"
        )


def _fill(path: Path, state: TrainState, tensors: dict[str, Tensor]) -> None:
    weights, average = _part(tensors, "model."), _part(tensors, "ema.")
    check_same_model(path, state.model, weights)
    load_weights_into(state.model, weights)
    if state.ema:
        load_weights_into(state.ema.module, average)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _part(tensors, "optimizer.").items():
        kind, name = key.split(".", 1)
        moments.setdefault(name, {})[kind] = tensor
    for group in state.optimizer.param_groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            state.optimizer.state[param] = {
                kind: placed_like(tensor, param) for kind, tensor in moments.get(name, {}).items()
            }


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_same_model(path: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Raises CheckpointError unless `weights`, read from `path`, have the names and shapes of `model`'s."""
    mine = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path} is of another model: {len(wrong)} tensors differ, the first is {name} "
            f"({theirs.get(name, 'missing')} there, {mine.get(name, 'missing')} here). "
            "Build the model it was written with"
        )
