"""Tensor batches: what a batch depends on, and each augmentation against a plain loop or its definition."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.data import Augment, DataError, ImageArrays, TensorBatches
from swin_lessons.data.batches import (
    PRESETS,
    augmentation,
    mix,
    random_erase,
    random_flip,
    random_shift,
    rectangles,
)
from swin_lessons.data.pixels import fit_size, normalise, stats_to_channels, to_channels
from swin_lessons.data.splits import hold_out


def make_set(count: int = 23, channels: int = 1, size: int = 28, **options) -> ImageArrays:
    rng = np.random.default_rng(count)
    images = rng.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    stats = {"mean": (0.3,) * channels, "std": (0.4,) * channels}
    return ImageArrays(images, np.arange(count) % 5, list("abcde"), **stats, **options)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def same(a, b) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("augment", [None, *PRESETS])
def test_a_batch_depends_on_seed_epoch_and_step_alone(augment):
    data = make_set(img_size=32)
    first = TensorBatches(data, 5, seed=3, epoch=2, augment=augment)
    batches = list(first)
    assert len(batches) == len(first) == 5
    assert same(first[3], batches[3])
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    resumed = list(TensorBatches(data, 5, seed=3, epoch=2, augment=augment, start_step=2))
    assert len(resumed) == 3
    assert all(same(a, b) for a, b in zip(resumed, batches[2:], strict=True))
    moved = TensorBatches(data, 5, seed=3, epoch=0, augment=augment)
    assert not same(moved[0], batches[0])
    moved.set_epoch(2)
    assert same(moved[0], batches[0])
    assert not same(TensorBatches(data, 5, seed=4, epoch=2, augment=augment)[0], batches[0])


def test_global_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(TensorBatches(make_set(), 5, augment="strong"))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@given(st.integers(1, 40), st.integers(1, 45), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_an_epoch_shows_each_image_once(count, batch_size, shuffle, drop_last):
    images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    data = ImageArrays(images, np.zeros(count), ["a"], mean=(0.0,), std=(1.0,))
    batches = TensorBatches(data, batch_size, shuffle=shuffle, drop_last=drop_last)
    seen = [round(float(x) * 255) for batch, _ in batches for x in batch[:, 0, 0, 0]]
    assert len(list(batches)) == len(batches)
    if drop_last:
        assert len(seen) == count // batch_size * batch_size == len(set(seen))
    else:
        assert sorted(seen) == list(range(count))
    if not shuffle:
        assert seen == sorted(seen)


@pytest.mark.parametrize("img_size", [None, 32, 20, (40, 24)])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_batches_and_items_agree(img_size, in_chans):
    data = make_set(img_size=img_size, in_chans=in_chans)
    x, y = TensorBatches(data, 6, shuffle=False)[1]
    height, width = data.size
    assert x.shape == (6, in_chans, height, width)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    for place in range(6):
        image, label = data[6 + place]
        torch.testing.assert_close(image, x[place])
        assert label == int(y[place])


def test_28_px_become_32_px_by_zeros_around():
    data = make_set(img_size=32)
    x = TensorBatches(data, 4, shuffle=False)[0][0]
    framed = np.zeros((4, 1, 32, 32))
    framed[:, :, 2:30, 2:30] = data.images[:4].numpy()
    np.testing.assert_allclose(x.numpy(), (framed / 255 - 0.3) / 0.4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "new"), [(28, (20, 20)), (28, (56, 56)), (28, (40, 31)), (8, (32, 32))])
def test_other_sizes_are_resized_as_torchvision_does(size, new):
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = make_set(3, 3, size).images
    theirs = functional.resize(images.float(), list(new), antialias=True)
    torch.testing.assert_close(fit_size(images, new), theirs)


@given(st.integers(0, 2), st.integers(0, 2))
def test_padding_keeps_every_pixel(top, left):
    images = make_set(2, 3, 9).images
    fitted = fit_size(images, (9 + top, 9 + left))
    assert fitted.dtype == torch.uint8
    assert fitted.long().sum() == images.long().sum()
    assert torch.equal(fitted[:, :, top // 2 : top // 2 + 9, left // 2 : left // 2 + 9], images)


def test_grey_by_luma_equals_pillow():
    image_module = pytest.importorskip("PIL.Image")
    images = make_set(2, 3, 16).images
    grey = to_channels(images, 1)
    for ours, colour in zip(grey, images, strict=True):
        theirs = np.asarray(image_module.fromarray(colour.permute(1, 2, 0).numpy()).convert("L"))
        assert np.abs(ours[0].numpy().astype(int) - theirs).max() <= 1  # Pillow rounds in fixed point


def test_channel_rules():
    grey = make_set(2, 1).images
    assert torch.equal(to_channels(grey, 3), torch.cat([grey] * 3, 1))
    assert stats_to_channels((0.2,), 3) == (0.2, 0.2, 0.2)
    colour = make_set(50, 3).images
    mean = colour.float().mean((0, 2, 3)) / 255
    (expected,) = stats_to_channels(tuple(mean.tolist()), 1)
    assert float(to_channels(colour, 1).float().mean() / 255) == pytest.approx(expected, abs=2e-3)
    for channels in (2, 4):
        with pytest.raises(DataError, match=f"in_chans={channels}"):
            to_channels(colour, channels)


def test_normalise_by_its_formula():
    images = make_set(2, 3).images
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    expected = (images.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(normalise(images, mean, std).double(), expected, rtol=1e-5, atol=1e-6)


def test_shift_moves_by_whole_pixels_and_fills_with_zeros():
    x = torch.rand(64, 2, 7, 6) + 0.1
    moved = random_shift(x, 2, rng())
    offsets = set()
    for before, after in zip(x, moved, strict=True):
        fits = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(after, shifted_by_loop(before, dy, dx))
        ]
        assert len(fits) == 1
        offsets |= set(fits)
    assert {dy for dy, _ in offsets} == {dx for _, dx in offsets} == {-2, -1, 0, 1, 2}


def shifted_by_loop(image, dy, dx):
    out = torch.zeros_like(image)
    for y in range(image.shape[1]):
        for x in range(image.shape[2]):
            if 0 <= y - dy < image.shape[1] and 0 <= x - dx < image.shape[2]:
                out[:, y, x] = image[:, y - dy, x - dx]
    return out


def test_flip_mirrors_about_the_asked_share():
    x = torch.rand(400, 1, 3, 4)
    flipped = random_flip(x, 0.25, rng())
    mirrored = torch.tensor([torch.equal(b, a.flip(-1)) for a, b in zip(x, flipped, strict=True)])
    kept = torch.tensor([torch.equal(b, a) for a, b in zip(x, flipped, strict=True)])
    assert torch.equal(mirrored, ~kept)
    assert 0.15 < mirrored.float().mean() < 0.35
    assert torch.equal(random_flip(x, 1.0, rng()), x.flip(-1))


def test_erase_clears_one_rectangle_of_the_asked_area():
    x = torch.ones(300, 3, 32, 32)
    erased = random_erase(x, 0.5, (0.1, 0.2), rng()) == 0
    assert torch.equal(erased[:, :1].expand_as(erased), erased)
    holes = [hole for hole in erased[:, 0] if hole.any()]
    assert 0.4 < len(holes) / 300 < 0.6
    for hole in holes:
        rows, columns = hole.any(1).nonzero(), hole.any(0).nonzero()
        box = hole[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all()  # it is a whole rectangle
        assert 0.08 < hole.float().mean() < 0.22  # 0.1 to 0.2, sides rounded to px


@given(st.integers(1, 30), st.integers(1, 30), st.floats(0, 1), st.floats(0.2, 5), st.integers(0, 9))
def test_rectangles_never_leave_the_image(height, width, part, aspect, seed):
    box = rectangles(
        torch.zeros(1, 1, height, width), np.array([part]), np.array([aspect]), np.random.default_rng(seed)
    )
    tall, wide = int(box[0, 0].any(1).sum()), int(box[0, 0].any(0).sum())
    assert box.sum() == tall * wide
    wanted = (
        min(height, round((height * height * part * aspect) ** 0.5)),
        min(width, round((width * width * part / aspect) ** 0.5)),
    )
    if min(wanted) > 0:
        assert (tall, wide) == wanted


def test_mixup_is_a_weighted_sum_with_the_reverse():
    x, labels = torch.rand(6, 2, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    mixed, targets = mix(x, labels, 5, Augment(mixup=0.8), rng())
    hot = F.one_hot(labels, 5).float()
    share = targets[0, 0].item()  # of the first image, whose partner has the same class
    assert share == pytest.approx(1.0)
    share = targets[1, 1].item()
    assert 0 < share < 1
    torch.testing.assert_close(targets, share * hot + (1 - share) * hot.flip(0))
    torch.testing.assert_close(mixed, share * x + (1 - share) * x.flip(0))


def test_cutmix_pastes_a_rectangle_and_its_share_is_the_area():
    x, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    mixed, targets = mix(x, labels, 4, Augment(cutmix=1.0), gen(3))
    kept, pasted = (mixed == x).all(1), (mixed == x.flip(0)).all(1)
    assert (kept ^ pasted).all()
    assert torch.equal(pasted[0], pasted[3])
    assert 0 < pasted[0].sum() < 256
    for image in range(4):
        assert targets[image, image].item() == pytest.approx(kept[image].float().mean().item())
        assert targets[image, 3 - image].item() == pytest.approx(pasted[image].float().mean().item())


def test_mixing_batches_carry_soft_targets():
    data = make_set()
    soft = torch.cat([y for _, y in TensorBatches(data, 5, augment="strong")])
    assert soft.shape == (23, 5)
    assert soft.dtype == torch.float32
    torch.testing.assert_close(soft.sum(1), torch.ones(23))


def gen(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_mixup_and_cutmix_take_turns():
    x, labels = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    x[0] = 1
    cut = 0
    for seed in range(60):
        mixed, _ = mix(x, labels, 2, Augment(mixup=1.0, cutmix=1.0), gen(seed))
        cut += bool(((mixed == 0) | (mixed == 1)).all())  # CutMix makes no value in between
    assert 15 < cut < 45


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"flip": 1.5}, "flip=1.5"),
        ({"erase": -0.1}, "erase=-0.1"),
        ({"shift": -1}, "shift=-1"),
        ({"mixup": -1.0}, "mixup=-1.0"),
        ({"erase_area": (0.5, 0.1)}, "erase_area"),
        ({"crop_area": (0.0, 1.0)}, "crop_area"),
        ({"crop_area": 0.5}, "crop_area=0.5: give two parts"),
        ({"flip": True}, "flip=True"),
        ({"shift": 1.5}, "shift=1.5: give a whole number of px"),
        ({"rand_augment": None}, "rand_augment=None"),
    ],
)
def test_augment_refuses_nonsense(settings, complaint):
    with pytest.raises(DataError, match=complaint):
        Augment(**settings)


def test_batches_refuse_nonsense():
    data = make_set()
    with pytest.raises(DataError, match="batch_size=0"):
        TensorBatches(data, 0)
    with pytest.raises(DataError, match="not be negative"):
        TensorBatches(data, 4, seed=-1)
    with pytest.raises(DataError, match="'lots' is none of none, light"):
        TensorBatches(data, 4, augment="lots")
    with pytest.raises(DataError, match="LoaderBatches"):
        TensorBatches([(0, 0)], 4)
    with pytest.raises(DataError, match="rand_augment"):
        TensorBatches(data, 4, augment=Augment(rand_augment="rand-m9"))
    with pytest.raises(DataError, match="crop_area works on image folders"):
        TensorBatches(data, 4, augment=Augment(crop_area=(0.5, 1)))
    with pytest.raises(DataError, match="shift=99 moves the whole image out"):
        TensorBatches(data, 4, augment=Augment(shift=99))
    with pytest.raises(IndexError, match="step 6 of an epoch of 6"):
        TensorBatches(data, 4)[6]
    assert augmentation(None) == augmentation("none") == Augment()


def test_image_arrays_refuse_what_does_not_fit():
    images = np.zeros((3, 8, 8), np.uint8)
    fine = {"mean": (0.0,), "std": (1.0,)}
    with pytest.raises(DataError, match="3 images but 2 labels"):
        ImageArrays(images, [0, 1], ["a", "b"], **fine)
    with pytest.raises(DataError, match=r"labels run 0\.\.2, but there are 2 classes"):
        ImageArrays(images, [0, 1, 2], ["a", "b"], **fine)
    with pytest.raises(DataError, match="no images"):
        ImageArrays(images[:0], [], ["a"], **fine)
    with pytest.raises(DataError, match="img_size=0"):
        ImageArrays(images, [0, 1, 0], ["a", "b"], img_size=0, **fine)
    for size in ("32", 4.5, (8, 8, 8)):
        with pytest.raises(DataError, match="must be one positive number"):
            ImageArrays(images, [0, 1, 0], ["a", "b"], img_size=size, **fine)
    with pytest.raises(DataError, match="in_chans=0"):
        ImageArrays(images, [0, 1, 0], ["a", "b"], in_chans=0, **fine)
    with pytest.raises(DataError, match=r"img_size=\(0, 8\)"):
        ImageArrays(images, [0, 1, 0], ["a", "b"], img_size=(0, 8), **fine)


def test_transform_gets_the_bytes_and_replaces_everything():
    data = make_set(transform=lambda image: (image.dtype, tuple(image.shape)), img_size=32)
    assert data[4] == ((torch.uint8, (1, 28, 28)), 4)


def test_subset_and_device():
    data = make_set()
    part = data.subset(torch.tensor([5, 1]))
    assert len(part) == 2
    assert torch.equal(part.images[0], data.images[5])
    assert part.num_classes == 5
    away = data.to("meta")
    assert away.images.device.type == away.mean.device.type == "meta"
    assert data.images.device.type == "cpu"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.05, 0.95), st.integers(0, 9))
def test_hold_out_takes_from_each_class_and_empties_none(labels, fraction, seed):
    labels = np.array(labels)
    held = hold_out(labels, fraction, seed)
    assert np.array_equal(held, hold_out(labels, fraction, seed))
    for label in np.unique(labels):
        members, chosen = (labels == label).sum(), held[labels == label].sum()
        assert chosen < members
        assert chosen >= 1 or members == 1
        assert abs(chosen - fraction * members) <= 1


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2])
def test_hold_out_refuses_other_fractions(fraction):
    with pytest.raises(DataError, match="val_fraction"):
        hold_out(np.zeros(4), fraction)
