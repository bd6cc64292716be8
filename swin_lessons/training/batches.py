"""From a data set to the batches of each step, the same ones whenever a run is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from swin_lessons.data import TensorBatches
from swin_lessons.data.batches import WHOLE, Share, parse_augment
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


def batch_stream(
    dataset: Any, config: TrainConfig, start: int, share: Share = WHOLE
) -> Iterator[tuple[int, Batch]]:
    """Endless (epoch, batch) pairs from step `start` on; each depends on the seed and its step alone."""
    epoch, skip = divmod(start, steps_per_epoch(dataset, config))
    while True:
        for batch in train_batches(dataset, config, epoch, skip, share):
            yield epoch, batch
        epoch, skip = epoch + 1, 0


def train_batches(
    dataset: Any, config: TrainConfig, epoch: int, start: int = 0, share: Share = WHOLE
) -> Iterable[Batch]:
    """Shuffled, augmented batches of one epoch from its step `start` on; of each, this process's share."""
    shared: dict[str, Any] = {
        "batch_size": min(config.batch_size, len(dataset)),
        "seed": config.seed,
        "epoch": epoch,
        "augment": parse_augment(config.augment),
        "start_step": start,
        "drop_last": True,
        "share": share,
    }
    if in_memory(dataset):
        return TensorBatches(dataset, **shared)
    from swin_lessons.data import loader_batches  # PIL comes with it

    return loader_batches(dataset, workers=config.workers, **shared)


def eval_batches(dataset: Any, batch_size: int, share: Share = WHOLE) -> Iterable[Batch]:
    """The whole set in its own order, without augmentation; of each batch, this process's part.

    Every process gets as many batches as the others, of `batch_size` images at most. Where a last batch has fewer
    images than there are processes, some get an empty one.
    """
    if share == WHOLE and in_memory(dataset):
        return TensorBatches(dataset, batch_size, shuffle=False)
    if share == WHOLE:
        return DataLoader(dataset, batch_size)
    indices = torch.arange(len(dataset)).split(batch_size * share.parts)
    mine = [batch.tensor_split(share.parts)[share.part] for batch in indices]
    return (_items(dataset, batch) for batch in mine)


def _items(dataset: Any, indices: Tensor) -> Batch:
    """Some images of a set, unchanged, and their labels; no image makes a batch (0, C, H, W)."""
    if in_memory(dataset):
        images, labels = dataset.images, dataset.labels
        indices = indices.to(images.device)
        return dataset.prepare(images[indices]), labels[indices]
    items = [dataset[i] for i in indices.tolist()] or [dataset[0]]
    images, labels = default_collate(items)
    return images[: len(indices)], labels[: len(indices)]
