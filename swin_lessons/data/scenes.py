"""Synthetic scenes: textured shapes among clutter, with class, boxes and masks known exactly.

The largest object names the class. Small objects of other kinds, lines, texture, noise and partial cover make
the task honest: colour and texture say nothing about the class. Objects are brighter than the background; with
either sign of contrast a small Swin stayed at chance for its first eight epochs. Scene `index` of a split is
the same on every machine, in any order and in any batch; `frame` moves its objects, for video.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swin_lessons.data.batches import random_stream
from swin_lessons.data.files import DataError
from swin_lessons.data.shapes import SHAPES, segment

CLASSES = list(SHAPES)
MEAN, STD = (0.354,) * 3, (0.168,) * 3  # of training pixels in 0..1
LENGTHS = {"train": 10_000, "val": 1_000, "test": 2_000}
SCENES, NOISE = 4, 5  # random streams (see batches.random_stream)
CHUNK = 32  # scenes drawn at once: the working set stays in the cache


@dataclass(frozen=True)
class SceneConfig:
    """How a scene looks. Lengths are parts of the image side unless a unit is given.

    Attributes:
        size: side of the image, px.
        distractors: most small objects beside the main one; each scene has 1 to this many.
        lines: clutter lines; every other one passes in front of the objects.
        radius: smallest and largest radius of the main object.
        distractor_radius: the same for small ones; below `radius`, so that the class is never in doubt.
        contrast: smallest and largest distance of an object's colour from the background's, which is
            darker, in 0..1.
        noise: standard deviation of the pixel noise, in 0..1.
        speed: largest step of an object, px a frame.
        spin: largest turn of an object, radians a frame.
    """

    size: int = 64
    distractors: int = 2
    lines: int = 4
    radius: tuple[float, float] = (0.2, 0.34)
    distractor_radius: tuple[float, float] = (0.06, 0.1)
    contrast: tuple[float, float] = (0.4, 0.7)
    noise: float = 0.04
    speed: float = 2.0
    spin: float = 0.1

    def __post_init__(self) -> None:
        if self.size < 16 or self.distractors < 1 or self.lines < 0:
            raise DataError(f"{self}: at least 16 px, 1 distractor and 0 lines")
        if not 0 < self.distractor_radius[1] < self.radius[0] <= self.radius[1] <= 0.5:
            raise DataError(
                f"distractor_radius {self.distractor_radius} must stay below radius {self.radius}"
            )


@dataclass(frozen=True)
class Scene:
    """One drawn scene. The main object comes first; objects that cannot be seen are left out.

    Attributes:
        image: uint8 (3, H, W).
        label: class of the main object, an index into `CLASSES`.
        labels: int64 (n,), class of each object.
        boxes: float32 (n, 4), around what is visible: left, top, right, bottom in px, the last two
            excluded.
        masks: bool (n, H, W), the visible pixels.
    """

    image: np.ndarray
    label: int
    labels: np.ndarray
    boxes: np.ndarray
    masks: np.ndarray


def render_scene(
    index: int, *, split: str = "train", seed: int = 0, frame: int = 0, config: SceneConfig | None = None
) -> Scene:
    """Draw scene `index` of a split with everything that is known about it.

    Args:
        index: which scene, from 0; there is no last one.
        split: "train", "val" or "test": three streams that share no scene.
        seed: another world of scenes.
        frame: time, in frames; objects move, background and lines stay, noise changes.
        config: how scenes look.
    """
    config = config or SceneConfig()
    images, owners, objects = _render([index], split, seed, frame, config)
    kinds, owner = objects.kind[0], owners[0]
    masks = owner[None] == np.arange(len(kinds))[:, None, None]
    seen = masks.any((1, 2))
    boxes = np.stack([_box(mask) for mask in masks[seen]])
    return Scene(images[0], int(kinds[0]), kinds[seen], boxes, masks[seen])


def render_images(
    indices: Sequence[int],
    *,
    split: str = "train",
    seed: int = 0,
    frame: int = 0,
    config: SceneConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw many scenes: images uint8 (N, 3, H, W) and labels int64 (N,); arguments as in `render_scene`."""
    config = config or SceneConfig()
    parts = [
        _render(indices[start : start + CHUNK], split, seed, frame, config)
        for start in range(0, len(indices), CHUNK)
    ]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[2].kind[:, 0] for part in parts])


def load_arrays(
    split: str, length: int | None = None, seed: int = 0, config: SceneConfig | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The first `length` scenes of a split (default: 10,000 to train, 1,000 to validate, 2,000 to test)."""
    length = LENGTHS[split] if length is None else length
    if length < 1:
        raise DataError(f"length={length} must be at least 1 scene")
    return render_images(range(length), split=split, seed=seed, config=config)


@dataclass
class Objects:
    """The objects of B scenes, K each; object 0 is the main one. Lengths in px, angles in radians."""

    kind: np.ndarray  # (B, K) int64
    centre: np.ndarray  # (B, K, 2): x, y
    radius: np.ndarray  # (B, K); 0 where there is no object
    angle: np.ndarray  # (B, K)
    colours: np.ndarray  # (B, K, 2, 3): of the stripes, red, green, blue in 0..1
    stripes: np.ndarray  # (B, K): radians a radius, how fine the stripes are
    order: np.ndarray  # (B, K): which object is painted first, second, ...


@dataclass
class Lines:
    """The clutter lines of B scenes, L each; lengths in px, angles in radians."""

    centre: np.ndarray  # (B, L, 2)
    half_length: np.ndarray  # (B, L)
    half_width: np.ndarray  # (B, L)
    angle: np.ndarray  # (B, L)
    colour: np.ndarray  # (B, L, 3)


class Draws:
    """Uniform random numbers of B scenes: every scene has its own row, and all are used column by column."""

    def __init__(self, indices: Sequence[int], split: str, seed: int, count: int) -> None:
        code = list(LENGTHS).index(split)
        rows = [random_stream(SCENES, seed, code, int(index)).random(count) for index in indices]
        self.rows, self.used = np.stack(rows), 0

    def take(self, *shape: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """The next numbers of each row, uniform in [low, high): (B, *shape)."""
        count = int(np.prod(shape))
        chosen = self.rows[:, self.used : self.used + count]
        self.used += count
        return low + (high - low) * chosen.reshape(len(chosen), *shape)


def _render(
    indices: Sequence[int], split: str, seed: int, frame: int, config: SceneConfig
) -> tuple[np.ndarray, np.ndarray, Objects]:
    """Images (B, 3, H, W) uint8, the object that owns each pixel (B, H, W), −1 for none, and the objects."""
    if split not in LENGTHS:
        raise DataError(f"split={split!r} is none of {', '.join(LENGTHS)}")
    draws = Draws(indices, split, seed, count=40 * (config.distractors + config.lines + 2))
    base = _muted(draws, low=0.15, high=0.45)[:, 0]
    canvas = _background(draws, base, config)
    lines = _draw_lines(draws, config)
    objects = _draw_objects(draws, base, frame, config)
    owners = np.full((len(base), config.size, config.size), -1)
    _paint_lines(canvas, owners, lines, range(0, config.lines, 2))
    _paint_objects(canvas, owners, objects)
    _paint_lines(canvas, owners, lines, range(1, config.lines, 2))
    canvas += config.noise * _noise(indices, split, seed, frame, config)
    return (canvas.clip(0, 1) * 255).round().astype(np.uint8), owners, objects


def _background(draws: Draws, base: np.ndarray, config: SceneConfig) -> np.ndarray:
    """A colour with three waves of texture, coarse to fine: float32 (B, 3, H, W)."""
    canvas = np.repeat(base.astype(np.float32)[:, :, None, None], config.size**2, axis=2)
    canvas = canvas.reshape(len(base), 3, config.size, config.size)
    for cycles in (1.5, 4.0, 10.0):
        strength = draws.take(3, low=-0.06, high=0.06)
        angle, phase = 2 * np.pi * draws.take(2).T
        u, _ = _local(np.zeros((len(base), 2)), angle, np.full(len(base), config.size), config.size)
        wave = np.sin(u * np.float32(2 * np.pi * cycles) + _column(phase))
        canvas += strength.astype(np.float32)[:, :, None, None] * wave[:, None]
    return canvas


def _muted(draws: Draws, count: int = 1, *, low: float, high: float) -> np.ndarray:
    """(B, count, 3): greys with a tint, as backgrounds and clutter are."""
    return draws.take(count, 1, low=low, high=high) + draws.take(count, 3, low=-0.1, high=0.1)


def _draw_lines(draws: Draws, config: SceneConfig) -> Lines:
    count, size = config.lines, config.size
    return Lines(
        centre=draws.take(count, 2, high=size),
        half_length=draws.take(count, low=0.1 * size, high=0.35 * size),
        half_width=draws.take(count, low=0.005 * size, high=0.015 * size),
        angle=draws.take(count, high=np.pi),
        colour=_muted(draws, count, low=0.1, high=0.6),
    )


def _draw_objects(draws: Draws, base: np.ndarray, frame: int, config: SceneConfig) -> Objects:
    count = config.distractors + 1
    radius = _radii(draws, config)
    speed = draws.take(count, 2, low=-config.speed, high=config.speed)
    spin = draws.take(count, low=-config.spin, high=config.spin)
    margin = 0.8 * radius[..., None]
    start = margin + draws.take(count, 2) * (config.size - 2 * margin)
    return Objects(
        kind=_kinds(draws, count),
        centre=_bounce(start + frame * speed, margin, config.size - margin),
        radius=radius,
        angle=2 * np.pi * draws.take(count) + frame * spin,
        colours=_colours(draws, base, count, config),
        stripes=draws.take(count, low=2, high=8),
        order=_painting_order(draws, count),
    )


def _radii(draws: Draws, config: SceneConfig) -> np.ndarray:
    """(B, K) px: one main object, then 1 to `distractors` small ones; the others get 0."""
    main = draws.take(1, low=config.radius[0], high=config.radius[1])
    small = draws.take(config.distractors, low=config.distractor_radius[0], high=config.distractor_radius[1])
    present = np.arange(config.distractors) <= draws.take(1) * config.distractors
    return np.concatenate([main, small * present], axis=1) * config.size


def _kinds(draws: Draws, count: int) -> np.ndarray:
    """(B, K): the class, then kinds that differ from it."""
    main = (draws.take(1) * len(CLASSES)).astype(np.int64)
    others = 1 + (draws.take(count - 1) * (len(CLASSES) - 1)).astype(np.int64)
    return np.concatenate([main, (main + others) % len(CLASSES)], axis=1)


def _colours(draws: Draws, base: np.ndarray, count: int, config: SceneConfig) -> np.ndarray:
    """(B, K, 2, 3): two colours an object, brighter than the background's and at the wanted distance from it."""
    direction = draws.take(count, 1, 3) + draws.take(count, 2, 3, high=0.5)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True) + 1e-6
    strength = draws.take(count, 1, 1, low=config.contrast[0], high=config.contrast[1])
    return (base[:, None, None] + direction * strength).clip(0, 1)


def _painting_order(draws: Draws, count: int) -> np.ndarray:
    """(B, K): small objects first, the main one last or last but one, so at most one object covers it."""
    covered = draws.take(1) < 0.5
    front = np.where(covered, [0, count - 1], [count - 1, 0])
    behind = np.tile(np.arange(1, count - 1), (len(front), 1))
    return np.concatenate([behind, front], axis=1)


def _bounce(position: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Reflect positions at both walls, as often as it takes."""
    span = high - low
    return high - np.abs((position - low) % (2 * span) - span)


def _paint_lines(canvas: np.ndarray, owners: np.ndarray, lines: Lines, which: Iterable[int]) -> None:
    for k in which:
        unit = lines.half_length[:, k]
        u, v = _local(lines.centre[:, k], lines.angle[:, k], unit, canvas.shape[-1])
        cover = _cover(segment(u, v) - _column(lines.half_width[:, k] / unit), unit)
        _blend(canvas, cover, lines.colour[:, k].astype(np.float32)[:, :, None, None])
        owners[cover > 0.5] = -1


def _paint_objects(canvas: np.ndarray, owners: np.ndarray, objects: Objects) -> None:
    scenes = np.arange(len(canvas))
    for chosen in objects.order.T:  # (B,): each scene's next object
        pick = scenes, chosen
        radius = objects.radius[pick]
        u, v = _local(objects.centre[pick], objects.angle[pick], np.maximum(radius, 1e-3), canvas.shape[-1])
        cover = _cover(_distance(objects.kind[pick], u, v), radius) * _column(radius > 0)
        stripe = 0.5 + 0.5 * np.sin(u * _column(objects.stripes[pick]))
        first, second = objects.colours[pick].astype(np.float32).transpose(1, 0, 2)[..., None, None]
        _blend(canvas, cover, first + (second - first) * stripe[:, None])
        np.copyto(owners, _column(chosen), where=cover > 0.5, casting="unsafe")


def _local(
    centre: np.ndarray, angle: np.ndarray, unit: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pixel centres seen from objects: shifted, turned, in their units; u, v float32 (B, H, W)."""
    pixels = np.arange(size, dtype=np.float32) + np.float32(0.5)
    x = (pixels - centre[:, :1]) / unit[:, None]
    y = (pixels - centre[:, 1:]) / unit[:, None]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    u = (x * cos).astype(np.float32)[:, None] + (y * sin).astype(np.float32)[:, :, None]
    v = (y * cos).astype(np.float32)[:, :, None] - (x * sin).astype(np.float32)[:, None]
    return u, v


def _distance(kind: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Signed distance (B, H, W) to each scene's own kind of shape."""
    distance = np.empty_like(u)
    for number, shape in enumerate(SHAPES.values()):
        rows = kind == number
        distance[rows] = shape(u[rows], v[rows])
    return distance


def _cover(distance: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Part of each pixel inside the outline, 0..1: a ramp one pixel wide."""
    return (0.5 - distance * _column(unit)).clip(0, 1)


def _blend(canvas: np.ndarray, cover: np.ndarray, colour: np.ndarray) -> None:
    canvas += cover[:, None] * (colour - canvas)


def _column(values: np.ndarray) -> np.ndarray:
    """(B,) to float32 (B, 1, 1), to meet images."""
    return values.astype(np.float32)[:, None, None]


def _noise(indices: Sequence[int], split: str, seed: int, frame: int, config: SceneConfig) -> np.ndarray:
    """Uniform noise with mean 0 and standard deviation 1: float32 (B, 3, H, W)."""
    code, shape = list(LENGTHS).index(split), (3, config.size, config.size)
    streams = (random_stream(NOISE, seed, code, int(index), frame) for index in indices)
    levels = np.stack([stream.integers(0, 256, shape, dtype=np.uint8) for stream in streams])
    return (levels.astype(np.float32) - 127.5) / 73.9  # of a uniform byte: its mean, its deviation


def _box(mask: np.ndarray) -> np.ndarray:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=np.float32)
