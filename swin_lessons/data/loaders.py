"""Batches of sets read from disk: a DataLoader whose batches depend on (seed, epoch, step) alone."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from swin_lessons.data.batches import Augment, EpochBatches, erase_and_mix, mix, random_stream
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
    return rand_augment_transform(config, {"img_mean": fill})


class _Items(Dataset):
    """The items of one epoch as (image, label), each under its own seed, whichever process reads it."""

    def __init__(self, read: Callable[[int], Any], seed: int, epoch: int) -> None:
        self.read, self.key = read, (seed, epoch)

    def __getitem__(self, index: int) -> Any:
        with seeded(*self.key, index):
            return self.read(index)


class LoaderBatches(EpochBatches):
    """Batches of any map-style set, through a DataLoader; see `EpochBatches`.

    `workers` processes read ahead; how many changes nothing in the batches. An `ImageFolder` without a
    transform of its own gets random crop, flip and RandAugment by `augment`, then erasing and mixing. Other
    sets are taken as they come, their random transforms seeded, and only mixed.
    """

    def __init__(self, dataset: Any, batch_size: int, *, workers: int = 0, **settings: Any) -> None:
        if workers < 0:
            raise DataError(f"workers={workers} must be 0 (this process reads) or more")
        super().__init__(dataset, batch_size, **settings)
        self.workers = workers
        self.sized_here = isinstance(dataset, ImageFolder) and dataset.transform is None
        self.image_transform = self._image_transform() if self.sized_here else None

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
            batch_sampler=[self.indices(step).tolist() for step in steps],
            num_workers=self.workers,
            generator=torch.Generator(),  # else the loader draws from, and so disturbs, the global one
        )
        for step, (images, labels) in zip(steps, loader, strict=True):
            yield self._finish(images, labels, step)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        items = self._items()
        images, labels = default_collate([items[index] for index in self.indices(step).tolist()])
        return self._finish(images, labels, step)

    def _finish(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        rng, augment = self.stream(step), self.augment
        if self.sized_here:
            x = self.dataset.prepare(images)
            return erase_and_mix(x, labels, self.dataset.num_classes, augment, rng)
        if augment.mixes:
            return mix(images, labels, self.dataset.num_classes, augment, rng)
        return images, labels
