import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def photos(tmp_path):
    """Three images in each of two class folders, of different sizes."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 120, (40 + 9 * number, 50, 3)) + 120 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"
