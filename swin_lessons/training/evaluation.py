"""Accuracy of a model on a whole set."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.training.batches import eval_batches
from swin_lessons.training.metrics import EvalResult, confusion_matrix, topk_hits
from swin_lessons.training.precision import autocast, float32_products
from swin_lessons.training.processes import Processes


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Any,
    *,
    batch_size: int = 256,
    precision: str = "fp32",
    processes: Processes | None = None,
) -> EvalResult:
    """Loss, top-1, top-5 and confusion matrix of `model` on a whole set, on the model's device.

    The model runs in eval mode and comes back in the mode it was in. `precision` is one of `TrainConfig.precision`'s
    words. Of several `processes` each takes its part of the set, every image counts once, and all get the result of
    the whole; each of them must call this.
    """
    processes = processes or Processes()
    device, training = next(model.parameters()).device, model.training
    model.eval()
    confusion = torch.zeros(dataset.num_classes, dataset.num_classes, dtype=torch.int64)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, top-1 hits, top-5 hits
    for images, labels in eval_batches(dataset, batch_size, processes.share):
        with autocast(device, precision), float32_products(precision):
            logits = _logits(model, images.to(device))
        logits, labels = logits.float().cpu(), labels.cpu()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss.double(), *(topk_hits(logits, labels, k).sum() for k in (1, 5))])
        confusion += confusion_matrix(logits.argmax(1), labels, dataset.num_classes)
    model.train(training)
    mean_loss, top1, top5 = (processes.sum(sums) / len(dataset)).tolist()
    return EvalResult(mean_loss, top1, top5, processes.sum(confusion))


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """`model(images)`. Without an image the model runs all the same: a sharded one waits for every process."""
    if len(images):
        return model(images)
    return model(images.new_zeros(1, *images.shape[1:]))[:0]
