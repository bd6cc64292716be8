"""The training loop: one page from a batch to a run that survives being killed."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from swin_lessons.training.batches import batch_stream, steps_per_epoch, train_batches
from swin_lessons.training.checkpoint import (
    FOLDER,
    CheckpointError,
    TrainState,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    whole,
    write_tensors,
)
from swin_lessons.training.config import TrainConfig
from swin_lessons.training.ema import EMA
from swin_lessons.training.evaluation import evaluate
from swin_lessons.training.files import make_folder, refuse_file, remove_parts, write_text
from swin_lessons.training.history import EVAL_COLUMNS, NEW_FOLDER, STEP_COLUMNS, CsvLog, History, Row
from swin_lessons.training.init import init_xavier
from swin_lessons.training.optim import build_optimizer, set_lr
from swin_lessons.training.parallel import choose_parallel
from swin_lessons.training.precision import autocast, float32_products, grad_scaler
from swin_lessons.training.processes import Processes
from swin_lessons.training.schedule import check_warmup, lr_at
from swin_lessons.training.seeds import derive_seed, isolated_rng, seed_everything

INIT, STEP = 1, 2  # keep the random streams of the weights and of the steps apart


class TrainingDiverged(ArithmeticError):
    """The loss is no longer a finite number."""


def train(
    model: nn.Module,
    train_set: Any,
    val_set: Any | None,
    config: TrainConfig,
    out_dir: str | os.PathLike[str],
    *,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    on_eval: Callable[[Row], None] | None = None,
    parallel: str | None = None,
) -> History:
    """Train `model` in place, on the device it is on, and keep everything in `out_dir`.

    A run that was killed at any moment goes on with `resume=True`: same losses and same weights, bit for bit,
    on the same machine with the same number of threads. The caller's random generators stay as they were.

    Where PyTorch's process group has several processes, each of them calls this with the same arguments. They share
    every batch, and the numbers are those of one process to rounding, dropout apart. The first one writes and
    reports. A run may be resumed on another number of processes.

    Args:
        model: from images (B, C, H, W) to logits (B, num_classes). At the end it holds the final weights: the
            moving average where `config.ema` is on.
        train_set, val_set: data sets as `swin_lessons.data.load_dataset` gives them; without `val_set`
            nothing is evaluated.
        config: all choices of the run.
        out_dir: config.json, metrics.csv (a row a step), evals.csv, checkpoints/, best.safetensors (highest
            validation top-1) and last.safetensors.
        resume: go on from the newest checkpoint; a run that was stopped before its first one starts again, with a
            warning.
        about: what config.json and the weights' metadata should also say: model name, classes and so on.
        progress: show a bar; None shows it on a terminal only.
        on_eval: called after each evaluation with its row: step, epoch, loss, top1, top5, seconds.
        parallel: how several processes work together: "ddp" (each has the whole model; the default) or "fsdp" (each
            has a part of every weight, and so has the model at the end).

    Returns:
        History: the curves, of a resumed run as a whole.

    Raises:
        ValueError: the configuration does not fit the data; a log is damaged. Nothing is written then.
        FileExistsError: `out_dir` holds a run and `resume` is not set.
        CheckpointError: a checkpoint is damaged, gone or of another run; the disk is full.
        TrainingDiverged: the loss became infinite or nan.
    """
    folder = Path(out_dir)
    with isolated_rng(), float32_products(config.precision):
        run = Run(model, train_set, val_set, config, folder, dict(about or {}), on_eval, parallel)
        run.open(resume)
        run.go(progress)
    return History.read(folder)


class Run:
    """One run in one folder: its state, its logs, and when it evaluates and saves.

    Of several processes, each has a `Run`, and the first one's writes.
    """

    def __init__(
        self,
        model: nn.Module,
        train_set: Any,
        val_set: Any | None,
        config: TrainConfig,
        folder: Path,
        about: dict[str, Any],
        on_eval: Callable[[Row], None] | None = None,
        parallel: str | None = None,
    ) -> None:
        self.processes = Processes.current()
        self.parallel = choose_parallel(parallel, self.processes)
        self.train_set, self.val_set, self.config, self.folder = train_set, val_set, config, folder
        self.about, self.on_eval = {**about, "train": config.to_dict()}, on_eval
        self.device = next(model.parameters()).device
        self.per_epoch = steps_per_epoch(train_set, config)
        self.total = config.total_steps(self.per_epoch)
        check_warmup(config, self.total)
        train_batches(
            train_set, config, epoch=0, share=self.processes.share
        )  # raises where they do not fit the set
        self.data = {"images": len(train_set), "num_classes": train_set.num_classes}
        self.state = TrainState(
            model, build_optimizer(model, config), grad_scaler(self.device, config.precision)
        )
        first = self.processes.first
        self.steps = CsvLog(folder / "metrics.csv", STEP_COLUMNS, first)
        self.evals = CsvLog(folder / "evals.csv", EVAL_COLUMNS, first)
        self.pending: list[
            tuple[Row, Tensor, Tensor]
        ] = []  # steps whose loss is not read from the device yet

    def open(self, resume: bool) -> None:
        """Make or reopen the folder and bring the state and the logs to the same step."""
        checkpoints = self.folder / FOLDER
        refuse_file(self.folder)
        found = list_checkpoints(checkpoints)
        if not resume:
            self._refuse_old_run(found)
        elif not found:
            self._refuse_lost_checkpoints()
        self._restore(found)
        self._refuse_lost_rows()
        self.processes.wait()  # nothing is written before every process has looked
        if self.processes.first:
            self._begin_files(checkpoints)
        self.started = time.perf_counter() - self.steps.last("seconds")

    def _begin_files(self, checkpoints: Path) -> None:
        make_folder(checkpoints)
        remove_parts(self.folder)
        remove_parts(checkpoints)
        write_text(self.folder / "config.json", json.dumps(self.about, indent=2) + "\n")
        self.steps.truncate(self.state.step)
        self.evals.truncate(self.state.step)

    def _refuse_old_run(self, found: list[Path]) -> None:
        if (self.folder / "config.json").exists():
            raise FileExistsError(
                f"{self.folder} holds a run already: go on with it by resume=True (--resume), or choose another "
                "folder"
            )
        if found:
            raise FileExistsError(
                f"{self.folder / FOLDER} holds checkpoints of another run: choose another folder, or delete them"
            )

    def _refuse_lost_checkpoints(self) -> None:
        """A run that wrote checkpoints is not begun anew because they are gone; one that wrote none yet is."""
        config, log = self.folder / "config.json", self.steps
        if not config.exists():
            return
        done = log.last("step")
        every = json.loads(config.read_text(encoding="utf-8"))["train"].get("save_every")
        if done > min(every or self.per_epoch, self.total) or (self.folder / "last.safetensors").exists():
            raise CheckpointError(
                f"{self.folder} holds a run of {done} steps, but its checkpoints are gone: {NEW_FOLDER}"
            )
        warnings.warn(f"{self.folder} holds no checkpoint yet: the run starts again at step 1", stacklevel=4)

    def _refuse_lost_rows(self) -> None:
        """The curves of a resumed run are whole: a row for each step that its checkpoint has done."""
        done, logs = self.state.step, (self.steps, self.evals)
        lost = [log.path for log in logs if done and not log.path.exists()]
        if lost:
            raise FileNotFoundError(f"{lost[0]} is gone: {NEW_FOLDER}")
        steps, _ = (log.rows() for log in logs)
        if [row["step"] for row in steps[:done]] != list(range(1, done + 1)):
            raise ValueError(f"{self.steps.path} lacks steps before {done}, the checkpoint's: {NEW_FOLDER}")

    def _restore(self, found: list[Path]) -> None:
        config, state = self.config, self.state
        if not found and config.init == "xavier":
            seed_everything(derive_seed(config.seed, INIT))
            init_xavier(state.model)
        self.processes.copy_first(state.model)
        if config.ema:
            state.ema = EMA(state.model, config.ema)
        self.parallel.place(state, config)
        if found:
            load_checkpoint(found[-1], state, config, self.data)
        if not (self.folder / "best.safetensors").exists():
            state.best = -1.0  # the next evaluation writes them again

    def go(self, progress: bool | None) -> None:
        """Train up to the last step and write the final weights."""
        state = self.state
        stream = batch_stream(self.train_set, self.config, state.step, self.processes.share)
        disable = (
            None if progress is None else not progress
        )  # tqdm's None: no bar where stderr is no terminal
        disable = disable if self.processes.first else True
        state.model.train()
        with tqdm(total=self.total, initial=state.step, unit="step", disable=disable) as bar:
            while state.step < self.total:
                epoch, (images, targets) = next(stream)
                self._step(epoch, images.to(self.device), targets.to(self.device))
                bar.update()
                self._after_step(epoch, bar)
        self._keep("last.safetensors")
        if state.ema:
            state.model.load_state_dict(state.ema.module.state_dict())
        self.parallel.leave(state)
        self.processes.wait()  # until the first one has written

    def _step(self, epoch: int, images: Tensor, targets: Tensor) -> None:
        state, config = self.state, self.config
        seed = derive_seed(config.seed, STEP, state.step)
        seed_everything(seed)  # drop path
        lr = lr_at(state.updates, self.total, config)
        set_lr(state.optimizer, lr)
        scale = state.scaler.get_scale()
        loss, norm = train_step(self.parallel.step_state(state, len(images), seed), images, targets, config)
        if state.scaler.get_scale() < scale:  # gradients overflowed, so the optimiser took no step
            state.skipped += 1
        elif state.ema:
            state.ema.update(state.model, state.updates)
        state.step += 1
        self.pending.append((self._row(epoch) | {"lr": lr}, loss, whole(norm)))

    def _row(self, epoch: int) -> Row:
        seconds = round(time.perf_counter() - self.started, 3)
        return {"step": self.state.step, "epoch": epoch, "seconds": seconds}

    def _after_step(self, epoch: int, bar: tqdm) -> None:
        config = self.config
        save = self._due(config.save_every)
        evaluates = self.val_set is not None and self._due(config.eval_every)
        if save or evaluates or self.state.step % config.log_every == 0:
            bar.set_postfix(loss=f"{self._flush_steps():.3f}", refresh=False)
        if evaluates:
            self._evaluate(epoch)
        if save:
            save_checkpoint(self.folder / FOLDER, self.state, config, self.data)

    def _due(self, every: int | None) -> bool:
        return self.state.step == self.total or self.state.step % (every or self.per_epoch) == 0

    def _flush_steps(self) -> float:
        """Write the waiting rows and return the last loss. It waits for the device, so not at every step."""
        loss = math.nan
        for (row, _, norm), loss in zip(self.pending, self._pending_losses(), strict=True):
            if not math.isfinite(loss):
                self.steps.flush()
                raise TrainingDiverged(
                    f"the loss is {loss} at step {row['step']} (learning rate {row['lr']:.2g}): start again in a "
                    "new folder (--out) with a smaller lr, a longer warmup, or precision fp32"
                )
            self.steps.append({**row, "loss": loss, "grad_norm": norm.item()})
        self.pending.clear()
        self.steps.flush()
        return loss

    def _pending_losses(self) -> list[float]:
        """The waiting steps' losses; each is the mean of the processes', whose shares are of one size."""
        if not self.pending:
            return []
        losses = torch.stack([loss for _, loss, _ in self.pending])
        return (self.processes.sum(losses) / self.processes.count).tolist()

    def _evaluate(self, epoch: int) -> None:
        state, precision = self.state, self.config.precision
        result = evaluate(state.averaged, self.val_set, precision=precision, processes=self.processes)
        row = self._row(epoch) | {"loss": result.loss, "top1": result.top1, "top5": result.top5}
        self.evals.append(row)
        self.evals.flush()
        if self.on_eval and self.processes.first:
            self.on_eval(row)
        if result.top1 > state.best:
            state.best = result.top1
            self._keep("best.safetensors", val_top1=result.top1)

    def _keep(self, name: str, **more: Any) -> None:
        about = {**self.about, "step": self.state.step, **more}
        weights = {name: whole(tensor) for name, tensor in self.state.averaged.state_dict().items()}
        if self.processes.first:
            write_tensors(self.folder / name, weights, {"about": json.dumps(about)})


def train_step(
    state: TrainState, images: Tensor, targets: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """One optimiser step on a batch (B, C, H, W), in micro-batches; returns mean loss and gradient norm, 0-d.

    Each micro-batch's mean loss is weighted by its share of the batch, so the gradients add up to the whole
    batch's.
    Targets are classes (B,) or probabilities (B, num_classes).
    """
    total = images.new_zeros(())
    size = config.micro_batch or len(images)
    for part, target in zip(images.split(size), targets.split(size), strict=True):
        with autocast(images.device, config.precision):
            logits = state.model(part)
        loss = F.cross_entropy(logits.float(), target, label_smoothing=config.label_smoothing)
        loss = loss * (len(part) / len(images))
        state.scaler.scale(loss).backward()
        total += loss.detach()
    state.scaler.unscale_(state.optimizer)
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), config.clip_norm or math.inf)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    return total, norm
