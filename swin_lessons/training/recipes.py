"""A configuration that suits a model, a data set and a machine, so that a run needs no option."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from swin_lessons.training.config import TrainConfig
from swin_lessons.training.precision import best_precision

NARROW = 96  # channels; below it Swin's own initialisation is too small
EPOCHS = 12  # of Fashion-MNIST: 8 ended just below 90 % test accuracy, 12 above it
FEWEST_STEPS = 200  # a folder of some thirty images still gets this many
MOST_STOPS = 40  # evaluations and checkpoints of a run: an epoch of one step is no reason for one


def recipe(model: nn.Module, train_set: Any, *, from_scratch: bool = True, **changes: Any) -> TrainConfig:
    """Choose a `TrainConfig`; `changes` are fields that the user chose, None where the choice is left to us.

    Narrow models (under 96 channels) trained from scratch get Glorot's initialisation and a large rate; wide
    ones a smaller rate; fine-tuning a tenth of that. Precision is bf16 where the hardware has it.
    """
    device = next(model.parameters()).device
    narrow = embed_dim(model) < NARROW
    chosen: dict[str, Any] = {
        "batch_size": 64,
        "lr": (2e-3 if narrow else 5e-4) * (1.0 if from_scratch else 0.1),
        "ema": 0.999,
        "init": "xavier" if narrow and from_scratch else "default",
        "precision": best_precision(device),
    }
    chosen |= {name: value for name, value in changes.items() if value is not None}
    TrainConfig(**chosen)  # a wrong value is named before anything is computed from it
    per_epoch = max(1, len(train_set) // chosen["batch_size"])
    chosen.setdefault("epochs", max(EPOCHS, math.ceil(FEWEST_STEPS / per_epoch)))
    chosen.setdefault("micro_batch", cached_micro_batch(model, train_set, chosen["batch_size"]))
    config = TrainConfig(**chosen)
    pause = max(per_epoch, config.total_steps(per_epoch) // MOST_STOPS)
    return replace(config, eval_every=config.eval_every or pause, save_every=config.save_every or pause)


def embed_dim(model: nn.Module) -> int:
    """Channels after the patch embedding."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.out_channels
    raise ValueError(
        f"{type(model).__name__} has no patch embedding: give every option of the recipe yourself"
    )


def cached_micro_batch(model: nn.Module, dataset: Any, batch_size: int) -> int | None:
    """Images whose widest activation stays in a CPU's cache, a power of two; None for the whole batch.

    On a GPU it is None: there a micro-batch saves memory and no time.
    """
    if next(model.parameters()).device.type != "cpu" or not hasattr(model, "micro_batch_size"):
        return None
    fits: int = model.micro_batch_size(dataset[0][0][None])  # type: ignore[operator]
    return 2 ** int(math.log2(fits)) if fits < batch_size else None
