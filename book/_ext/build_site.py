"""Build the site into `_build/html`, or keep it when nothing that it is made of has changed.

`python book/_ext/build_site.py [--force]`. Warnings are errors: a broken reference never reaches a reader.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import live
import vendor

ROOT = Path(__file__).parents[2]
SITE = ROOT / "_build" / "html"
STAMP = ROOT / "_build" / "site.sha256"
JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"  # works without the script's folder on PATH
SOURCES = (
    "_config.yml",
    "_toc.yml",
    "CHANGELOG.md",
    "pyproject.toml",
    "constraints.txt",
    "book",
    "notebooks",
    "swin_lessons",  # the reference pages and the live figure are made from it
)


def source_files(root: Path = ROOT) -> list[Path]:
    def wanted(path: Path) -> bool:
        return path.is_file() and not {"__pycache__", ".ipynb_checkpoints", "vendor"} & set(path.parts)

    found = [p for name in SOURCES for p in (root / name, *(root / name).rglob("*")) if wanted(p)]
    return sorted(found)


def digest(root: Path = ROOT) -> str:
    """Hash of all that the site is made of."""
    total = hashlib.sha256(vendor.digest().encode())
    for path in source_files(root):
        total.update(
            str(path.relative_to(root)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest()
        )
    return total.hexdigest()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Only one build at a time, where the system can lock files (Windows cannot this way)."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as handle:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(force: bool = False) -> Path:
    """The folder of the built site. Raises SystemExit when Sphinx warns of anything."""
    with lock(ROOT / "_build" / "lock"):
        before = digest()
        if not force and (SITE / "index.html").is_file() and STAMP.is_file() and STAMP.read_text() == before:
            return SITE
        STAMP.unlink(missing_ok=True)
        vendor.fetch()
        live.build()
        shutil.rmtree(SITE, ignore_errors=True)  # pages that are gone must go
        options = ["--all", "-q", "-W", "-n", "--keep-going", "--path-output", str(ROOT)]
        run = subprocess.run(
            [sys.executable, "-c", JUPYTER_BOOK, "build", *options, str(ROOT)], stdout=sys.stderr
        )
        if run.returncode:
            raise SystemExit("the book did not build: the warnings above are errors (-W), correct them")
        STAMP.write_text(before)
    return SITE


def where(site: Path) -> str:
    """What to do with the built site, and where the package's command is."""
    index = site / "index.html"
    return (
        f"The book is at {index}\n"
        f"Open {index.as_uri()} in a browser.\n"
        "For the live model serve it: .venv/bin/python -m http.server -d _build/html, "
        "then open http://localhost:8000\n"
        "The command is .venv/bin/swin-lessons; `. .venv/bin/activate` makes it swin-lessons."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--force", action="store_true", help="build even when nothing changed")
    site = build(parser.parse_args().force)
    print(where(site))
