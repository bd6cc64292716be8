"""Where data sets live on disk, and how files get there: checked, whole, or not at all."""

import errno
import hashlib
import http.client
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHUNK = 1 << 20  # bytes read at a time


class DataError(ValueError):
    """Data are missing, damaged or do not fit. The message names the value and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Text that any terminal and file takes: bytes of a file name that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


class WriteError(DataError):
    """A folder cannot be written to, or its disk is full."""


def cache_dir() -> Path:
    """Folder for fetched data: `$XDG_CACHE_HOME/swin_lessons`, else `~/.cache/swin_lessons`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swin_lessons"


def user_dir(root: str | os.PathLike | None = None) -> Path | None:
    """The folder the user named: `root`, else the environment variable `SWIN_LESSONS_DATA`, else None."""
    named = root or os.environ.get("SWIN_LESSONS_DATA")
    return Path(named).expanduser() if named else None


def target_dir(name: str, root: str | os.PathLike | None = None) -> Path:
    """Folder that a fetched data set is written to: under the user's folder if named, else the cache."""
    return (user_dir(root) or cache_dir()) / name


def find_complete(folders: Iterable[Path], is_complete: Callable[[Path], bool]) -> Path | None:
    """First folder that passes `is_complete`; folders that cannot be read are refused by name."""
    for folder in folders:
        try:
            if is_complete(folder):
                return folder
        except PermissionError as error:
            raise DataError(f"cannot read {folder}: {error.strerror}. Change its permissions.") from error
    return None


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(data: bytes, expected: str, path: Path, name: str) -> None:
    """Raise `DataError` unless `data`, read from `path`, has the `expected` sha256."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} is not the published file: its content has sha256 {found[:12]}..., expected "
            f"{expected[:12]}.... Delete it, then run: swin-lessons data {name}"
        )


@contextmanager
def writing_to(folder: Path) -> Iterator[Path]:
    """A scratch folder inside `folder`, removed at the end; what is worth keeping is moved out by then.

    Being on the same file system, a finished file moves by `os.replace`: readers see all of it or none.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise _write_error(folder, error) from error


def _write_error(folder: Path, error: OSError) -> WriteError:
    elsewhere = "or name another folder with root=... or the environment variable SWIN_LESSONS_DATA"
    if error.errno == errno.ENOSPC:
        return WriteError(f"the disk that holds {folder} is full. Free some space there, {elsewhere}.")
    reason = error.strerror or str(error)
    return WriteError(f"cannot write to {folder}: {reason}. Change its permissions, {elsewhere}.")


def download(url: str, path: Path, sha256: str | None = None, timeout: float = 30.0) -> None:
    """Write what `url` serves to `path`, in pieces.

    Args:
        url: http(s) address.
        path: file to write; its folder exists.
        sha256: expected digest; None leaves the check to the caller.
        timeout: seconds without a byte before giving up.

    Raises:
        DataError: the host cannot be reached, or the bytes are not the expected ones.
        OSError: the file cannot be written.
    """
    try:
        response = urllib.request.urlopen(url, timeout=timeout)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}: {error}") from error
    with response, open(path, "wb") as file:
        _copy(response, file, url)
    if sha256 and sha256_of(path) != sha256:
        raise DataError(f"{url} served {path.stat().st_size} bytes that are not the published file")


def _copy(response, file, url: str) -> None:
    while True:
        try:
            chunk = response.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"the download of {url} broke off: {error}") from error
        if not chunk:
            return
        file.write(chunk)
