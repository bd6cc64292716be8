"""Batches of sets read from disk: a DataLoader whose batches depend on (seed, epoch, step) alone."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from swin_lessons.data.batches import (
    WHOLE,
    Augment,
    EpochBatches,
    check_shift,
    erase_and_mix,
    mix,
    random_shift,
    random_stream,
)
from swin_lessons.data.files import DataError
from swin_lessons.data.imagefolder import ImageFolder, to_tensor

ITEM = 6  # random stream of one item's transform


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's global generators from `key`, and put them back at the end.

    torchvision's transforms draw from torch's, timm's from the other two.
    """
    kept = random.getstate(), np.random.get_state()
    seed = int(random_stream(ITEM, *key).integers(2**32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


def random_transform(dataset: ImageFolder, augment: Augment) -> Callable[[Any], Any]:
    """The per-image part of the augmentation, on Pillow images: random crop and flip, RandAugment if asked.

    Shift, erasing and mixing work on batches and are not in it.

    Raises:
        DataError: a package is missing, or RandAugment cannot be what it is asked to be.
    """
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise DataError(
            'augmenting image folders needs torchvision: pip install "swin-lessons[vision]"'
        ) from error
    steps = [
        v2.RandomResizedCrop(dataset.size, augment.crop_area, interpolation=v2.InterpolationMode.BICUBIC),
        v2.RandomHorizontalFlip(augment.flip),
    ]
    if augment.rand_augment:
        steps.append(_rand_augment(dataset, augment.rand_augment))
    return v2.Compose(steps)


def _rand_augment(dataset: ImageFolder, config: str) -> Callable[[Any], Any]:
    if dataset.in_chans != 3:
        raise DataError(f"rand_augment works on RGB images; in_chans={dataset.in_chans}")
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError as error:
        raise DataError('rand_augment needs timm: pip install "swin-lessons[vision]"') from error
    fill = tuple(round(255 * value) for value in dataset.mean.tolist())
    try:
        return rand_augment_transform(config, {"img_mean": fill})
    except (AssertionError, ValueError, KeyError) as error:
        example = "rand-m9-mstd0.5-inc1"
        raise DataError(
            f"rand_augment={config}: timm knows no such words; write such as {example}"
        ) from error


class _Items(Dataset):
    """The items of one epoch as (image, label), each under its own seed, whichever process reads it.

    An item that cannot be read is its `DataError`: raised in a worker, it would arrive as the worker's traceback.
    """

    def __init__(self, read: Callable[[int], Any], seed: int, epoch: int) -> None:
        self.read, self.key = read, (seed, epoch)

    def __getitem__(self, index: int) -> Any:
        with seeded(*self.key, index):
            try:
                return self.read(index)
            except DataError as error:
                return error


def _collate(items: list[Any]) -> Any:
    """The batch of some items, or the first error among them."""
    return next((item for item in items if isinstance(item, DataError)), None) or default_collate(items)


class LoaderBatches(EpochBatches):
    """Batches of any map-style set, through a DataLoader; see `EpochBatches`.

    `workers` processes read ahead; how many changes nothing in the batches. An `ImageFolder` without a
    transform of its own gets random crop, flip and RandAugment by `augment`, then shift, erasing and mixing. Other
    sets are taken as they come, their random transforms seeded, and only mixed.
    """

    def __init__(self, dataset: Any, batch_size: int, *, workers: int = 0, **settings: Any) -> None:
        if workers < 0:
            raise DataError(f"workers={workers} must be 0 (this process reads) or more")
        super().__init__(dataset, batch_size, **settings)
        if self.augment.mixes and self.share != WHOLE and len(self.share.rows(batch_size)) % 2:
            raise DataError(
                f"mixup and cutmix pair the images of a process, and {batch_size} images make an odd number on each "
                f"of {self.share.parts}: use a batch size that {2 * self.share.parts} divides"
            )
        self.workers = workers
        self.sized_here = isinstance(dataset, ImageFolder) and dataset.transform is None
        self.image_transform = self._image_transform() if self.sized_here else None
        if self.sized_here:
            check_shift(self.augment, dataset.size)

    def _image_transform(self) -> Callable[[Any], Any]:
        return random_transform(self.dataset, self.augment) if self.augment.changes else self.dataset.fit

    def _read(self, index: int) -> Any:
        if self.image_transform is None:
            return self.dataset[index]
        image = self.image_transform(self.dataset.read(index))
        return to_tensor(image), int(self.dataset.labels[index])

    def _items(self) -> _Items:
        return _Items(self._read, self.seed, self.epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        steps = range(self.start_step, len(self))
        loader = DataLoader(
            self._items(),
            batch_sampler=[self._mine(step) for step in steps],
            num_workers=self.workers,
            collate_fn=_collate,
            generator=torch.Generator(),  # else the loader draws from, and so disturbs, the global one
        )
        for step, batch in zip(steps, loader, strict=True):
            yield self._finish(batch, step)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        items = self._items()
        return self._finish(_collate([items[index] for index in self._mine(step)]), step)

    def _mine(self, step: int) -> list[int]:
        """The items of a step that this process reads."""
        whole = self.indices(step)
        return whole[self.share.rows(len(whole))].tolist()

    def _finish(self, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        if isinstance(batch, DataError):
            raise batch
        images, labels = batch
        rng, augment = self.stream(step), self.augment
        if self.sized_here:
            x = self.dataset.prepare(random_shift(images, augment.shift, rng, self.share))
            return erase_and_mix(x, labels, self.dataset.num_classes, augment, rng, self.share)
        if augment.mixes:
            return mix(images, labels, self.dataset.num_classes, augment, rng)
        return images, labels
