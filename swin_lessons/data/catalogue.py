"""The one door to every data set: a name, or `imagefolder:PATH`, to a Dataset."""

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from swin_lessons.data import cifar, digits, fashion_mnist, scenes
from swin_lessons.data.arrays import ImageArrays
from swin_lessons.data.files import DataError, sha256_of
from swin_lessons.data.imagefolder import ImageFolder
from swin_lessons.data.splits import hold_out

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class DataSpec:
    """What a data set is asked for with: "fashion-mnist", or "imagefolder:PATH".

    Attributes:
        name: one of `list_datasets()`.
        path: the folder after the colon; None for the sets that have a place of their own.
    """

    name: str
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> "DataSpec":
        """Read "NAME" or "imagefolder:PATH"; `~` is the home folder.

        Raises:
            DataError: unknown name (near ones are offered), a path where none belongs or none where one does.
        """
        name, _, path = str(text).partition(":")
        if name not in BUILDERS:
            raise DataError(_unknown(name, text))
        if (name == "imagefolder") != bool(path):
            raise DataError(f"{text!r}: write imagefolder:PATH for a folder, the bare name for other sets")
        return cls(name, Path(path).expanduser() if path else None)

    def __str__(self) -> str:
        return f"{self.name}:{self.path}" if self.path else self.name


def _unknown(name: str, text: str) -> str:
    near = difflib.get_close_matches(name.lower(), BUILDERS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "to read a folder of images: imagefolder:PATH"
    return f"unknown data set {text!r}; {hint} Known: {', '.join(list_datasets())}"


@dataclass(frozen=True)
class Request:
    """Everything `load_dataset` was asked for, as its builders see it."""

    spec: DataSpec
    split: str
    root: Any = None
    download: bool = True
    skip_bad: bool = False
    common: dict[str, Any] = field(default_factory=dict)  # img_size, in_chans, transform
    options: dict[str, Any] = field(default_factory=dict)


def _in_memory(request: Request, read: Callable[[str], tuple], classes=None, **stats) -> ImageArrays:
    """Build an `ImageArrays` from `read(split)`, which gives images, labels and, without `classes`, those."""
    options = dict(request.options)
    fraction, seed = options.pop("val_fraction", 0.0), options.pop("split_seed", 0)
    if request.split == "val" and not fraction:
        raise DataError(
            f"{request.spec} has no val split of its own: use split='test', or hold out a tenth of the "
            "training images with val_fraction=0.1, for train and val alike"
        )
    images, labels, *rest = read("test" if request.split == "test" else "train")
    if fraction and request.split != "test":
        chosen = hold_out(labels, fraction, seed) == (request.split == "val")
        images, labels = images[chosen], labels[chosen]
    return ImageArrays(
        images.copy(),  # torch wants memory it may write to
        labels.astype("int64"),
        classes or rest[0],
        name=f"{request.spec} ({request.split})",
        **stats,
        **request.common,
        **options,
    )


def _fashion_mnist(request: Request) -> ImageArrays:
    def read(split: str) -> tuple:
        return fashion_mnist.load_arrays(split, request.root, request.download)

    return _in_memory(request, read, fashion_mnist.CLASSES, mean=fashion_mnist.MEAN, std=fashion_mnist.STD)


def _cifar(version: cifar.Cifar) -> Callable[[Request], ImageArrays]:
    def build(request: Request) -> ImageArrays:
        def read(split: str) -> tuple:
            return cifar.load_arrays(version, split, request.root, request.download)

        return _in_memory(request, read, mean=version.mean, std=version.std)

    return build


def _digits(request: Request) -> ImageArrays:
    return _in_memory(request, digits.load_arrays, digits.CLASSES, mean=digits.MEAN, std=digits.STD)


def _scenes(request: Request) -> ImageArrays:
    images, labels = scenes.load_arrays(request.split, **request.options)
    return ImageArrays(
        images,
        labels,
        scenes.CLASSES,
        mean=scenes.MEAN,
        std=scenes.STD,
        name=f"scenes ({request.split})",
        **request.common,
    )


def _image_folder(request: Request) -> ImageFolder:
    settings = request.common | request.options
    return ImageFolder(str(request.spec.path), request.split, skip_bad=request.skip_bad, **settings)


BUILDERS: dict[str, Callable[[Request], Dataset]] = {
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar(cifar.CIFAR10),
    "cifar100": _cifar(cifar.CIFAR100),
    "digits": _digits,
    "scenes": _scenes,
    "imagefolder": _image_folder,
}


@dataclass(frozen=True)
class Source:
    """How a set that comes in files is found, checked and fetched."""

    find: Callable[[Any], Path | None]
    check: Callable[[Path], None]
    fetch: Callable[[Any], Path]

    @classmethod
    def of_cifar(cls, version: cifar.Cifar) -> "Source":
        return cls(partial(cifar.find, version), partial(cifar.check, version), partial(cifar.fetch, version))

    def is_intact(self, folder: Path | None) -> bool:
        """Is there a folder, and does it pass its check?"""
        if folder is None:
            return False
        try:
            self.check(folder)
        except DataError:
            return False
        return True


SOURCES = {
    "fashion-mnist": Source(fashion_mnist.find, fashion_mnist.check, fashion_mnist.fetch),
    "cifar10": Source.of_cifar(cifar.CIFAR10),
    "cifar100": Source.of_cifar(cifar.CIFAR100),
}


def list_datasets() -> list[str]:
    """Names that `load_dataset` knows."""
    return list(BUILDERS)


def load_dataset(
    spec: str | DataSpec,
    *,
    root=None,
    split: str = "train",
    img_size: int | tuple[int, int] | None = None,
    in_chans: int | None = None,
    transform: Callable | None = None,
    skip_bad: bool = False,
    download: bool = True,
    **options,
) -> Dataset:
    """A data set of (image, label) pairs.

    Args:
        spec: a name of `list_datasets()`, or "imagefolder:PATH".
        root: folder to look in first and to download to; default: the environment variable SWIN_LESSONS_DATA,
            else the cache.
        split: "train", "val" or "test".
        img_size: side of the images handed out, px, or (H, W); default: the set's own.
        in_chans: channels of the images handed out; default: the set's own.
        transform: replaces sizing and normalisation.
        skip_bad: leave out images that cannot be read (image folders); otherwise they are an error.
        download: may the set be fetched?
        **options: what that set alone takes.

    Returns:
        A Dataset of (float32 image (C, H, W), int label) with .num_classes, .classes, .in_chans, .img_size;
        sets held in memory also have .images, .labels, .mean, .std (see `ImageArrays`).

    Raises:
        DataError: what is wrong with the request or the files, and what to do about it.
    """
    spec = spec if isinstance(spec, DataSpec) else DataSpec.parse(spec)
    if split not in SPLITS and (split, spec.name) != ("all", "imagefolder"):
        raise DataError(f"split={split!r} is none of {', '.join(SPLITS)}")
    common = {"img_size": img_size, "in_chans": in_chans, "transform": transform}
    return BUILDERS[spec.name](Request(spec, split, root, download, skip_bad, common, options))


def fetch(name: str, root=None) -> dict[str, Any]:
    """Make sure that a data set is on this machine, whole, and say where; fetch it only if it is not.

    Args:
        name: a set that comes in files: "fashion-mnist", "cifar10" or "cifar100".
        root: folder to look in first and to fetch to; default: SWIN_LESSONS_DATA, else the cache.

    Returns:
        path (str), fetched (bool), files (dict file name to bytes), sha256 (dict file name to the hex digest of
        the file as it lies there), seconds (float).

    Raises:
        DataError: no such set, or no way to get it; WriteError: nowhere to put it.
    """
    if name not in SOURCES:
        raise DataError(f"{name!r} is not fetched; sets that are: {', '.join(SOURCES)}")
    start, source = time.perf_counter(), SOURCES[name]
    found = source.find(root)
    intact = source.is_intact(found)
    folder = found if found and intact else source.fetch(root)
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return {
        "path": str(folder),
        "fetched": not intact,
        "files": {path.name: path.stat().st_size for path in paths},
        "sha256": {path.name: sha256_of(path) for path in paths},
        "seconds": time.perf_counter() - start,
    }
