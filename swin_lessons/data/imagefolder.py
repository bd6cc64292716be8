"""Any folder of class folders: `PATH/cat/1.jpg`, or ImageNet's `PATH/train/cat/1.jpg` and `PATH/val/...`."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from swin_lessons.data import folders
from swin_lessons.data.files import DataError, printable
from swin_lessons.data.images import BadImage, check_in_chans, pillow, read_image
from swin_lessons.data.pixels import normalise, stats_to_channels, to_pair
from swin_lessons.data.splits import hold_out

if TYPE_CHECKING:
    from PIL.Image import Image

# ImageNet's statistics, which pretrained weights expect; the alpha channel gets 0.5 and 0.5
MEAN, STD, ALPHA = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (0.5,)
IMG_SIZE = 224


class ImageFolder(Dataset):
    """Images of class folders, read from disk when asked for.

    Args:
        path: the folder; `folders.find_split` says what it may look like.
        split: "train", "val" or "test"; "all" is every image of a folder that has no parts.
        img_size: side of what is handed out, px, or (H, W); default 224.
        in_chans: 1 (grey), 3 (RGB, the default) or 4 (RGB, alpha); `images.read_image` says how.
        transform: called with the Pillow image; replaces sizing and normalisation.
        skip_bad: leave out images that cannot be used, with a warning that counts and names them; otherwise
            they are an error. Reads every image once, whole, at the start; else folders up to 256 MB only.
        val_fraction, split_seed: how a folder without parts is divided: seeded, in every class.
        min_size: shortest side accepted, px; default: a sixteenth of img_size, at least 4.

    Attributes:
        files, labels: the paths, and their classes as int64 (N,).
        classes, num_classes, in_chans, img_size, mean, std: as in `ImageArrays`.
        report: what was found, ignored and skipped, a `FolderReport`.

    `dataset[i]` is (float32 image (C, H, W), int label): the middle of the image, resized and normalised;
    nothing random. `LoaderBatches` adds what is random.

    Raises:
        DataError: no folder, no images, one class, an empty class, a bad image.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        split: str = "train",
        *,
        img_size: int | tuple[int, int] | None = None,
        in_chans: int | None = None,
        transform: Callable[["Image"], Any] | None = None,
        skip_bad: bool = False,
        val_fraction: float = 0.2,
        split_seed: int = 0,
        min_size: int | None = None,
    ) -> None:
        pillow()
        self.name = f"imagefolder:{path} ({split})"
        self.size = to_pair(IMG_SIZE if img_size is None else img_size)
        self.in_chans = 3 if in_chans is None else in_chans
        check_in_chans(self.in_chans)
        self.min_size = min_size or max(4, min(self.size) // 16)
        self.transform = transform
        self.mean, self.std = (torch.tensor(_stats(stats, self.in_chans)) for stats in (MEAN, STD))
        root = Path(path).expanduser()
        folder, shared = folders.find_split(root, split)
        names = folders.class_names(folders.find_split(root, "train")[0])
        self.classes = [printable(name) for name in names]
        self.num_classes = len(names)
        self._collect(folder, names, skip_bad)
        if shared or split == "train":
            folders.refuse_empty(folder, self.classes, self.labels.tolist())
        if shared and split != "all":
            self._keep(hold_out(self.labels.numpy(), val_fraction, split_seed) == (split != "train"))
        if not self.files:
            raise DataError(f"{root} leaves no images for split {split!r}: add images, at least two a class")

    def _collect(self, folder: Path, names: list[str], skip_bad: bool) -> None:
        """Find the image files; decode them once where that is asked for or quick."""
        self.files, labels, self.report = folders.scan(folder, names)
        self.labels = torch.tensor(labels, dtype=torch.int64)
        faults = folders.find_faults(self.files, self._read, everything=skip_bad)
        if faults is None:
            return
        bad = [fault for fault in faults if fault]
        if bad and not skip_bad:
            raise BadImage(f"{folders.name_some(bad, chr(10))}\n{REMEDY}")
        if bad:
            message = f"skipped {len(bad)} of {len(faults)} images: {folders.name_some(bad, '; ')}"
            warnings.warn(message, stacklevel=5)
        self._keep(np.array([not fault for fault in faults], dtype=bool))
        self.report.images, self.report.skipped, self.report.checked = len(self.files), bad, True
        self.report.copies = folders.count_copies(self.files, self.labels.tolist())

    def _keep(self, chosen: np.ndarray) -> None:
        self.files = [file for file, keep in zip(self.files, chosen, strict=True) if keep]
        self.labels = self.labels[torch.from_numpy(chosen)]

    def _read(self, path: Path) -> "Image":
        return read_image(path, self.in_chans, self.min_size)

    @property
    def img_size(self) -> int | tuple[int, int]:
        return self.size[0] if self.size[0] == self.size[1] else self.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.read(index), int(self.labels[index])
        if self.transform is not None:
            return self.transform(image), label
        return self.prepare(to_tensor(self.fit(image))), label

    def read(self, index: int) -> "Image":
        """Image `index` as a Pillow image with the set's channels, at its own size.

        Raises:
            BadImage: it cannot be used; the message names it and the way out.
        """
        try:
            return self._read(self.files[index])
        except BadImage as error:
            raise BadImage(f"{error}\n{LATE_REMEDY}") from error

    def fit(self, image: "Image") -> "Image":
        """Cut the middle 7/8 with the wanted aspect, and resize it (bicubic) to the set's size."""
        pil, (height, width) = pillow(), self.size
        return pil.ImageOps.fit(image, (width, height), method=pil.Image.Resampling.BICUBIC, bleed=1 / 16)

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 (..., C, H, W) of the set's size to normalised float32."""
        return normalise(images, self.mean, self.std)

    def __repr__(self) -> str:
        height, width = self.size
        shape = f"{self.in_chans} × {height} × {width}"
        return f"{self.name}: {len(self):,} images, {self.num_classes} classes, {shape}; found {self.report}"


REMEDY = "Remove bad images, or leave them out with skip_bad=True (--skip-bad)."
LATE_REMEDY = (
    "Repair this image and go on (--resume), or leave bad images out with skip_bad=True (--skip-bad) in a new run "
    "(--out): the images of a run that has begun cannot change."
)


def to_tensor(image: "Image") -> Tensor:
    """A Pillow image of mode L, RGB or RGBA as uint8 (C, H, W)."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def _stats(stats: tuple[float, ...], in_chans: int) -> tuple[float, ...]:
    return stats + ALPHA if in_chans == 4 else stats_to_channels(stats, in_chans)
