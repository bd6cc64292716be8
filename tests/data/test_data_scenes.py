"""Synthetic scenes: what is drawn is what is said, and a scene depends on its index alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.data import DataError, load_dataset, scenes
from swin_lessons.data.scenes import CLASSES, SceneConfig, render_images, render_scene
from swin_lessons.data.shapes import SHAPES


def crescent_area() -> float:
    """Unit disc minus its overlap with a disc of radius 0.8 at distance 0.5: the lens formula."""
    r, d = 0.8, 0.5
    first = r * r * math.acos((d * d + r * r - 1) / (2 * d * r))
    second = math.acos((d * d + 1 - r * r) / (2 * d))
    triangle = 0.5 * math.sqrt((-d + r + 1) * (d + r - 1) * (d - r + 1) * (d + r + 1))
    return math.pi - (first + second - triangle)


AREAS = {
    "disc": math.pi * 0.95**2,
    "ring": math.pi * (0.98**2 - 0.5**2),
    "square": 1.6**2,
    "triangle": 3 * math.sqrt(3) * 0.58**2,
    "hexagon": 2 * math.sqrt(3) * 0.86**2,
    "star": 5 * 1.1 * 0.5 * math.sin(math.pi / 5),
    "cross": 2 * 1.9 * 0.64 - 0.64**2,
    "crescent": crescent_area(),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_shape_has_the_area_of_its_formula(name):
    side = 1200
    at = (np.arange(side) + 0.5) / side * 2.6 - 1.3
    inside = SHAPES[name](*np.meshgrid(at, at)) < 0
    assert inside.mean() * 2.6**2 == pytest.approx(AREAS[name], rel=2e-3)


@pytest.mark.parametrize("name", list(SHAPES))
def test_shape_distance_has_unit_slope_at_the_edge(name):
    """The outline is smoothed by it: a slope of 1 gives a soft edge one pixel wide."""
    at, step = (np.arange(400) + 0.5) / 400 * 2.6 - 1.3, 1e-4
    u, v = np.meshgrid(at, at)
    shape = SHAPES[name]
    near = np.abs(shape(u, v)) < 0.03
    du = (shape(u + step, v) - shape(u - step, v)) / (2 * step)
    dv = (shape(u, v + step) - shape(u, v - step)) / (2 * step)
    slope = np.hypot(du, dv)[near]
    assert np.median(slope) == pytest.approx(1, abs=1e-3)
    assert (np.abs(slope - 1) < 0.02).mean() > 0.97  # corners have none


def same_scene(a, b) -> bool:
    fields = ("image", "labels", "boxes", "masks")
    return a.label == b.label and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in fields)


@given(st.integers(0, 10**6), st.integers(0, 5), st.sampled_from(["train", "val", "test"]))
@settings(max_examples=25, deadline=None)
def test_scene_tells_the_truth(index, seed, split):
    scene = render_scene(index, seed=seed, split=split)
    n = len(scene.labels)
    assert scene.image.shape == (3, 64, 64)
    assert scene.image.dtype == np.uint8
    assert 1 <= n <= 4
    assert scene.boxes.shape == (n, 4)
    assert scene.masks.shape == (n, 64, 64)
    assert scene.label == scene.labels[0]
    assert (scene.labels[1:] != scene.label).all()
    assert scene.masks.sum(0).max() == 1  # a pixel belongs to one object at most
    for mask, (left, top, right, bottom) in zip(scene.masks, scene.boxes.astype(int), strict=True):
        assert mask[top:bottom, left:right].sum() == mask.sum() > 0
        edges = mask[top, :], mask[bottom - 1, :], mask[:, left], mask[:, right - 1]
        assert all(edge.any() for edge in edges)
    sizes = scene.boxes[:, 2:] - scene.boxes[:, :2]
    assert sizes.max(1)[0] == sizes.max(1).max()  # the class is the largest object's


def test_scene_is_the_same_alone_and_in_any_batch():
    images, labels = render_images(range(40, 120))
    backwards, _ = render_images(range(119, 39, -1))
    assert np.array_equal(images, backwards[::-1])
    for index in (40, 71, 72, 119):
        scene = render_scene(index)
        assert np.array_equal(scene.image, images[index - 40])
        assert scene.label == labels[index - 40]


def test_splits_seeds_and_indices_share_no_scene():
    images = [
        render_images(range(6), split=split, seed=seed)[0]
        for split in ("train", "val", "test")
        for seed in (0, 1)
    ]
    flat = np.concatenate(images).reshape(36, -1)
    assert len(np.unique(flat, axis=0)) == 36


def test_mask_marks_the_object_and_leaves_out_what_hides_it():
    """Redraw without noise, lines and texture differences: pixels off all masks show the background alone."""
    quiet = SceneConfig(noise=0.0, lines=0, contrast=(0.6, 0.6))
    for index in range(12):
        scene = render_scene(index, config=quiet)
        image, union = scene.image.astype(float), scene.masks.any(0)
        ring = grow(union, 2) & ~grow(union, 1)
        for mask in scene.masks:
            if mask.sum() < 60:
                continue
            inner = ~grow(~mask, 2)
            outer = grow(mask, 3) & ring
            if inner.sum() < 10 or outer.sum() < 10:
                continue
            gap = np.abs(np.median(image[:, inner], 1) - np.median(image[:, outer], 1)).max()
            assert gap > 25  # of 255: the object's colour differs from what surrounds it


def grow(mask: np.ndarray, by: int) -> np.ndarray:
    out = mask.copy()
    for dy in range(-by, by + 1):
        for dx in range(-by, by + 1):
            out |= np.roll(mask, (dy, dx), (0, 1))
    return out


def test_frames_move_objects_and_keep_the_background():
    still = SceneConfig(noise=0.0, distractors=1, lines=0)
    first, second = (render_scene(3, frame=frame, config=still) for frame in (0, 1))
    assert first.label == second.label
    centre = [scene.boxes[0].reshape(2, 2).mean(0) for scene in (first, second)]
    assert 0 < np.abs(centre[1] - centre[0]).max() <= still.speed + 1.5  # a turn moves the box too
    away = ~(first.masks.any(0) | second.masks.any(0))
    away = ~grow(~away, 3)  # soft edges, long at the tips
    assert np.array_equal(first.image[:, away], second.image[:, away])
    assert not np.array_equal(first.image, second.image)


def test_objects_stay_inside_for_a_long_time():
    for frame in (10, 100, 1000):
        scene = render_scene(5, frame=frame)
        assert scene.label == render_scene(5).label
        assert scene.masks[0].sum() > 30


def test_noise_is_fresh_each_frame_and_has_the_asked_size():
    calm = SceneConfig(noise=0.0, speed=0.0, spin=0.0)
    noisy = SceneConfig(noise=0.05, speed=0.0, spin=0.0)
    clean = render_scene(1, config=calm).image.astype(float)
    noise = [(render_scene(1, frame=frame, config=noisy).image - clean) / 255 for frame in (0, 1)]
    middle = (clean > 60) & (clean < 195)  # not clipped
    assert noise[0][middle].std() == pytest.approx(0.05, rel=0.05)
    assert abs(np.corrcoef(noise[0][middle], noise[1][middle])[0, 1]) < 0.05


def test_objects_are_brighter_than_the_background():
    for index in range(20):
        scene = render_scene(index, config=SceneConfig(noise=0.0, lines=0))
        image = scene.image.astype(float).mean(0)
        background = ~grow(scene.masks.any(0), 3)
        for mask in scene.masks:
            assert image[mask].mean() > image[background].mean() + 20


def test_dataset():
    train = load_dataset("scenes", length=300)
    assert train.images.shape == (300, 3, 64, 64)
    assert train.classes == CLASSES
    assert train.labels.bincount(minlength=8).min() > 15
    pixels = train.images.double() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)).float(), train.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)).float(), train.std, atol=0.02, rtol=0)
    longer = load_dataset("scenes", length=310)
    assert torch.equal(longer.images[:300], train.images)  # a stream: more is the same and then some
    assert scenes.LENGTHS == {"train": 10_000, "val": 1_000, "test": 2_000}


def test_class_is_not_in_the_colours():
    """Nearest class mean of the mean colours and deviations guesses: the shape has to be seen."""
    images, labels = render_images(range(1200))
    features = np.concatenate([images.mean((2, 3)), images.std((2, 3))], 1)
    means = np.stack([features[:800][labels[:800] == k].mean(0) for k in range(8)])
    guess = ((features[800:, None] - means) ** 2).sum(-1).argmin(1)
    assert (guess == labels[800:]).mean() < 0.25  # chance is 0.125


@pytest.mark.parametrize(
    "settings",
    [{"size": 8}, {"distractors": 0}, {"radius": (0.05, 0.3)}, {"radius": (0.2, 0.7)}, {"lines": -1}],
)
def test_config_refuses_nonsense(settings):
    with pytest.raises(DataError):
        SceneConfig(**settings)


def test_other_nonsense():
    with pytest.raises(DataError, match="length=0"):
        load_dataset("scenes", length=0)
    with pytest.raises(DataError, match="'all' is none of"):
        render_scene(0, split="all")
    with pytest.raises(DataError, match="negative"):
        render_scene(-1)


def test_other_sizes():
    scene = render_scene(0, config=SceneConfig(size=96, distractors=6, lines=12))
    assert scene.image.shape == (3, 96, 96)
