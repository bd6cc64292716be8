"""Files that are either whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it to `path`.

    Whatever goes wrong, or whenever the process dies, a file that was at `path` before is still there.
    """
    part = path.with_name(path.name + PART)
    try:
        yield part
        part.chmod(0o644)  # some writers make it private
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole. Raises OSError with the remedy."""
    with naming_remedy(path), atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def naming_remedy(path: Path) -> Iterator[None]:
    """Turn an OSError within into one that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {path}: {error.strerror or error}. Free space there or choose another folder; files "
            "written before are intact, so a run can be resumed"
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder and make sure that files can be written there. Raises OSError that names it."""
    refuse_file(path)
    with naming_remedy(path):
        path.mkdir(parents=True, exist_ok=True)
    write_text(path / "probe", "")
    (path / "probe").unlink()


def refuse_file(folder: Path, option: str = "--out") -> None:
    """Raise NotADirectoryError where a file has the name of `folder` or of a folder around it: change `option`."""
    for part in (folder, *folder.parents):
        if part.is_file():
            raise NotADirectoryError(
                f"cannot write to {folder}: {part} is a file, not a folder; choose another folder ({option})"
            )


def remove_parts(folder: Path) -> None:
    """Delete what a killed process left half written."""
    for part in folder.glob(f"*{PART}"):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows has no file descriptor of a folder
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
