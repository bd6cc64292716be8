"""Fashion-MNIST: where it is looked for, how it is fetched, what is refused; and the real files where they are."""

import builtins
import gzip
import hashlib
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny_sets import idx

from swin_lessons.data import DataError, fashion_mnist, fetch, files, load_dataset
from swin_lessons.data.fashion_mnist import read_idx
from swin_lessons.data.files import WriteError

arrays = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5))


@given(arrays)
def test_idx_round_trip(array):
    assert np.array_equal(read_idx(idx(array)), array)


@given(arrays, st.data())
def test_idx_refuses_any_truncation(array, data):
    whole = idx(array)
    with pytest.raises(DataError):
        read_idx(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "nothing"),
        (b"\x1f\x8b\x08\x00", "1f 8b"),
        (struct.pack(">HBBI", 0, 0x0D, 1, 1) + b"\0" * 4, "0x0d"),
        (idx(np.zeros(3, np.uint8)) + b"\0", "too long"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "cut short"),
    ],
)
def test_idx_names_what_is_wrong(data, complaint):
    with pytest.raises(DataError, match=complaint):
        read_idx(data)


def first_pixel(**options) -> int:
    return int(load_dataset("fashion-mnist", download=False, **options).images[0, 0, 0, 0])


@pytest.mark.parametrize("packed", [True, False])
def test_reads_both_splits(tmp_path, write_fashion, packed):
    write_fashion(tmp_path, packed=packed)
    train = load_dataset("fashion-mnist", root=tmp_path)
    test = load_dataset("fashion-mnist", root=tmp_path, split="test")
    assert (len(train), len(test)) == (30, 20)
    assert train.images.shape == (30, 1, 28, 28)
    assert train.labels.tolist() == [i % 10 for i in range(30)]
    assert train.classes[9] == "ankle boot"


def test_look_up_order(tmp_path, write_fashion, monkeypatch):
    """Named folder, then the variable's, then the cache, then Debian's: each wins once those before are gone."""
    debian = tmp_path / "debian"
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", debian)
    monkeypatch.setenv("SWIN_LESSONS_DATA", str(tmp_path / "env"))
    places = [tmp_path / "named", tmp_path / "env", files.cache_dir() / "fashion-mnist", debian]
    for place in places:
        write_fashion(place, fill=7)
    assert first_pixel(root=places[0]) == 7
    for number, place in enumerate(places):
        write_fashion(place, fill=number)  # the digests now fit this place's files alone
        assert first_pixel(root=places[0] if number == 0 else None) == number
        shutil.rmtree(place)
    with pytest.raises(DataError, match="not found"):
        first_pixel()


@pytest.mark.parametrize("inside", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_layouts_inside_the_named_folder(tmp_path, write_fashion, inside):
    write_fashion(tmp_path / inside, fill=9)
    assert first_pixel(root=tmp_path) == 9


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def damage_other_content(path: Path) -> None:
    path.write_bytes(gzip.compress(idx(np.zeros((30, 28, 28), np.uint8))))


def damage_not_gzip(path: Path) -> None:
    path.write_bytes(b"<html>please log in to the network</html>")


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_other_content, damage_not_gzip])
def test_damaged_file_is_named_with_the_remedy(tmp_path, write_fashion, damage):
    path = write_fashion(tmp_path) / "train-images-idx3-ubyte.gz"
    damage(path)
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz.*(?s:.*)swin-lessons data fashion-mnist"
    ):
        load_dataset("fashion-mnist", root=tmp_path)


def no_apt(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() or path.name.startswith(".fetch")]


def test_fetch_from_the_web(tmp_path, write_fashion, serve, monkeypatch):
    no_apt(monkeypatch)
    source = write_fashion(tmp_path / "web")
    monkeypatch.setattr(fashion_mnist, "URL", serve(source))
    info = fetch("fashion-mnist", tmp_path / "root")
    target = tmp_path / "root" / "fashion-mnist"
    assert info["path"] == str(target)
    assert (
        sorted(leftovers(target)) == sorted(info["files"]) == sorted(path.name for path in source.iterdir())
    )
    for path in source.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
        assert info["sha256"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert info["seconds"] > 0
    assert len(load_dataset("fashion-mnist", root=tmp_path / "root", download=False)) == 30


def test_fetch_through_apt(tmp_path, write_fashion, monkeypatch):
    """With stand-ins for apt-get and dpkg that do what the real ones do, on a tar file."""
    source, tools = write_fashion(tmp_path / "source"), tmp_path / "bin"
    package = tmp_path / "package" / "usr/share/datasets"
    package.mkdir(parents=True)
    source.rename(package / "fashion-mnist")
    tools.mkdir()
    apt = f"tar cf {fashion_mnist.DEBIAN_PACKAGE}_1_all.deb -C {tmp_path / 'package'} usr"
    for name, line in {"apt-get": f'[ "$1" = download ] && {apt}', "dpkg": 'tar xf "$2" -C "$3"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", Path("/usr/share/datasets/fashion-mnist"))
    folder = fashion_mnist.fetch()
    assert folder == files.cache_dir() / "fashion-mnist"
    assert sorted(leftovers(folder)) == sorted(f"{name}.gz" for name in fashion_mnist.SHA256)


def test_apt_that_fails_gives_way_to_the_web(tmp_path, write_fashion, serve, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("apt-get", "dpkg"):
        (tools / name).write_text("#!/bin/sh\necho E: Unable to locate package >&2\nexit 100\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/bin:/usr/bin")
    monkeypatch.setattr(fashion_mnist, "URL", serve(write_fashion(tmp_path / "web")))
    assert len(load_dataset("fashion-mnist")) == 30
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9")


def test_when_nothing_works_the_message_says_what_was_tried(tmp_path, monkeypatch):
    no_apt(monkeypatch)
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(DataError) as caught:
        load_dataset("fashion-mnist", root=tmp_path / "root")
    message = str(caught.value)
    for part in (
        str(tmp_path / "root"),
        "no apt-get",
        "127.0.0.1:9",
        "Ways out",
        "SWIN_LESSONS_DATA",
        "digits",
    ):
        assert part in message


def test_damaged_download_leaves_nothing(tmp_path, write_fashion, serve, monkeypatch):
    no_apt(monkeypatch)
    source = write_fashion(tmp_path / "web")
    damage_flip(source / "t10k-images-idx3-ubyte.gz")
    monkeypatch.setattr(fashion_mnist, "URL", serve(source))
    with pytest.raises(DataError, match=r"t10k-images(?s:.*)Ways out"):
        load_dataset("fashion-mnist", root=tmp_path / "root")
    assert leftovers(tmp_path / "root") == []


def test_fetch_replaces_damaged_files(tmp_path, write_fashion, serve, monkeypatch):
    """What the error about a damaged file tells the user to run really repairs it."""
    no_apt(monkeypatch)
    source = write_fashion(tmp_path / "web")
    shutil.copytree(source, files.cache_dir() / "fashion-mnist")
    damage_truncate(files.cache_dir() / "fashion-mnist" / "train-images-idx3-ubyte.gz")
    monkeypatch.setattr(fashion_mnist, "URL", serve(source))
    assert fetch("fashion-mnist")["fetched"]
    assert len(load_dataset("fashion-mnist", download=False)) == 30
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9")
    assert not fetch("fashion-mnist")["fetched"]


def test_downloads_switched_off(tmp_path):
    with pytest.raises(DataError, match=r"switched off(?s:.*)SWIN_LESSONS_DATA"):
        load_dataset("fashion-mnist", download=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_full_disk(tmp_path, write_fashion, serve, monkeypatch):
    no_apt(monkeypatch)
    monkeypatch.setattr(fashion_mnist, "URL", serve(write_fashion(tmp_path / "web")))

    def onto_full_disk(path, mode="r", *args, **kwargs):
        real = "/dev/full" if "w" in mode else path
        return builtins.open(real, mode, *args, **kwargs)

    monkeypatch.setattr(files, "open", onto_full_disk, raising=False)
    with pytest.raises(WriteError, match=r"is full.*SWIN_LESSONS_DATA"):
        load_dataset("fashion-mnist", root=tmp_path / "root")
    assert leftovers(tmp_path / "root") == []


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WriteError, match=r"cannot write to .*file.*SWIN_LESSONS_DATA"):
        load_dataset("fashion-mnist", root=tmp_path / "file")


def test_folder_without_permission(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(WriteError, match="Permission denied"):
        load_dataset("fashion-mnist", root=locked)


# --- the real files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_folder():
    """The real set, found on this machine or fetched through apt; never from the web."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fashion_mnist, "_from_web", files_are_not_downloaded)
        folder = files.find_complete(fashion_mnist.search_folders(), fashion_mnist.is_complete)
        try:
            return folder or fashion_mnist.fetch()
        except DataError as error:
            pytest.skip(f"no Fashion-MNIST here, and apt gives none: {error}")


def files_are_not_downloaded(scratch):
    raise DataError("tests do not download")


def test_real_set_is_the_published_one(real_folder):
    images, labels = fashion_mnist.read_split(real_folder, "train")
    assert images.shape == (60_000, 28, 28)
    assert np.bincount(labels).tolist() == [6000] * 10
    assert images.mean() / 255 == pytest.approx(fashion_mnist.MEAN[0], abs=5e-5)
    assert images.std() / 255 == pytest.approx(fashion_mnist.STD[0], abs=5e-5)
    test_images, test_labels = fashion_mnist.read_split(real_folder, "test")
    assert test_images.shape == (10_000, 28, 28)
    assert np.bincount(test_labels).tolist() == [1000] * 10


def test_real_set_reads_as_torchvision_reads_it(real_folder, tmp_path):
    mnist = pytest.importorskip("torchvision.datasets.mnist")
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        packed = real_folder / f"{name}.gz"
        raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (real_folder / name).read_bytes()
        (tmp_path / name).write_bytes(raw)
        theirs = mnist.read_sn3_pascalvincent_tensor(str(tmp_path / name))
        assert np.array_equal(theirs.numpy(), read_idx(raw))


PUBLISHED_AT = {"train": 1504176606, "t10k": 1504176627}  # gzip's time stamps in the first publication


def test_debian_files_are_torchvision_s_but_for_the_gzip_header(real_folder):
    """Put the time and the name back into the header: the md5 sums that torchvision publishes come out."""
    datasets = pytest.importorskip("torchvision.datasets")
    for file_name, md5 in datasets.FashionMNIST.resources:
        path = real_folder / file_name
        if not path.exists():
            pytest.skip(f"{real_folder} holds unpacked files")
        data = path.read_bytes()
        if data[3] == 0:  # no name in the header: Debian's
            stamp = struct.pack("<I", PUBLISHED_AT[file_name.split("-")[0]])
            data = b"\x1f\x8b\x08\x08" + stamp + b"\x00\x03" + file_name[:-3].encode() + b"\0" + data[10:]
        assert hashlib.md5(data).hexdigest() == md5
