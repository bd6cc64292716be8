"""A moving average of the weights: steadier than the weights, and in short runs often more accurate."""

from __future__ import annotations

import copy

import torch
from torch import nn


class EMA:
    """Exponential moving average of a model's parameters; buffers are copied.

    The decay grows as (1 + t) / (10 + t) up to `decay`, so that early averages forget the random start.
    `EMA.module` is a model of its own, for evaluation.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move the average towards `model` after optimiser step `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), 1 - decay)
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
