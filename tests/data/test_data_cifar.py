"""CIFAR's binary version, on small files in the real format."""

import dataclasses
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from swin_lessons.data import DataError, catalogue, cifar, fetch, files, load_dataset

PER_FILE = 6
NAMES = {
    "cifar10": [f"class{i}" for i in range(10)],
    "cifar100": [f"fine_{i}" for i in range(100)],
}


def record(labels: list[int], image: np.ndarray) -> bytes:
    """One record as the format's page describes it: label bytes, then red, green and blue, each row by row."""
    planes = [image[:, :, channel].tobytes() for channel in range(3)]  # image is (32, 32, 3)
    return bytes(labels) + b"".join(planes)


def write(folder: Path, version: cifar.Cifar) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Write the set's files; returns split to (images (N, 32, 32, 3), labels)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, truth = np.random.default_rng(0), {}
    classes = NAMES[version.name]
    (folder / version.class_file).write_text("\n".join(classes) + "\n\n")  # the real one ends in a blank line
    for split, names in version.files.items():
        images, labels = [], []
        for name in names:
            chunk = rng.integers(0, 256, (PER_FILE, 32, 32, 3), dtype=np.uint8)
            classes_of = rng.integers(0, len(classes), PER_FILE).tolist()
            coarse = [[7], []][version.label_bytes == 1]
            rows = [record([*coarse, label], image) for label, image in zip(classes_of, chunk, strict=True)]
            (folder / name).write_bytes(b"".join(rows))
            images.append(chunk)
            labels += classes_of
        truth[split] = np.concatenate(images), labels
    return truth


VERSIONS = pytest.mark.parametrize("version", [cifar.CIFAR10, cifar.CIFAR100], ids=lambda v: v.name)


@VERSIONS
@pytest.mark.parametrize("inside", ["folder", "name", "."])
def test_reads_the_binary_version(tmp_path, version, inside):
    place = {"folder": version.folder, "name": version.name, ".": "."}[inside]
    truth = write(tmp_path / place, version)
    for split, (images, labels) in truth.items():
        data = load_dataset(version.name, root=tmp_path, split=split, download=False)
        assert torch.equal(data.images, torch.from_numpy(images).permute(0, 3, 1, 2))
        assert data.labels.tolist() == labels
        assert data.classes == NAMES[version.name]
        assert (data.in_chans, data.img_size) == (3, 32)


@VERSIONS
def test_grey_and_resized(tmp_path, version):
    write(tmp_path, version)
    data = load_dataset(version.name, root=tmp_path, in_chans=1, img_size=48)
    assert data[0][0].shape == (1, 48, 48)
    assert data.mean.shape == data.std.shape == (1,)


def archive_of(folder: Path, version: cifar.Cifar, path: Path, extra: str | None = None) -> cifar.Cifar:
    """Pack the files as the published archive is; returns the version with that archive's digest."""
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, f"{version.folder}/{file.name}")
        if extra:
            tar.addfile(tarfile.TarInfo(extra), io.BytesIO(b""))
    return dataclasses.replace(version, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@VERSIONS
def test_downloads_and_unpacks_only_what_it_needs(tmp_path, version, serve, monkeypatch):
    write(tmp_path / "files", version)
    (tmp_path / "web").mkdir()
    version = archive_of(tmp_path / "files", version, tmp_path / "web" / version.archive, "../../evil.txt")
    monkeypatch.setattr(cifar, "URL", serve(tmp_path / "web"))
    folder = cifar.fetch(version)
    assert folder == files.cache_dir() / version.name
    assert sorted(path.name for path in folder.iterdir()) == sorted(version.all_files)
    assert not list(tmp_path.rglob("evil.txt"))
    assert len(load_dataset(version.name, download=False)) == PER_FILE * len(version.files["train"])


def test_takes_the_archive_from_the_named_folder(tmp_path, monkeypatch):
    write(tmp_path / "files", cifar.CIFAR10)
    (tmp_path / "stick").mkdir()
    version = archive_of(tmp_path / "files", cifar.CIFAR10, tmp_path / "stick" / cifar.CIFAR10.archive)
    monkeypatch.setattr(cifar, "URL", "http://127.0.0.1:9")
    monkeypatch.setitem(catalogue.SOURCES, "cifar10", catalogue.Source.of_cifar(version))
    info = fetch("cifar10", tmp_path / "stick")
    assert info["path"] == str(tmp_path / "stick" / "cifar10")
    assert len(load_dataset("cifar10", root=tmp_path / "stick", download=False)) == 30


def test_wrong_archive_is_refused_and_nothing_stays(tmp_path, serve, monkeypatch):
    (tmp_path / cifar.CIFAR10.archive).write_bytes(b"not the archive")
    monkeypatch.setattr(cifar, "URL", serve(tmp_path))
    with pytest.raises(DataError, match=r"not the published file(?s:.*)Ways out"):
        load_dataset("cifar10")
    assert list((files.cache_dir() / "cifar10").iterdir()) == []
    with pytest.raises(DataError, match=r"sha256 differs.*Copy it again"):
        load_dataset("cifar10", root=tmp_path)


def test_truncated_archive_is_refused(tmp_path):
    write(tmp_path / "files", cifar.CIFAR10)
    path = tmp_path / cifar.CIFAR10.archive
    archive_of(tmp_path / "files", cifar.CIFAR10, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="cannot be unpacked"):
        cifar.unpack(cifar.CIFAR10, path, tmp_path / "out")


def test_damaged_files_are_named(tmp_path):
    write(tmp_path, cifar.CIFAR10)
    path = tmp_path / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin is damaged"):
        load_dataset("cifar10", root=tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_3\.bin is damaged"):
        load_dataset("cifar10", root=tmp_path)
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(DataError, match=r"label 10, but there are 10 classes"):
        load_dataset("cifar10", root=tmp_path)
    path.write_bytes(whole)
    (tmp_path / "batches.meta.txt").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(DataError, match=r"batches\.meta\.txt is damaged"):
        load_dataset("cifar10", root=tmp_path)


def test_pickled_version_is_not_read_but_explained(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match=r"pickle(?s:.*)cifar-10-binary\.tar\.gz"):
        load_dataset("cifar10", root=tmp_path, download=False)
