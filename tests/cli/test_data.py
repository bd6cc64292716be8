"""`swin-lessons data` on a user's folder: what is in it, and what was checked."""

import shutil
import subprocess
import sys

import pytest

from swin_lessons.cli import main
from swin_lessons.data import folders


def rows(capsys) -> dict[str, str]:
    """What the command printed, by the first column."""
    lines = capsys.readouterr().out.splitlines()[1:]
    return dict(tuple(map(str.strip, line.strip().split("  ", 1))) for line in lines)


def test_a_folder_is_described_once(photos, capsys):
    (photos / "cat" / "notes.txt").write_text("x")
    assert main(["data", f"imagefolder:{photos}"]) == 0
    printed = rows(capsys)
    assert printed["whole folder"] == "6 images, 1 other files ignored; every image was read"
    assert printed["train"].startswith("4 images, 2 classes")
    assert printed["classes"] == "cat, dog"


def test_parts_are_described_each(photos, tmp_path, capsys):
    for part in ("train", "val"):
        shutil.copytree(photos, tmp_path / "parts" / part)
    (tmp_path / "parts" / "val" / "dog" / "0.png").unlink()
    assert main(["data", f"imagefolder:{tmp_path / 'parts'}"]) == 0
    printed = rows(capsys)
    assert printed["train folder"].startswith("6 images; every")
    assert printed["val folder"].startswith("5 images; every")


def test_a_large_folder_says_that_it_was_not_read(photos, monkeypatch, capsys):
    monkeypatch.setattr(folders, "CHECK_BYTES", 2**20 - 1)
    monkeypatch.setattr(folders, "exceed", lambda files, limit: True)
    bad = photos / "cat" / "bad.png"
    bad.write_bytes(b"")
    assert main(["data", f"imagefolder:{photos}"]) == 0
    assert "no image was read" in rows(capsys)["whole folder"]
    with pytest.warns(UserWarning, match="skipped 1 of 7"):
        assert main(["data", f"imagefolder:{photos}", "--skip-bad"]) == 0
    assert rows(capsys)["whole folder"] == "6 images, 1 bad images skipped; every image was read"


def test_skipped_images_and_copies_are_notes(photos):
    (photos / "cat" / "bad.png").write_bytes(b"")
    shutil.copy(photos / "cat" / "0.png", photos / "dog" / "copy.png")
    command = [sys.executable, "-m", "swin_lessons", "data", f"imagefolder:{photos}", "--skip-bad"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    skipped, copies = done.stderr.splitlines()
    assert skipped.startswith(f"swin-lessons data: note: skipped 1 of 8 images: {photos}")
    assert copies.startswith("swin-lessons data: note: the same image lies in several classes: ")
