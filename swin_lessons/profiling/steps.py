"""What is timed: one inference or one training step of a contestant, on the same images and weights for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DTYPES", "Contestant", "check_equal", "images_and_labels"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}  # relative; V2 at random weights has steep softmaxes


@dataclass
class Contestant:
    """A model in a discipline: `mode` is "infer" or "train"; `micro_batch` images at a time, 0 for all at once."""

    name: str
    library: str
    model: nn.Module
    mode: str = "infer"
    dtype: str = "fp32"
    micro_batch: int = 0
    optimizer: torch.optim.Optimizer | None = field(default=None)

    def step(self, x: Tensor, y: Tensor) -> Callable[[], Any]:
        """The function to time. Training is forward, backward and an AdamW step.

        The learning rate is 0: the arithmetic is the same, and the weights stay comparable.
        """
        self.model.train(self.mode == "train")
        if self.mode == "infer":
            return lambda: self.logits(x)
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        return lambda: self._train(x, y)

    def logits(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes) without gradients."""
        with torch.inference_mode():
            return torch.cat([self._forward(part) for part in self._split(x)])

    def gradients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Gradient of the mean cross-entropy, by the library's own parameter names."""
        self.model.train()
        self._backward(x, y)
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return grads

    def _train(self, x: Tensor, y: Tensor) -> None:
        assert self.optimizer is not None
        self._backward(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, x: Tensor, y: Tensor) -> None:
        for images, labels in zip(self._split(x), self._split(y), strict=True):
            loss = F.cross_entropy(self._forward(images), labels)
            (loss * (len(images) / len(x))).backward()

    def _forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == "bf16"):
            output = self.model(x)
        return getattr(output, "logits", output).float()

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.micro_batch or len(x))


def images_and_labels(
    batch: int, chans: int, size: int, classes: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Noise of unit variance, (B, C, H, W), and labels (B,): the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, chans, size, size, generator=generator)
    return x, torch.randint(classes, (batch,), generator=generator)


def check_equal(name: str, values: dict[str, Tensor], expected: dict[str, Tensor], dtype: str) -> float:
    """Relative difference |values - expected| / |expected| over all tensors together.

    Raises:
        ArithmeticError: the difference is above the tolerance of `dtype`, or names differ: timing would compare
            two different computations.
    """
    missing = expected.keys() - values.keys()
    if missing:
        raise ArithmeticError(f"{name} has no {', '.join(sorted(missing)[:3])}: it computes something else")
    norm = sum(float(e.double().square().sum()) for e in expected.values()) ** 0.5
    error = sum(float((values[n].double() - e.double()).square().sum()) for n, e in expected.items()) ** 0.5
    difference = error / norm
    if not difference <= TOLERANCE[dtype]:
        raise ArithmeticError(
            f"{name} differs from the baseline by {difference:.2g} (allowed {TOLERANCE[dtype]}): nothing to time"
        )
    return difference
