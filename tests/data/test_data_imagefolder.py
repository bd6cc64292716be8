"""Image folders: layouts, conversions, what is refused, and batches that workers and resuming do not change."""

import os
import pickle
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from swin_lessons.data import (
    Augment,
    DataError,
    DataSpec,
    ImageFolder,
    LoaderBatches,
    TensorBatches,
    load_dataset,
    loader_batches,
)
from swin_lessons.data import folders as folders_module
from swin_lessons.data.images import BadImage, convert, read_image

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def paint(path: Path, size: tuple[int, int] = (40, 30), mode: str = "RGB", seed: int | None = None) -> Path:
    """Write a random image; a file's name decides its content unless a seed does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(list(str(path).encode()) if seed is None else seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def make_folder(root: Path, count: int = 3, classes=("cat", "dog", "emu"), suffix: str = ".png") -> Path:
    for name in classes:
        for number in range(count):
            paint(root / name / f"{number}{suffix}")
    return root


def load(root: Path, **options) -> ImageFolder:
    return load_dataset(f"imagefolder:{root}", **{"img_size": 32, **options})


def names(data: ImageFolder) -> list[str]:
    return [f"{path.parent.name}/{path.name}" for path in data.files]


# --- layouts --------------------------------------------------------------------------------------------------


def test_three_images_a_class_divide_into_two_and_one(tmp_path):
    make_folder(tmp_path)
    train, val, test = (load(tmp_path, split=split) for split in ("train", "val", "test"))
    assert train.labels.bincount().tolist() == [2, 2, 2]
    assert val.labels.bincount().tolist() == [1, 1, 1]
    assert names(test) == names(val)
    assert sorted(names(train) + names(val)) == names(load(tmp_path, split="all"))
    assert train.classes == val.classes == ["cat", "dog", "emu"]
    assert names(load(tmp_path)) == names(train)
    others = {tuple(names(load(tmp_path, split="val", split_seed=seed))) for seed in range(8)}
    assert len(others) > 1


def test_agrees_with_torchvision_on_files_and_labels(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    make_folder(tmp_path, classes=("b", "A", "c d", "é"))
    paint(tmp_path / "b" / "deeper" / "still" / "9.png")
    ours, theirs = load(tmp_path, split="all"), datasets.ImageFolder(str(tmp_path))
    assert ours.classes == theirs.classes
    pairs = zip(map(str, ours.files), ours.labels.tolist(), strict=True)
    assert sorted(pairs) == sorted(theirs.samples)


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_imagenet_layout(tmp_path, val):
    make_folder(tmp_path / "train", 4)
    make_folder(tmp_path / val, 2)
    paint(tmp_path / "test" / "unlabelled.png")  # as in ImageNet: nothing to read there
    assert names(load(tmp_path)) == [f"{c}/{i}.png" for c in ("cat", "dog", "emu") for i in range(4)]
    for split in ("val", "test"):
        data = load(tmp_path, split=split)
        assert len(data) == 6
        assert all(path.is_relative_to(tmp_path / val) for path in data.files)


def test_three_parts(tmp_path):
    for part, count in (("train", 4), ("val", 2), ("test", 1)):
        make_folder(tmp_path / part, count)
    assert [len(load(tmp_path, split=split)) for split in ("train", "val", "test")] == [12, 6, 3]
    with pytest.raises(DataError, match="comes in parts"):
        load(tmp_path, split="all")


def test_train_part_alone_is_divided(tmp_path):
    make_folder(tmp_path / "train", 5)
    assert [len(load(tmp_path, split=split)) for split in ("train", "val")] == [12, 3]


def test_parts_may_have_capitals(tmp_path):
    make_folder(tmp_path / "Train", 4)
    make_folder(tmp_path / "VAL", 2)
    assert [len(load(tmp_path, split=split)) for split in ("train", "val")] == [12, 6]
    make_folder(tmp_path / "train", 1)
    if len(list(tmp_path.iterdir())) == 3:  # where capitals make another folder, the usual one is taken
        assert len(load(tmp_path)) == 3


def test_a_class_called_train_is_a_class(tmp_path):
    make_folder(tmp_path, classes=("bus", "train"))
    assert load(tmp_path).classes == ["bus", "train"]


def test_validation_part_keeps_the_training_labels(tmp_path):
    make_folder(tmp_path / "train")
    make_folder(tmp_path / "val", classes=("emu",))
    assert load(tmp_path, split="val").labels.tolist() == [2, 2, 2]
    make_folder(tmp_path / "val", classes=("fox",))
    with pytest.raises(DataError, match="fox are no classes of the training part"):
        load(tmp_path, split="val")


def test_flat_validation_part_is_refused(tmp_path):
    make_folder(tmp_path / "train")
    paint(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"val has no class folders: sort"):
            load(tmp_path, split=split)


def test_a_class_of_one_image_stays_in_training(tmp_path):
    make_folder(tmp_path, 5, classes=("cat", "dog"))
    paint(tmp_path / "emu" / "only.png")
    assert load(tmp_path).labels.bincount().tolist() == [4, 4, 1]
    assert load(tmp_path, split="val").labels.tolist() == [0, 1]


def test_one_image_a_class_leaves_nothing_to_validate(tmp_path):
    make_folder(tmp_path, 1)
    with pytest.raises(DataError, match="no images for split 'val'"):
        load(tmp_path, split="val")


# --- names, links, other files --------------------------------------------------------------------------------


def test_odd_names_are_fine(tmp_path):
    make_folder(tmp_path, 2, classes=("-rf *", "ein Hund 🐕", "a.b", "'quoted'"), suffix=".PNG")
    assert len(load(tmp_path, split="all")) == 8


@pytest.mark.skipif(os.name != "posix" or sys.platform == "darwin", reason="file names are Unicode here")
def test_names_that_are_no_unicode_are_spelled_out(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "emu").rename(os.fsdecode(os.fsencode(tmp_path) + b"/emu\xff"))
    data = load(tmp_path, split="all")
    assert data.classes == ["cat", "dog", "emu\\udcff"]
    assert len(data) == 9
    truncate(data.files[8])
    with pytest.raises(BadImage) as caught:
        load(tmp_path)
    assert str(caught.value).encode()


def test_other_and_hidden_files_are_no_images(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "README.txt").write_text("about")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "cat" / "._0.png").write_bytes(b"macOS leftovers")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "dog" / ".hidden").mkdir()
    paint(tmp_path / "dog" / ".hidden" / "x.png")
    (tmp_path / "__MACOSX").mkdir()
    data = load(tmp_path, split="all")
    assert len(data) == 9
    assert data.classes == ["cat", "dog", "emu"]
    assert len(data.report.ignored) == 2
    assert str(data.report) == "9 images, 2 other files ignored"


def test_links_are_followed_once(tmp_path):
    make_folder(tmp_path / "real")
    (tmp_path / "real" / "cat" / "loop").symlink_to(tmp_path / "real" / "cat")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(load(tmp_path / "link", split="all")) == 9


def test_broken_link_is_a_bad_image(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(BadImage, match=r"gone\.png"):
        load(tmp_path)


def test_copies_are_counted_and_torn_copies_warned_about(tmp_path):
    make_folder(tmp_path)
    paint(tmp_path / "cat" / "a.png", seed=1), paint(tmp_path / "cat" / "b.png", seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, split="all").report.copies == 1
    paint(tmp_path / "dog" / "c.png", seed=1)
    with pytest.warns(UserWarning, match=r"several classes(?s:.*)a\.png.*dog/c\.png"):
        assert load(tmp_path, split="all").report.copies == 2


# --- what is refused ------------------------------------------------------------------------------------------


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"photo\.jpg is a file"):
        load(tmp_path / "photo.jpg")


def test_unknown_split(tmp_path):
    with pytest.raises(DataError, match="'dev' is none of train, val, test, all"):
        ImageFolder(make_folder(tmp_path), "dev")


def test_size_of_a_folder_is_told_from_as_few_files_as_it_takes(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(bytes(10))
    assert folders_module.exceed(paths, 29)
    assert not folders_module.exceed([*paths, tmp_path / "gone"], 30)


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="no class folders with images"):
        load(tmp_path)


def test_images_without_class_folders(tmp_path):
    paint(tmp_path / "1.png"), paint(tmp_path / "2.png")
    with pytest.raises(DataError, match="2 images but no class folders"):
        load(tmp_path)


def test_one_class_and_classes_one_level_deeper(tmp_path):
    make_folder(tmp_path / "photos")
    with pytest.raises(DataError, match=r"one class, 'photos'.*one level deeper, name .*photos"):
        load(tmp_path)


def test_empty_class(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "fox").mkdir()
    (tmp_path / "fox" / "fox.txt").write_text("not an image")
    with pytest.raises(DataError, match=r"no usable images for class fox.*\.jpg"):
        load(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(200)))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def html(path: Path) -> None:
    path.write_bytes(b"<html>404</html>")


def tiny(path: Path) -> None:
    Image.new("RGB", (2, 40)).save(path)


def floating(path: Path) -> None:
    Image.new("F", (40, 40)).save(path, format="TIFF")


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
@pytest.mark.parametrize("spoil", [truncate, scramble, empty, html, tiny, floating])
def test_bad_image_is_named_and_skipped_only_when_asked(tmp_path, spoil, suffix):
    make_folder(tmp_path, suffix=suffix)
    path = tmp_path / "dog" / f"1{suffix}"
    spoil(path)
    with pytest.raises(BadImage, match=rf"dog/1\{suffix}(?s:.*)skip_bad=True"):
        load(tmp_path)
    with pytest.warns(UserWarning, match=rf"skipped 1 of 9 images(?s:.*)dog/1\{suffix}"):
        data = load(tmp_path, split="all", skip_bad=True)
    assert data.labels.bincount().tolist() == [3, 2, 3]
    assert str(data.report) == "8 images, 1 bad images skipped"
    assert str(path) in data.report.skipped[0]


def test_all_bad_images_are_listed_at_once(tmp_path):
    make_folder(tmp_path, 8, classes=("cat", "dog"))
    for path in list(tmp_path.rglob("*.png"))[:13]:
        truncate(path)
    with pytest.raises(BadImage) as caught:
        load(tmp_path)
    assert str(caught.value).count(".png") == 10
    assert "and 3 more" in str(caught.value)


def test_a_class_with_only_bad_images(tmp_path):
    make_folder(tmp_path)
    for path in (tmp_path / "emu").iterdir():
        truncate(path)
    with pytest.warns(UserWarning, match="skipped 3 of 9"), pytest.raises(DataError, match="class emu"):
        load(tmp_path, skip_bad=True)


def test_large_folders_are_checked_when_read(tmp_path, monkeypatch):
    make_folder(tmp_path)
    truncate(tmp_path / "cat" / "0.png")
    monkeypatch.setattr(folders_module, "CHECK_BYTES", 0)
    data = load(tmp_path, split="all")
    assert not data.report.checked
    assert data[1][0].shape == (3, 32, 32)
    with pytest.raises(BadImage, match=r"cat/0\.png(?s:.*)skip_bad=True"):
        data[0]
    for workers in (0, 1):
        with pytest.raises(BadImage, match=r"cat/0\.png(?s:.*)--skip-bad") as error:
            list(LoaderBatches(data, 3, workers=workers))
        assert "worker" not in str(error.value)


def test_too_small_depends_on_the_wanted_size(tmp_path):
    make_folder(tmp_path)
    paint(tmp_path / "cat" / "small.png", size=(60, 12))
    assert len(load(tmp_path, split="all", img_size=64)) == 10
    with pytest.raises(BadImage, match=r"small\.png: 60 × 12 px is too small; .*14 px"):
        load(tmp_path, img_size=224)
    assert len(load(tmp_path, split="all", img_size=224, min_size=12)) == 10


def test_pixel_bombs_are_refused(tmp_path, monkeypatch):
    path = paint(tmp_path / "bomb.png", size=(200, 200))
    for limit in (30_000, 1_000):  # Pillow warns above its limit and raises above twice that
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(BadImage, match=r"bomb\.png: too many pixels"):
            read_image(path)


def test_folder_without_permission(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "cat").chmod(0o000)
    if os.access(tmp_path / "cat", os.R_OK):
        pytest.skip("this user may read anything")
    try:
        with pytest.raises(DataError, match=r"cannot read folder .*cat"):
            load(tmp_path)
    finally:
        (tmp_path / "cat").chmod(0o755)


@pytest.mark.parametrize("in_chans", [0, 2, 5])
def test_channels_that_no_file_has(tmp_path, in_chans):
    make_folder(tmp_path)
    with pytest.raises(DataError, match=f"in_chans={in_chans}"):
        load(tmp_path, in_chans=in_chans)


# --- conversions ----------------------------------------------------------------------------------------------


def pixel(image, in_chans: int) -> list[int]:
    return np.atleast_1d(np.asarray(convert(image, in_chans))[0, 0]).tolist()


@pytest.mark.parametrize(
    ("mode", "colour", "grey", "rgb"),
    [
        ("L", 77, [77], [77, 77, 77]),
        ("RGB", (255, 0, 0), [76], [255, 0, 0]),
        ("1", 1, [255], [255, 255, 255]),
        ("I;16", 257 * 200, [200], [200, 200, 200]),
        ("I", 65535, [255], [255, 255, 255]),
        ("CMYK", (0, 255, 255, 0), [76], [255, 0, 0]),
        ("RGBA", (0, 0, 0, 255), [0], [0, 0, 0]),
        ("RGBA", (0, 0, 0, 0), [255], [255, 255, 255]),
        ("RGBA", (255, 0, 0, 128), [165], [255, 127, 127]),
        ("LA", (0, 0), [255], [255, 255, 255]),
        ("LA", (90, 255), [90], [90, 90, 90]),
        ("HSV", (0, 0, 99), [99], [99, 99, 99]),
        ("YCbCr", (99, 128, 128), [99], [99, 99, 99]),
    ],
)
def test_colour_modes(mode, colour, grey, rgb):
    image = Image.new(mode, (3, 2), colour)
    assert pixel(image, 1) == pytest.approx(grey, abs=1)
    assert pixel(image, 3) == pytest.approx(rgb, abs=1)
    assert len(pixel(image, 4)) == 4


def test_palettes_and_their_transparency(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert np.asarray(convert(image, 3)).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    image.save(tmp_path / "p.png", transparency=0)
    assert np.asarray(read_image(tmp_path / "p.png", 3)).tolist() == [[[255, 255, 255], [200, 100, 50]]]
    assert np.asarray(read_image(tmp_path / "p.png", 4))[0, :, 3].tolist() == [0, 255]


@pytest.mark.parametrize(("mode", "value"), [("F", 0.5), ("LAB", (1, 2, 3)), ("I", 70000), ("I", -1)])
def test_modes_without_a_rule_are_refused(mode, value):
    with pytest.raises(BadImage):
        convert(Image.new(mode, (4, 4), value), 3)


def test_sixteen_bit_png(tmp_path):
    values = np.array([[0, 257, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert np.asarray(read_image(tmp_path / "deep.png", 1)).tolist() == [[0, 1, 255]]


def test_camera_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (20, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "photo.jpg", exif=exif)
    assert read_image(tmp_path / "photo.jpg").size == (10, 20)


def test_animation_gives_its_first_picture(tmp_path):
    first, second = Image.new("RGB", (8, 8), (200, 0, 0)), Image.new("RGB", (8, 8), (0, 200, 0))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert np.asarray(read_image(tmp_path / "a.gif"))[0, 0].tolist() == pytest.approx([200, 0, 0], abs=3)


@pytest.mark.parametrize("in_chans", [1, 3, 4])
def test_mixed_modes_in_one_folder(tmp_path, in_chans):
    make_folder(tmp_path, 2)
    for mode in ("L", "RGBA", "P", "1"):
        paint(tmp_path / "cat" / f"mode {mode}.png", mode=mode)
    Image.fromarray(np.full((20, 20), 9999, np.uint16)).save(tmp_path / "cat" / "deep.tif")
    data = load(tmp_path, split="all", in_chans=in_chans, img_size=(16, 24))
    x = torch.stack([image for image, _ in data])
    assert x.shape == (11, in_chans, 16, 24)
    assert data.mean.shape == data.std.shape == (in_chans,)
    assert data.img_size == (16, 24)


def test_items_are_the_middle_of_the_image(tmp_path):
    """A white square with a black rim of a twentieth: the middle 7/8 shows no rim."""
    make_folder(tmp_path, 1)
    image = Image.new("RGB", (160, 80), (0, 0, 0))
    image.paste((255, 255, 255), (44, 4, 116, 76))
    image.save(tmp_path / "cat" / "0.png")
    x, label = load(tmp_path, split="all")[0]
    white = (1 - load(tmp_path, split="all").mean) / load(tmp_path, split="all").std
    assert label == 0
    torch.testing.assert_close(x, white.view(3, 1, 1).expand(3, 32, 32), atol=1e-4, rtol=0)


def test_own_transform_gets_the_picture(tmp_path):
    make_folder(tmp_path)
    data = load(tmp_path, split="all", transform=lambda image: (image.mode, image.size))
    assert data[0] == (("RGB", (40, 30)), 0)


# --- batches --------------------------------------------------------------------------------------------------

AUGMENTS = [None, "light", "strong", Augment(flip=0.5, rand_augment="rand-m9-mstd0.5-inc1")]


def same(a, b) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("augment", AUGMENTS, ids=["none", "light", "strong", "rand"])
def test_workers_resuming_and_other_random_numbers_change_nothing(tmp_path, augment):
    if isinstance(augment, Augment):
        pytest.importorskip("timm")
    data = load(make_folder(tmp_path), split="all")
    settings = {"seed": 5, "epoch": 1, "augment": augment}
    plain = list(LoaderBatches(data, 4, **settings))
    assert [len(x) for x, _ in plain] == [4, 4, 1]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    for other in (
        list(loader_batches(data, 4, workers=2, **settings)),
        [LoaderBatches(data, 4, **settings)[step] for step in range(3)],
    ):
        assert all(same(a, b) for a, b in zip(plain, other, strict=True))
    resumed = list(LoaderBatches(data, 4, start_step=1, workers=1, **settings))
    assert all(same(a, b) for a, b in zip(plain[1:], resumed, strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    again = list(LoaderBatches(data, 4, seed=5, epoch=2, augment=augment))
    assert not same(plain[0], again[0])
    assert pickle.loads(pickle.dumps(LoaderBatches(data, 4, **settings)))[1][0].equal(plain[1][0])


def test_evaluation_batches_equal_the_items(tmp_path):
    data = load(make_folder(tmp_path), split="all")
    x, y = LoaderBatches(data, 9, shuffle=False)[0]
    assert y.tolist() == data.labels.tolist()
    torch.testing.assert_close(x, torch.stack([image for image, _ in data]))


def test_training_crops_vary_and_stay_within_the_image(tmp_path):
    data = load(make_folder(tmp_path, 1), split="all")
    crops = [LoaderBatches(data, 3, epoch=epoch, shuffle=False, augment="light")[0][0] for epoch in range(6)]
    assert len({crop.sum().item() for crop in crops}) == 6
    low, high = (0 - data.mean) / data.std, (1 - data.mean) / data.std
    for crop in crops:
        assert (crop.amin((0, 2, 3)) >= low - 1e-4).all()
        assert (crop.amax((0, 2, 3)) <= high + 1e-4).all()


@pytest.mark.filterwarnings("ignore:the same image")
def test_shift_moves_whole_pixels_of_a_folder_too(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32), "white").save(tmp_path / name / "0.png")
    data = load(tmp_path, split="all")
    x, _ = LoaderBatches(data, 2, augment=Augment(shift=5, crop_area=(1, 1)))[0]
    rows = (x[:, 0, :, 16] < 0).sum(1).tolist() + (x[:, 0, 16] < 0).sum(1).tolist()  # the black that came in
    assert max(rows) in range(1, 6)
    assert min(rows) >= 0
    with pytest.raises(DataError, match="shift=32 moves the whole image out"):
        LoaderBatches(data, 2, augment=Augment(shift=32))


def test_strong_augmentation_mixes_labels(tmp_path):
    data = load(make_folder(tmp_path), split="all")
    _, y = LoaderBatches(data, 9, augment="strong")[0]
    assert y.shape == (9, 3)
    torch.testing.assert_close(y.sum(1), torch.ones(9))


def test_own_random_transform_is_seeded_too(tmp_path):
    v2 = pytest.importorskip("torchvision.transforms.v2")
    steps = [v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    data = load(make_folder(tmp_path), split="all", transform=v2.Compose(steps))
    one, two = (list(LoaderBatches(data, 4, workers=workers)) for workers in (0, 2))
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    assert one[0][0].shape == (4, 3, 16, 16)


def test_wrong_uses_are_explained(tmp_path):
    data = load(make_folder(tmp_path), in_chans=1)
    with pytest.raises(DataError, match="use LoaderBatches"):
        TensorBatches(data, 4)
    with pytest.raises(DataError, match=r"rand_augment works on RGB images; in_chans=1"):
        LoaderBatches(data, 4, augment=Augment(rand_augment="rand-m9"))
    pytest.importorskip("timm")
    for words in ("x", "rand-q9"):
        with pytest.raises(DataError, match=f"rand_augment={words}: timm knows no such words"):
            LoaderBatches(load(tmp_path), 4, augment=Augment(rand_augment=words))
    with pytest.raises(DataError, match="workers=-1"):
        LoaderBatches(data, 4, workers=-1)


def test_spec_and_repr(tmp_path):
    make_folder(tmp_path)
    data = load_dataset(DataSpec("imagefolder", tmp_path))
    assert data.img_size == 224
    assert "6 images, 3 classes, 3 × 224 × 224; found 9 images" in repr(data)
