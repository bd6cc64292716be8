"""Quantisation-aware training: go on training with the rounding in place, taught by the float model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from swin_lessons.training import (
    TrainConfig,
    TrainingDiverged,
    autocast,
    build_optimizer,
    derive_seed,
    evaluate,
    float32_products,
    grad_scaler,
    isolated_rng,
    lr_at,
    seed_everything,
    set_lr,
)
from swin_lessons.training.batches import batch_stream, steps_per_epoch

from .config import QuantConfig
from .fake import FakeQuantize, quantizers, switch
from .observers import MovingAverageObserver, Observer
from .points import prepare
from .ptq import calibrate, convert, plan_of

Row = dict[str, float]
STEP = 2  # the random stream of a training step, as in training.loop


def prepare_qat(
    model: nn.Module, config: QuantConfig | None = None, *, batches: Iterable[Any] | None = None
) -> nn.Module:
    """A trainable, fake-quantised copy of a float model, in training mode.

    With `batches`, the ranges of activations come from them, as in `ptq`, and stay (or are learned, with
    `config.learnable_scale`). Without, each range is a moving average over what training shows, until
    `switch(model, observe="never")` freezes it. Weights' ranges follow the weights until then, where their observer is
    "minmax"; otherwise they stay as they are found here.

    Any training loop can train the copy; `train_qat` has a teacher. Then `convert` it.

    Raises:
        ValueError: scales that are to be learned and no batches to start them from; recomputed (checkpointed) blocks,
            which would observe twice. See also `ptq`.
    """
    config = QuantConfig() if config is None else config
    if config.learnable_scale and batches is None:
        raise ValueError("learnable scales need a start: give prepare_qat some batches")
    if any(_recomputes(m) for m in model.modules()):
        raise ValueError(
            "blocks that are recomputed would be observed twice: build the model without checkpointing"
        )
    quantised = prepare(model, config).train()
    if batches is not None:
        calibrate(quantised, batches)
    for quantizer in quantizers(quantised):
        if not isinstance(quantizer, FakeQuantize):
            continue
        if config.learnable_scale and quantizer.role != "probabilities":
            quantizer.learn_scale()
        elif quantizer.role == "weight" and config.weight_observer == "minmax":
            _follow_weight(quantised, quantizer)
        elif batches is None and quantizer.observer is not None:
            place = quantizer.scale.device
            average = MovingAverageObserver(momentum=config.momentum, name=quantizer.name)
            quantizer.observer, quantizer.observes = average.to(place), "training"
    return quantised


def _recomputes(module: nn.Module) -> bool:
    """Ours, timm's and transformers' words for it."""
    names = ("checkpointing", "grad_checkpointing", "gradient_checkpointing")
    holders = (module, getattr(module, "config", None))
    return any(getattr(holder, name, False) is True for holder in holders for name in names)


def _follow_weight(model: nn.Module, quantizer: FakeQuantize) -> None:
    observer = Observer(quantizer.scale.numel(), name=quantizer.name).to(quantizer.scale.device)
    quantizer.observer, quantizer.observes = observer, "training"


def qat_loss(
    student: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 3.0,
    hard: float = 1.0,
    soft: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`hard · CE(student, labels) + soft · T² · KL(teacher ‖ student)` at temperature T: a mean over the batch, 0-d.

    The factor T² keeps the gradient of the soft part as large as that of the hard one (arXiv:1503.02531). The
    divergence is summed over classes and averaged over images ("batchmean"); FasterTransformer's averages over classes,
    too, and makes up for it by a factor that is right for 1,000 classes alone.

    Args:
        student, teacher: logits `(B, num_classes)`; None leaves the soft part out.
        labels: classes `(B,)` or probabilities `(B, num_classes)`.

    Raises:
        ValueError: logits of different shapes, or a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: use a number above 0, such as 3")
    loss = hard * F.cross_entropy(student.float(), labels, label_smoothing=label_smoothing)
    if teacher is None:
        return loss
    if teacher.shape != student.shape:
        raise ValueError(
            f"the teacher gives {tuple(teacher.shape)}, the student {tuple(student.shape)}: need one set of classes"
        )
    ours, theirs = (F.log_softmax(logits.float() / temperature, 1) for logits in (student, teacher.detach()))
    return loss + soft * temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def train_qat(
    model: nn.Module,
    train_set: Any,
    config: TrainConfig,
    *,
    teacher: nn.Module | None = None,
    val_set: Any | None = None,
    freeze_after: int | None = None,
    temperature: float = 3.0,
    hard: float = 1.0,
    soft: float = 1.0,
    progress: bool | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Train a model of `prepare_qat` in place, on its device; it ends in evaluation mode with its observers frozen.

    Schedule, optimiser, batches, augmentation and precision are those of `training.train` with this `config`. Its
    fields `ema`, `init`, `save_every`, `keep` and `log_every` are not used: fine-tuning is short, and writes nothing.

    Args:
        model: the student.
        train_set, val_set: data sets as `swin_lessons.data.load_dataset` gives them.
        config: the run; FasterTransformer fine-tunes Swin for 3 to 5 epochs at a rate of 1e-5.
        teacher: the float model; it runs in evaluation mode and comes back in its own. None: labels alone.
        freeze_after: observers stop after so many steps; None: after half of them.
        temperature, hard, soft: as in `qat_loss`.
        progress: show a bar; None shows it on a terminal only.
        on_row: called with each row.

    Returns:
        A row each `config.eval_every` steps (None: an epoch) and at the end. It has step; loss, the mean since the row
        before; lr; gap, see `conversion_gap`; and with `val_set` top1.

    Raises:
        TrainingDiverged: the loss is no longer a finite number.
        ValueError: the model is not prepared, or the numbers do not fit the set.
    """
    plan_of(model)
    loss = partial(
        qat_loss, temperature=temperature, hard=hard, soft=soft, label_smoothing=config.label_smoothing
    )
    per_epoch = steps_per_epoch(train_set, config)
    total = config.total_steps(per_epoch)
    freeze = max(1, total // 2) if freeze_after is None else freeze_after
    run = _Run(model, teacher, loss, config)
    losses: list[Tensor] = []
    rows: list[Row] = []
    disable = None if progress is None else not progress
    with isolated_rng(), float32_products(config.precision), _evaluating(teacher):
        stream = batch_stream(train_set, config, 0)
        for step in tqdm(range(total), unit="step", disable=disable):
            images, labels = (t.to(run.device) for t in next(stream)[1])
            if step == freeze:
                switch(model, observe="never")
            lr = lr_at(step, total, config)
            losses.append(run.step(step, lr, images, labels))
            if step + 1 < total and (step + 1) % (config.eval_every or per_epoch):
                continue
            row = {"step": step + 1, "loss": torch.stack(losses).mean().item(), "lr": lr}
            losses.clear()
            if not math.isfinite(row["loss"]):
                raise TrainingDiverged(f"the loss is {row['loss']} at step {step + 1}: use a smaller lr")
            row["gap"] = conversion_gap(model, images)
            if val_set is not None:
                row["top1"] = evaluate(model, val_set, precision=config.precision).top1
            rows.append(row)
            if on_row:
                on_row(row)
    switch(model, observe="never")
    model.eval()
    return rows


class _Run:
    """What the steps of one training share."""

    def __init__(
        self, model: nn.Module, teacher: nn.Module | None, loss: Callable[..., Tensor], config: TrainConfig
    ) -> None:
        self.model, self.teacher, self.loss, self.config = model.train(), teacher, loss, config
        self.device = next(model.parameters()).device
        self.optimizer = build_optimizer(model, config)
        self.scaler = grad_scaler(self.device, config.precision)

    def step(self, step: int, lr: float, images: Tensor, labels: Tensor) -> Tensor:
        """One optimiser step in micro-batches, as `training.train_step` takes it; returns the mean loss, 0-d."""
        config = self.config
        seed_everything(derive_seed(config.seed, STEP, step))  # drop path
        set_lr(self.optimizer, lr)
        total = images.new_zeros(())
        size = config.micro_batch or len(images)
        for part, target in zip(images.split(size), labels.split(size), strict=True):
            with autocast(images.device, config.precision):
                logits, taught = self.model(part), self._taught(part)
            loss = self.loss(logits, taught, target) * (len(part) / len(images))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def _taught(self, images: Tensor) -> Tensor | None:
        return None if self.teacher is None else self.teacher(images)


@contextmanager
def _evaluating(model: nn.Module | None) -> Iterator[None]:
    """A model in evaluation mode, and then in its own again."""
    training = model is not None and model.training
    if model is not None:
        model.eval()
    try:
        yield
    finally:
        if model is not None:
            model.train(training)


@torch.no_grad()
def conversion_gap(model: nn.Module, images: Tensor) -> float:
    """Largest difference between the logits of a fake-quantised model and of its conversion, on images `(B, C, H, W)`.

    Anything but 0 means that training optimises another model than the one that will run.
    """
    fake = copy.deepcopy(model).eval()
    return (fake(images) - convert(model)(images)).abs().max().item()
