"""Data sets that fit in memory: all images in one uint8 tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from swin_lessons.data.files import DataError
from swin_lessons.data.pixels import fit_size, normalise, stats_to_channels, to_channels, to_pair


class ImageArrays(Dataset):
    """Images and labels held as tensors.

    Args:
        images: uint8, (N, H, W) or (N, C, H, W), at the set's own size.
        labels: whole numbers, (N,), each in 0..len(classes) − 1.
        classes: one name a label.
        mean, std: per channel, of training pixels in 0..1.
        img_size: side of what the set hands out, in px, or (H, W); default: the images' own size.
        in_chans: channels of what the set hands out; default: the images' own.
        transform: called with the uint8 image (C, H, W) instead of sizing and normalisation.
        name: what to call the set in messages.

    Attributes:
        images: uint8 (N, C, H, W) with `in_chans` channels, still at their own size.
        labels: int64 (N,).
        classes, num_classes, in_chans: what they say.
        img_size: int if square, else (H, W).
        mean, std: float32 (C,).

    `dataset[i]` is (float32 image (C, img_size, img_size), int label), sized and normalised as
    `TensorBatches` does it: both ways of reading agree.
    """

    def __init__(
        self,
        images: np.ndarray | Tensor,
        labels: np.ndarray | Tensor,
        classes: Sequence[str],
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        img_size: int | tuple[int, int] | None = None,
        in_chans: int | None = None,
        transform: Callable[[Tensor], Any] | None = None,
        name: str = "images",
    ) -> None:
        pixels = torch.as_tensor(images)
        pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
        self.name = name
        self.in_chans = pixels.shape[1] if in_chans is None else in_chans
        self.images = to_channels(pixels, self.in_chans)
        self.labels = torch.as_tensor(labels).long()
        self.classes = list(classes)
        self.num_classes = len(self.classes)
        own_size = pixels.shape[-2], pixels.shape[-1]
        self.size = to_pair(own_size if img_size is None else img_size)
        self.mean = torch.tensor(stats_to_channels(mean, self.in_chans))
        self.std = torch.tensor(stats_to_channels(std, self.in_chans))
        self.transform = transform
        self._check()

    def _check(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataError(f"{self.name}: {len(self.images)} images but {len(self.labels)} labels")
        if not len(self.labels):
            raise DataError(f"{self.name} holds no images")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.num_classes:
            raise DataError(
                f"{self.name}: labels run {low}..{high}, but there are {self.num_classes} classes"
            )

    @property
    def img_size(self) -> int | tuple[int, int]:
        return self.size[0] if self.size[0] == self.size[1] else self.size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.images[index], int(self.labels[index])
        if self.transform is not None:
            return self.transform(image), label
        return self.prepare(image[None])[0], label

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 (B, C, h, w) to model input, float32 (B, C, H, W): sized, then normalised."""
        return normalise(fit_size(images, self.size), self.mean, self.std)

    def subset(self, indices: Sequence[int] | Tensor) -> "ImageArrays":
        """The same set with only the images at `indices`, in that order."""
        return self._with(images=self.images[indices], labels=self.labels[indices])

    def to(self, device: torch.device | str) -> "ImageArrays":
        """The same set with its tensors on `device`; batches made from it come out there."""
        moved = {key: getattr(self, key).to(device) for key in ("images", "labels", "mean", "std")}
        return self._with(**moved)

    def _with(self, **changes: Tensor) -> "ImageArrays":
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, **changes)
        return twin

    def __repr__(self) -> str:
        return (
            f"{self.name}: {len(self):,} images, {self.num_classes} classes, "
            f"{self.in_chans} × {self.size[0]} × {self.size[1]}"
        )
