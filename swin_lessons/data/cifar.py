"""CIFAR-10 and CIFAR-100: 60,000 colour images, 32 × 32 px, from the binary version of the archives.

The binary files are plain bytes; the Python version is a pickle, which can run code when read, so it is not.
Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swin_lessons.data.files import (
    DataError,
    cache_dir,
    download,
    find_complete,
    sha256_of,
    target_dir,
    user_dir,
    writing_to,
)

URL = "https://www.cs.toronto.edu/~kriz"
PIXELS = 3 * 32 * 32  # bytes an image: red plane, green plane, blue plane


@dataclass(frozen=True)
class Cifar:
    """One of the two sets.

    Attributes:
        name: the name `load_dataset` knows it by.
        archive, sha256: file name and digest of the binary version.
        folder: where its files lie inside the archive.
        files: split to file names.
        class_file: names of the classes, one a line.
        label_bytes: bytes before the pixels of each record; the last one is the label.
        mean, std: per channel, of the training images in 0..1.
    """

    name: str
    archive: str
    sha256: str
    folder: str
    files: dict[str, tuple[str, ...]]
    class_file: str
    label_bytes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def all_files(self) -> tuple[str, ...]:
        return (*self.files["train"], *self.files["test"], self.class_file)


CIFAR10 = Cifar(
    name="cifar10",
    archive="cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    folder="cifar-10-batches-bin",
    files={"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
    class_file="batches.meta.txt",
    label_bytes=1,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = Cifar(
    name="cifar100",
    archive="cifar-100-binary.tar.gz",
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    folder="cifar-100-binary",
    files={"train": ("train.bin",), "test": ("test.bin",)},
    class_file="fine_label_names.txt",
    label_bytes=2,  # coarse, then fine
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def load_arrays(
    cifar: Cifar, split: str, root=None, allow_download: bool = True
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images (N, 3, 32, 32) uint8, labels (N,) uint8 and class names of split "train" or "test"."""
    folder = find(cifar, root)
    if folder is None:
        if not allow_download:
            raise DataError(_not_found(cifar, root, "downloads are switched off"))
        folder = fetch(cifar, root)
    return read_split(cifar, folder, split)


def read_split(cifar: Cifar, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images, labels and class names of one split from a folder that holds the set's files."""
    classes = read_classes(folder / cifar.class_file)
    parts = [read_records(folder / name, cifar.label_bytes, len(classes)) for name in cifar.files[split]]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels), classes


def read_records(path: Path, label_bytes: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Parse one binary file: records of `label_bytes` bytes, then 3,072 pixel bytes, channel by channel.

    Returns:
        Images (N, 3, 32, 32) uint8 and labels (N,) uint8 (the last label byte: the fine one of CIFAR-100).

    Raises:
        DataError: unreadable, not a whole number of records, or a label that is no class.
    """
    data, record = _read(path), label_bytes + PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{path} is damaged: {len(data)} bytes are not a whole number of {record}-byte records. "
            "Delete it and fetch the set again."
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1]
    if labels.max() >= num_classes:
        raise DataError(f"{path} holds label {labels.max()}, but there are {num_classes} classes")
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def read_classes(path: Path) -> list[str]:
    """Class names, one a line; blank lines are skipped."""
    try:
        return _read(path).decode().split()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged: it is not text. Delete it and fetch the set again.") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Change its permissions.") from error


def find(cifar: Cifar, root=None) -> Path | None:
    """The first folder with all files of the set, or None."""
    return find_complete(search_folders(cifar, root), lambda folder: is_complete(cifar, folder))


def check(cifar: Cifar, folder: Path) -> None:
    """Read all that a folder holds; raises `DataError` if a file is damaged."""
    for split in cifar.files:
        read_split(cifar, folder, split)


def search_folders(cifar: Cifar, root=None) -> Iterator[Path]:
    """Folders to look in, in order: the user's, the cache's."""
    if user := user_dir(root):
        yield from (user, user / cifar.folder, user / cifar.name)
    yield cache_dir() / cifar.name


def is_complete(cifar: Cifar, folder: Path) -> bool:
    """Are all files of the set there?"""
    return all((folder / name).is_file() for name in cifar.all_files)


def fetch(cifar: Cifar, root=None) -> Path:
    """Unpack the archive into the user's folder or the cache, and return where the files are.

    Takes the archive from the user's folder if it lies there, else from its authors' page.

    Raises:
        DataError: it cannot be had, or is not the published one.
        WriteError: the folder cannot be written, or the disk is full.
    """
    target, user = target_dir(cifar.name, root), user_dir(root)
    local = user / cifar.archive if user else None
    with writing_to(target) as scratch:
        if local and local.is_file():
            _check_archive(cifar, local)
            unpack(cifar, local, scratch)
        else:
            _download(cifar, scratch, root)
        for name in cifar.all_files:
            (scratch / name).replace(target / name)
    return target


def _check_archive(cifar: Cifar, path: Path) -> None:
    if sha256_of(path) != cifar.sha256:
        raise DataError(f"{path} is not the published archive (its sha256 differs). Copy it again.")


def _download(cifar: Cifar, scratch: Path, root) -> None:
    archive = scratch / cifar.archive
    try:
        download(f"{URL}/{cifar.archive}", archive, cifar.sha256)
    except DataError as error:
        raise DataError(_not_found(cifar, root, str(error))) from error
    unpack(cifar, archive, scratch)


def unpack(cifar: Cifar, archive: Path, target: Path) -> None:
    """Write the set's files, and nothing else of the archive, flat into `target`."""
    try:
        with tarfile.open(archive) as tar:
            for name in cifar.all_files:
                member = tar.extractfile(f"{cifar.folder}/{name}")
                if member is None:
                    raise DataError(f"{archive}: {name} is no regular file")
                (target / name).write_bytes(member.read())
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}. Fetch it again.") from error


def _not_found(cifar: Cifar, root, failure: str) -> str:
    looked = "\n".join(f"  - {folder}" for folder in search_folders(cifar, root))
    user = user_dir(root)
    pickled = user and any(user.glob("cifar-*-py*"))
    hint = "\n  - the Python version in your folder is a pickle, which is not read" if pickled else ""
    return f"""{cifar.name} was not found and could not be fetched. Looked in:
{looked}
Tried:
  - {failure}{hint}
Ways out:
  - get {URL}/{cifar.archive}, put it into a folder
    and name that folder: root=FOLDER or SWIN_LESSONS_DATA=FOLDER
  - use a set that needs no download: "digits" (scikit-learn) or "scenes" (drawn by this package)"""
