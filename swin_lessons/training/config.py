"""Every choice of a training run in one data class, written to and read from JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from swin_lessons.data.batches import parse_augment

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
INITS = ("default", "xavier")
OPTIMIZERS = ("adamw", "triton")
# Fields that do not change the arithmetic of a run, so a resumed run may change them.
BOOKKEEPING = frozenset({"save_every", "log_every", "keep", "workers"})


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Lengths are in epochs, or in steps where `steps` is given; rates are per step.

    Attributes:
        epochs: passes over the training set; ignored where `steps` is given.
        steps: optimiser steps in all.
        batch_size: images an optimiser step sees.
        micro_batch: images in one forward and backward pass; the gradients of a step's micro-batches add up
            to those of the whole batch. None: the whole batch at once.
        lr, min_lr: learning rate after the warm-up and at the end of the cosine.
        warmup: part of all steps (below 1) or number of steps (1 and more) with a linearly growing rate.
        weight_decay: AdamW's decay of matrices; vectors, biases and `model.no_weight_decay()` have none.
        layer_decay: learning-rate factor from one layer to the one below it; 1 is off.
        betas: AdamW's decay rates of the first and second moment.
        clip_norm: largest L2 norm of the whole gradient; None is off.
        ema: decay of the moving average of the weights; 0 is off.
        label_smoothing: share of the target spread over all classes.
        augment: a preset of `swin_lessons.data` ("none", "light", "medium", "strong"), or fields of its
            `Augment`, such as "shift=2,flip=0.5,mixup=0.2".
        precision: "fp32"; "tf32" for fp32 whose products a GPU from Ampere on rounds to TF32; "bf16" or "fp16"
            for autocast, fp16 with loss scaling. A step whose gradients overflow in fp16 changes no weight, and
            the schedule does not count it.
        optimizer: "adamw" for PyTorch's AdamW, in its fused form; "triton" for `kernels.FusedAdamW`, the same update by
            this package's kernel.
        init: "xavier" redraws every linear weight before the first step (see `init_xavier`).
        seed: decides the order of images, augmentation, mixing and drop path.
        eval_every, save_every: steps between evaluations and checkpoints; None: once an epoch.
        log_every: steps between writes of the step history to disk.
        keep: how many checkpoints stay.
        workers: processes that read images from disk.
    """

    epochs: float = 8
    steps: int | None = None
    batch_size: int = 64
    micro_batch: int | None = None
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup: float = 0.15
    weight_decay: float = 0.05
    layer_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float | None = 1.0
    ema: float = 0.0
    label_smoothing: float = 0.0
    augment: str = "none"
    precision: str = "fp32"
    optimizer: str = "adamw"
    init: str = "default"
    seed: int = 0
    eval_every: int | None = None
    save_every: int | None = None
    log_every: int = 50
    keep: int = 2
    workers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, (valid, remedy) in _RULES.items():
            value = getattr(self, name)
            if not valid(value):
                raise ValueError(f"TrainConfig.{name} is {value!r}: use {remedy}")
        parse_augment(self.augment)
        if self.min_lr > self.lr:
            raise ValueError(
                f"TrainConfig.min_lr is {self.min_lr!r}, above lr {self.lr!r}: use a smaller min_lr"
            )
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            raise ValueError(
                f"TrainConfig.micro_batch is {self.micro_batch}, above batch_size {self.batch_size}: "
                "use a smaller micro_batch, or None for the whole batch"
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimiser steps of the whole run; at least one."""
        return self.steps or max(1, math.ceil(self.epochs * steps_per_epoch))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, tuples as lists."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Inverse of `to_dict`. Raises ValueError for a field that does not exist."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"TrainConfig has no field {', '.join(unknown)}: choose among {', '.join(sorted(known))}"
            )
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Read JSON written by `save`."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def differences(self, other: TrainConfig) -> list[str]:
        """Fields that change the arithmetic and differ, as 'name: mine, theirs'."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{name}: {mine[name]!r}, {theirs[name]!r}"
            for name in mine
            if name not in BOOKKEEPING and mine[name] != theirs[name]
        ]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _count(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _optional_count(value: Any) -> bool:
    return value is None or _count(value)


def _positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _not_negative(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


# name -> (test, what to use instead)
_RULES: dict[str, tuple[Any, str]] = {
    "epochs": (_positive, "a number above 0"),
    "steps": (_optional_count, "a whole number of at least 1, or None to go by epochs"),
    "batch_size": (_count, "a whole number of at least 1"),
    "micro_batch": (_optional_count, "a whole number of at least 1, or None for the whole batch"),
    "lr": (_positive, "a number above 0, such as 1e-3"),
    "min_lr": (_not_negative, "a number of at least 0"),
    "warmup": (_not_negative, "a part of the run from 0 to below 1, or a number of steps"),
    "weight_decay": (_not_negative, "a number of at least 0, such as 0.05"),
    "layer_decay": (lambda v: _is_number(v) and 0 < v <= 1, "a factor above 0 and at most 1 (1 is off)"),
    "betas": (lambda v: len(v) == 2 and all(map(_fraction, v)), "two numbers from 0 to below 1"),
    "clip_norm": (lambda v: v is None or _positive(v), "a number above 0, or None for no clipping"),
    "ema": (_fraction, "a decay from 0 (off) to below 1, such as 0.999"),
    "label_smoothing": (_fraction, "a number from 0 to below 1"),
    "augment": (lambda v: isinstance(v, str) and bool(v), "a preset such as 'light', or 'shift=2,flip=0.5'"),
    "precision": (lambda v: v in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
    "optimizer": (lambda v: v in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
    "init": (lambda v: v in INITS, f"one of {', '.join(INITS)}"),
    "seed": (lambda v: _is_int(v) and 0 <= v < 2**63, "a whole number of at least 0 and below 2**63"),
    "eval_every": (_optional_count, "a number of steps, or None for once an epoch"),
    "save_every": (_optional_count, "a number of steps, or None for once an epoch"),
    "log_every": (_count, "a whole number of at least 1"),
    "keep": (_count, "a whole number of at least 1"),
    "workers": (lambda v: _is_int(v) and v >= 0, "a whole number of at least 0"),
}
