"""Seeded, stratified hold-outs: the same items on every machine, whatever the order of the files."""

import numpy as np

from swin_lessons.data.batches import random_stream
from swin_lessons.data.files import DataError

HOLD_OUT = 3  # its own random stream (see batches.random_stream)


def hold_out(labels: np.ndarray, fraction: float, seed: int = 0) -> np.ndarray:
    """Choose about `fraction` of every class.

    Each class gives round(fraction × n) items, at least one and never its last one; a class of one item gives
    none. So three images a class give one to validation and keep two.

    Args:
        labels: class of each item, (N,).
        fraction: part to hold out, 0 < fraction < 1.
        seed: chooses which.

    Returns:
        Boolean (N,), true for held-out items.
    """
    if not 0 < fraction < 1:
        raise DataError(f"val_fraction={fraction} must lie between 0 and 1, both excluded")
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[random_stream(HOLD_OUT, seed, int(label)).permutation(members)[:count]] = True
    return held
