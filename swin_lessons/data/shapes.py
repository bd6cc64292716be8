"""Eight shapes as signed distances: negative inside, positive outside, zero on the edge.

Each function takes coordinates u, v in units of the shape's radius and returns a distance in the same unit,
exact or nearly so at the edge, where it is used to smooth the outline. None of the shapes turns into another
one when it is rotated or mirrored, so these augmentations keep the label.
"""

from collections.abc import Callable

import numpy as np

Coordinates = np.ndarray  # any shape, u and v alike
COS30, COS60 = 0.5 * 3**0.5, 0.5


def disc(u: Coordinates, v: Coordinates) -> Coordinates:
    return _length(u, v) - 0.95


def ring(u: Coordinates, v: Coordinates) -> Coordinates:
    return np.abs(_length(u, v) - 0.74) - 0.24


def square(u: Coordinates, v: Coordinates) -> Coordinates:
    return np.maximum(np.abs(u), np.abs(v)) - 0.8


def triangle(u: Coordinates, v: Coordinates) -> Coordinates:
    return np.maximum(-u, u * COS60 + np.abs(v) * COS30) - 0.58


def hexagon(u: Coordinates, v: Coordinates) -> Coordinates:
    across = np.abs(v)
    return np.maximum(across, np.abs(u) * COS30 + across * COS60) - 0.86


def star(u: Coordinates, v: Coordinates) -> Coordinates:
    # Fold the plane onto a tenth of the star: the edge from the tip (1.1, 0) to the notch at angle π/5.
    angle, sector = np.arctan2(v, u), 2 * np.pi / 5
    fold, radius = np.abs(angle - sector * np.round(angle / sector)), _length(u, v)
    x, y = radius * np.cos(fold), radius * np.sin(fold)
    edge = np.array([0.5 * np.cos(np.pi / 5) - 1.1, 0.5 * np.sin(np.pi / 5)])
    along = edge / np.sqrt(edge @ edge)
    return along[1] * (x - 1.1) - along[0] * y


def cross(u: Coordinates, v: Coordinates) -> Coordinates:
    a, b = np.abs(u), np.abs(v)
    return np.maximum(np.maximum(a, b) - 0.95, np.minimum(a, b) - 0.32)


def crescent(u: Coordinates, v: Coordinates) -> Coordinates:
    return np.maximum(_length(u, v) - 1.0, 0.8 - _length(u - 0.5, v))


def segment(u: Coordinates, v: Coordinates) -> Coordinates:
    """A line from (−1, 0) to (1, 0), of no thickness; used for clutter, not a class."""
    return _length(np.maximum(np.abs(u) - 1, 0), v)


def _length(u: Coordinates, v: Coordinates) -> Coordinates:
    return np.sqrt(u * u + v * v)  # several times faster than np.hypot, which guards against overflow


SHAPES: dict[str, Callable[[Coordinates, Coordinates], Coordinates]] = {
    "disc": disc,
    "ring": ring,
    "square": square,
    "triangle": triangle,
    "hexagon": hexagon,
    "star": star,
    "cross": cross,
    "crescent": crescent,
}
