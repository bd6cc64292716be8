"""A tiny set and a tiny model with drop path, for tests of the loop."""

import numpy as np
import torch
from torch import nn

from swin_lessons.data import ImageArrays
from swin_lessons.training import TrainConfig


def small_set(length: int = 40, classes: int = 4, seed: int = 0, img_size: int = 8) -> ImageArrays:
    """Noise with a bright quadrant that tells the class: learnable within a few steps."""
    rng = np.random.default_rng(seed)
    labels = np.arange(length) % classes
    images = rng.integers(0, 80, (length, 1, 8, 8))
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
    names = [f"quadrant {i}" for i in range(classes)]
    return ImageArrays(images.astype(np.uint8), labels, names, mean=(0.3,), std=(0.25,), img_size=img_size)


class SmallNet(nn.Module):
    """A patch embedding, a residual block with drop path, a head on all four tokens."""

    def __init__(self, drop_path: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(64, 4)
        self.drop_path = drop_path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)  # (B, 4, 16)
        branch = self.mlp(self.norm(x))
        if self.training:
            keep = torch.rand(len(x), 1, 1, device=x.device) >= self.drop_path
            branch = branch * keep / (1 - self.drop_path)
        return self.head((x + branch).flatten(1))


def small_model(seed: int = 0, drop_path: float = 0.2) -> SmallNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallNet(drop_path)


def small_config(**changes) -> TrainConfig:
    """Everything on that a resumed run has to repeat: mixing, drop path, averaging, accumulation."""
    values = {
        "steps": 12, "batch_size": 10, "micro_batch": 4, "lr": 1e-2, "ema": 0.9, "label_smoothing": 0.1,
        "augment": "shift=1,flip=0.5,erase=0.5,mixup=0.3,cutmix=0.3", "save_every": 3, "eval_every": 4,
        "log_every": 2, "seed": 7,
    }  # fmt: skip
    return TrainConfig(**(values | changes))
