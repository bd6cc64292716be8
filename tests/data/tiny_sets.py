"""Writers of the real on-disk formats, from their descriptions; nothing here uses the package."""

import struct

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """MNIST's format, written from its description."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
