"""From a data set to the batches of each step, the same ones whenever a run is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from swin_lessons.data import TensorBatches
from swin_lessons.data.batches import parse_augment
from swin_lessons.training.config import TrainConfig

Batch = tuple[Tensor, Tensor]


def in_memory(dataset: Any) -> bool:
    """Does the set hold all its images as one tensor?"""
    return hasattr(dataset, "images")


def steps_per_epoch(dataset: Any, config: TrainConfig) -> int:
    """Full batches in the set; one batch of all images where they do not fill one."""
    if not len(dataset):
        raise ValueError("the training set is empty: give a set with images")
    return max(1, len(dataset) // config.batch_size)


def batch_stream(dataset: Any, config: TrainConfig, start: int) -> Iterator[tuple[int, Batch]]:
    """Endless (epoch, batch) pairs from step `start` on; each depends on the seed and its step alone."""
    epoch, skip = divmod(start, steps_per_epoch(dataset, config))
    while True:
        for batch in train_batches(dataset, config, epoch, skip):
            yield epoch, batch
        epoch, skip = epoch + 1, 0


def train_batches(dataset: Any, config: TrainConfig, epoch: int, start: int = 0) -> Iterable[Batch]:
    """Shuffled, augmented batches of one epoch from its step `start` on."""
    shared: dict[str, Any] = {
        "batch_size": min(config.batch_size, len(dataset)),
        "seed": config.seed,
        "epoch": epoch,
        "augment": parse_augment(config.augment),
        "start_step": start,
        "drop_last": True,
    }
    if in_memory(dataset):
        return TensorBatches(dataset, **shared)
    from swin_lessons.data import loader_batches  # PIL comes with it

    return loader_batches(dataset, workers=config.workers, **shared)


def eval_batches(dataset: Any, batch_size: int) -> Iterable[Batch]:
    """The whole set in its own order, without augmentation."""
    if in_memory(dataset):
        return TensorBatches(dataset, batch_size, shuffle=False)
    return DataLoader(dataset, batch_size)
