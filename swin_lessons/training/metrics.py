"""What a classifier got right: top-k accuracy, confusion matrix, accuracy per class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def topk_hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether each label is among its row's k largest logits: (B, K), (B,) -> (B,) bool. k is cut to K."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels[:, None]).any(dim=1)


def confusion_matrix(predictions: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Counts (num_classes, num_classes), int64: row the true class, column the predicted one."""
    cells = labels * num_classes + predictions
    return torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)


@dataclass(frozen=True)
class EvalResult:
    """Results over a whole set. Accuracies are fractions of 1; `loss` is the mean cross-entropy in nats."""

    loss: float
    top1: float
    top5: float
    confusion: Tensor

    @property
    def count(self) -> int:
        """Images evaluated."""
        return int(self.confusion.sum())

    @property
    def per_class(self) -> Tensor:
        """Accuracy per true class, (num_classes,), float64; nan for a class without an image."""
        return self.confusion.diagonal().double() / self.confusion.sum(dim=1).double()
