"""Fashion-MNIST: 70,000 grey images of clothes, 28 × 28 px, ten classes.

Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms", 2017 (arXiv:1708.07747), MIT licence.
"""

import gzip
import math
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from swin_lessons.data.files import (
    DataError,
    WriteError,
    cache_dir,
    check_sha256,
    download,
    find_complete,
    target_dir,
    user_dir,
    writing_to,
)

NAME = "fashion-mnist"
CLASSES = [
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
]
MEAN, STD = (0.2860,), (0.3530,)  # of the 60,000 training images, pixels in 0..1

# sha256 of the bytes inside each .gz file. Debian's .gz files differ from the first publication's in the gzip
# header alone (time and name), so the content is what can be checked wherever the files come from.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
STEMS = {"train": "train", "test": "t10k"}

DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"  # the one torchvision uses


def read_idx(data: bytes, source: object = "data") -> np.ndarray:
    """Parse MNIST's IDX format: two zero bytes, a type, the number of axes, big-endian sizes, values.

    Args:
        data: the whole file, uncompressed.
        source: what to call it in errors.

    Returns:
        uint8 array with the shape that the header states; read-only, shares memory with `data`.

    Raises:
        DataError: no IDX header, a type other than unsigned byte, or a length that disagrees with the header.
    """
    if len(data) < 4 or data[:2] != b"\0\0":
        raise DataError(f"{source} is not an IDX file: it starts with {data[:4].hex(' ') or 'nothing'}")
    if data[2] != 0x08:
        raise DataError(f"{source} holds IDX type 0x{data[2]:02x}; only unsigned bytes (0x08) are read")
    header = 4 + 4 * data[3]
    if len(data) < header:
        raise DataError(f"{source} is cut short: {len(data)} bytes, where the header alone has {header}")
    shape = np.frombuffer(data[4:header], dtype=">u4").tolist()
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{source} is cut short or too long: the header says {shape}, {len(data) - header} values follow"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def load_arrays(split: str, root=None, allow_download: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 28, 28) uint8 and labels (N,) uint8 of `split` ("train" or "test"), found or fetched."""
    folder = find(root)
    if folder is None:
        if not allow_download:
            raise DataError(_not_found(root, ["downloads are switched off"]))
        folder = fetch(root)
    return read_split(folder, split)


def find(root=None) -> Path | None:
    """The first folder with the four files, or None."""
    return find_complete(search_folders(root), is_complete)


def check(folder: Path) -> None:
    """Read all that a folder holds; raises `DataError` if a file is damaged or not the published one."""
    for split in STEMS:
        read_split(folder, split)


def search_folders(root=None) -> Iterator[Path]:
    """Folders to look in, in order: the user's, the cache's, Debian's."""
    if user := user_dir(root):
        yield from (user, user / NAME, user / "FashionMNIST" / "raw")  # the last is torchvision's habit
    yield cache_dir() / NAME
    yield DEBIAN_FOLDER


def is_complete(folder: Path) -> bool:
    """Are all four files there, compressed or not?"""
    return all(_path_of(folder, name).is_file() for name in SHA256)


def _path_of(folder: Path, name: str) -> Path:
    packed = folder / f"{name}.gz"
    return packed if packed.is_file() else folder / name


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split from a folder that holds the four files; checks sha256 and sizes."""
    if split not in STEMS:
        raise DataError(f"Fashion-MNIST has no split {split!r}; it has {', '.join(STEMS)}")
    images = _read_checked(folder, f"{STEMS[split]}-images-idx3-ubyte")
    labels = _read_checked(folder, f"{STEMS[split]}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.shape != images.shape[:1] or labels.max() >= len(CLASSES):
        raise DataError(f"{folder}: images {images.shape} and labels {labels.shape} do not belong together")
    return images, labels


def _read_checked(folder: Path, name: str) -> np.ndarray:
    path = _path_of(folder, name)
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged: {error}. Delete it, then run: swin-lessons data {NAME}"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Change its permissions.") from error
    check_sha256(data, SHA256[name], path, NAME)
    return read_idx(data, path)


def fetch(root=None) -> Path:
    """Put the four files, checked, into the user's folder or the cache, and return that folder.

    Tries Debian's package (`apt-get download` and `dpkg -x`, which need no root), then the web.

    Raises:
        DataError: no way worked (the message lists what was tried and what to do by hand).
        WriteError: the folder cannot be written, or the disk is full.
    """
    target, failures = target_dir(NAME, root), []
    for way in (_from_debian, _from_web):
        try:
            with writing_to(target) as scratch:
                _move_checked(way(scratch), target)
            return target
        except WriteError:
            raise
        except DataError as error:
            failures.append(str(error))
    raise DataError(_not_found(root, failures))


def _move_checked(source: Path, target: Path) -> None:
    check(source)
    for name in SHA256:
        path = _path_of(source, name)
        path.replace(target / path.name)


def _from_debian(scratch: Path) -> Path:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise DataError("this system has no apt-get")
    _call(["apt-get", "download", DEBIAN_PACKAGE], scratch)
    for package in scratch.glob("*.deb"):
        _call(["dpkg", "-x", package.name, "."], scratch)
    return scratch / DEBIAN_FOLDER.relative_to("/")


def _call(command: list[str], cwd: Path) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"`{' '.join(command)}` took longer than {error.timeout:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise DataError(f"`{' '.join(command)}` failed: {last}")


def _from_web(scratch: Path) -> Path:
    for name in SHA256:
        download(f"{URL}/{name}.gz", scratch / f"{name}.gz")
    return scratch


def _not_found(root, failures: list[str]) -> str:
    looked = "\n".join(f"  - {folder}" for folder in search_folders(root))
    tried = "\n".join(f"  - {failure}" for failure in failures)
    names = ", ".join(f"{name}.gz" for name in SHA256)
    return f"""Fashion-MNIST was not found and could not be fetched. Looked in:
{looked}
Tried:
{tried}
Ways out:
  - Debian or Ubuntu: `sudo apt-get update`, then run this again (or `sudo apt-get install {DEBIAN_PACKAGE}`)
  - copy the four files ({names}) into a folder and name it: root=FOLDER or SWIN_LESSONS_DATA=FOLDER
  - use a set that needs no download: "digits" (scikit-learn) or "scenes" (drawn by this package)"""
