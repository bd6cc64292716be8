"""Accuracy of a model on a whole set."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swin_lessons.training.batches import eval_batches
from swin_lessons.training.metrics import EvalResult, confusion_matrix, topk_hits
from swin_lessons.training.precision import autocast


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Any, *, batch_size: int = 256, precision: str = "fp32") -> EvalResult:
    """Loss, top-1, top-5 and confusion matrix of `model` on a whole set, on the model's device.

    The model runs in eval mode and comes back in the mode it was in. `precision` is "fp32", "bf16" or "fp16".
    """
    device, training = next(model.parameters()).device, model.training
    model.eval()
    confusion = torch.zeros(dataset.num_classes, dataset.num_classes, dtype=torch.int64)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, top-1 hits, top-5 hits
    for images, labels in eval_batches(dataset, batch_size):
        with autocast(device, precision):
            logits = model(images.to(device))
        logits, labels = logits.float().cpu(), labels.cpu()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss.double(), *(topk_hits(logits, labels, k).sum() for k in (1, 5))])
        confusion += confusion_matrix(logits.argmax(1), labels, dataset.num_classes)
    model.train(training)
    mean_loss, top1, top5 = (sums / len(dataset)).tolist()
    return EvalResult(mean_loss, top1, top5, confusion)
