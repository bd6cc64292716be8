"""scikit-learn's digits: 1,797 grey images of handwritten digits, 8 × 8 px. No download.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

import numpy as np

from swin_lessons.data.files import DataError
from swin_lessons.data.splits import hold_out

CLASSES = [str(digit) for digit in range(10)]
MEAN, STD = (0.3055,), (0.3760,)  # of the training part, pixels in 0..1
TEST_FRACTION = 0.2  # the set comes without a split; this one is seeded and stratified


def load_arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 8, 8) uint8, scaled from 0..16 to 0..255, and labels (N,) of split "train" or "test"."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise  # it is there, but broken
        raise DataError(
            'the digits come with scikit-learn: pip install scikit-learn, or "swin-lessons[peers]"'
        ) from error
    digits = load_digits()
    chosen = hold_out(digits.target, TEST_FRACTION) == (split == "test")
    images = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)
    return images, digits.target[chosen]
