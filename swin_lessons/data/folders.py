"""What lies in a folder of class folders: layout, classes, image files and what is wrong with them."""

import hashlib
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from swin_lessons.data.files import DataError, printable
from swin_lessons.data.images import BadImage

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test"),
    "test": ("test", "val", "valid", "validation"),
}
CHECK_BYTES = 256 * 2**20  # folders up to this size are read once, whole, before training starts
NAMED = 10  # how many files a message names


@dataclass
class FolderReport:
    """What was found, for the user to see.

    Attributes:
        images: usable image files.
        ignored: files that are no images, by their extension.
        skipped: bad images left out, each with the reason (skip_bad=True).
        checked: was every image decoded once?
        copies: images that are byte for byte a copy of another one (counted when checked).
    """

    images: int = 0
    ignored: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    checked: bool = False
    copies: int = 0

    def __str__(self) -> str:
        counts = {
            "other files ignored": len(self.ignored),
            "bad images skipped": len(self.skipped),
            "exact copies": self.copies,
        }
        parts = [f"{count:,} {what}" for what, count in counts.items() if count]
        return ", ".join([f"{self.images:,} images", *parts])


def find_split(root: Path, split: str) -> tuple[Path, bool]:
    """Which folder holds the classes of a split, and whether all splits share it.

    ImageNet's layout has class folders in `root/train` and `root/val` (or valid, validation, test; "val" and
    "test" stand in for each other where one is missing). Anything else is class folders right under `root`,
    shared by all splits; so is `root/train` if no other part has class folders. Capitals do not matter.

    Raises:
        DataError: no folder, or a validation part without class folders.
    """
    if split not in ("all", *SPLIT_FOLDERS):
        raise DataError(f"split={split!r} is none of {', '.join(SPLIT_FOLDERS)}, all")
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise DataError(f"{root} {problem}. Name a folder that holds one folder of images for each class.")
    train = _first_with_classes(root, SPLIT_FOLDERS["train"])
    if train is None:
        return root, True
    _refuse_flat_validation(root)
    held = _first_with_classes(root, SPLIT_FOLDERS["test" if split == "test" else "val"])
    if held is None:
        return train, True
    if split == "all":
        raise DataError(f"{root} comes in parts: ask for the split train, val or test")
    return (train if split == "train" else held), False


def _first_with_classes(root: Path, names: Sequence[str]) -> Path | None:
    return next((part for part in _parts(root, names) if subfolders(part)), None)


def _parts(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders in `root` with these names, in their order; of `train` and `Train` the first."""
    found = {
        path.name.lower(): path for path in subfolders(root)
    }  # capitals come first, so others replace them
    return [found[name] for name in names if name in found]


def _refuse_flat_validation(root: Path) -> None:
    for part in _parts(
        root, SPLIT_FOLDERS["val"][:-1]
    ):  # an unlabelled test part, as ImageNet has, is no fault
        if not subfolders(part):
            raise DataError(f"{part} has no class folders: sort its images into one folder a class")


def class_names(folder: Path) -> list[str]:
    """Names of the class folders, sorted: label k is the k-th.

    Raises:
        DataError: none, or only one.
    """
    names = [path.name for path in subfolders(folder)]
    if not names:
        found = sum(is_image(path) for path in folder.iterdir())
        what = f"{found} images but no class folders" if found else "no class folders with images"
        raise DataError(f"{folder} holds {what}. Make one folder a class, with its images inside.")
    if len(names) == 1:
        raise DataError(
            f"{folder} holds one class, {names[0]!r}; a classifier needs at least two. "
            f"If the classes lie one level deeper, name {folder / names[0]}."
        )
    return names


def subfolders(folder: Path) -> list[Path]:
    """Folders inside, sorted by name; hidden ones and archive leftovers (`__MACOSX`) do not count."""
    try:
        return sorted(path for path in folder.iterdir() if not is_hidden(path.name) and path.is_dir())
    except OSError as error:
        raise _unreadable(error) from error


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def is_image(path: Path) -> bool:
    """Does the name end like an image's (capitals do not matter)?"""
    return path.suffix.lower() in EXTENSIONS


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted, hidden ones left out; links are followed, each folder once."""
    seen = set()
    for at, folders, names in os.walk(folder, onerror=_raise_unreadable, followlinks=True):
        real = os.path.realpath(at)
        folders[:] = sorted(name for name in folders if not is_hidden(name)) if real not in seen else []
        yield from (Path(at, name) for name in sorted(names) if real not in seen and not is_hidden(name))
        seen.add(real)


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> DataError:
    return DataError(f"cannot read folder {error.filename}: {error.strerror}. Change its permissions.")


def scan(folder: Path, classes: Sequence[str]) -> tuple[list[Path], list[int], FolderReport]:
    """Image files of all classes and their labels, by class and name; other files are counted.

    Raises:
        DataError: a class folder without images, or a folder in a validation part that is no class.
    """
    files: list[Path] = []
    labels: list[int] = []
    report = FolderReport()
    for label, name in enumerate(classes):
        inside = list(walk(folder / name)) if (folder / name).is_dir() else []
        images = [path for path in inside if is_image(path)]
        files += images
        labels += [label] * len(images)
        report.ignored += [str(path) for path in inside if not is_image(path)]
    report.images = len(files)
    _refuse_strangers(folder, classes)
    return files, labels, report


def _refuse_strangers(folder: Path, classes: Sequence[str]) -> None:
    strangers = [path.name for path in subfolders(folder) if path.name not in set(classes)]
    if strangers:
        raise DataError(f"{folder}: {name_some(strangers)} are no classes of the training part")


def refuse_empty(folder: Path, classes: Sequence[str], labels: Sequence[int]) -> None:
    """Raise `DataError` if a class has no image in the training part."""
    empty = [classes[label] for label in sorted(set(range(len(classes))) - set(labels))]
    if empty:
        raise DataError(
            f"{folder}: no usable images for class {name_some(empty)}. "
            f"Add images ({' '.join(EXTENSIONS)}) or remove the folder."
        )


def find_faults(files: Sequence[Path], read: Callable[[Path], object], everything: bool) -> list[str] | None:
    """Read each file, in threads, and say what is wrong with it ("" if nothing).

    Unless `everything` is asked for, folders above 256 MB are not read, and the answer is None.
    """
    if not everything and exceed(files, CHECK_BYTES):
        return None

    def fault(path: Path) -> str:
        try:
            read(path)
        except BadImage as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(fault, files))


def exceed(files: Sequence[Path], limit: int) -> bool:
    """Do the files hold more than `limit` bytes? Looks at no more of them than it takes to know."""
    total = 0
    return any((total := total + path.stat().st_size) > limit for path in files if path.exists())


def count_copies(files: Sequence[Path], labels: Sequence[int]) -> int:
    """How many files repeat the bytes of an earlier one; warns where copies have different labels."""
    same: dict[bytes, list[int]] = defaultdict(list)
    for number, path in enumerate(files):
        same[hashlib.sha256(path.read_bytes()).digest()].append(number)
    torn = [group for group in same.values() if len({labels[number] for number in group}) > 1]
    if torn:
        pairs = [" = ".join(str(files[number]) for number in group) for group in torn]
        warnings.warn(f"the same image lies in several classes: {name_some(pairs)}", stacklevel=2)
    return len(files) - len(same)


def name_some(items: Sequence[str], separator: str = ", ") -> str:
    """The first ten, and how many more there are."""
    more = f"{separator}and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return printable(separator.join(items[:NAMED]) + more)
