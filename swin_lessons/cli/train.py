"""`swin-lessons train`: train a model on a data set, or on your own images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swin_lessons.cli._page import add_command, image_side, table, thread_count

TEXT = """\
Train a model and keep all of it in one folder.

The number of classes, the channels and the image size come from the data and the model. The recipe
(rate, epochs, precision, micro-batches) is chosen for the model and this machine; every option
below overrides a part of it.

--data is fashion-mnist, cifar10, cifar100, digits, scenes, or imagefolder:PATH for your own images:
one folder of images for each class, or train/ and val/ with such folders inside. Where there is
no val/, part of the images is held out.

The run's folder holds config.json, metrics.csv (a row a step), evals.csv, checkpoints/,
best.safetensors (best on the validation images), last.safetensors and results.json (the scores of
best.safetensors, with the machine and the versions they come from). A run that was stopped, even
killed, goes on with --resume and ends with the very same weights (on the same machine with the same
number of threads). The page "How to run the lessons" shows how to use the model in Python.

Several devices: start the same command with torchrun. --batch-size stays the number of images that
a step sees: the processes share them equally, and the numbers are those of one process to rounding.
The run may go on with another number of processes. --parallel ddp gives each process the whole
model, fsdp a part of every weight, for models that do not fit; their checkpoints are folders.
"""
EXAMPLES = """\
  swin-lessons train --model swin_micro_fmnist --data fashion-mnist
  swin-lessons train --model swin_micro_fmnist --data cifar10 --epochs 20
  swin-lessons train --model swin_tiny_patch4_window7_224 --data imagefolder:~/photos --pretrained
  swin-lessons train --model swin_micro_fmnist --data fashion-mnist --resume
  swin-lessons train --model swin_micro_fmnist --data fashion-mnist --eval-only
  swin-lessons train --model swin_tiny_patch4_window7_224 --data imagefolder:~/photos \\
    --precision bf16 --kernels norm+mlp --attention triton --optimizer triton
  torchrun --nproc-per-node 2 -m swin_lessons train --model swin_micro_fmnist --data cifar10
"""

# option -> (type, help); each overrides the field of TrainConfig of the same name
OVERRIDES: dict[str, tuple[Any, str]] = {
    "epochs": (float, "passes over the training images"),
    "steps": (int, "optimiser steps; takes the place of --epochs, so give one of the two"),
    "batch-size": (int, "images an optimiser step sees"),
    "micro-batch": (int, "images in one forward pass; gradients add up to the same"),
    "lr": (float, "learning rate after the warm-up"),
    "warmup": (float, "part of the run (below 1) or steps of warm-up"),
    "weight-decay": (float, "AdamW's weight decay"),
    "layer-decay": (float, "learning-rate factor from a layer to the one below"),
    "clip-norm": (float, "largest gradient norm"),
    "ema": (float, "decay of the moving average of the weights; 0 is off"),
    "label-smoothing": (float, "share of the target spread over all classes"),
    "augment": (str, "none, light, medium, strong, or such as shift=2,flip=0.5,mixup=0.2"),
    "precision": (str, "fp32, tf32, bf16 or fp16"),
    "optimizer": (str, "adamw (PyTorch's), or triton for this package's fused kernel"),
    "init": (str, "xavier or default"),
    "seed": (int, "decides initialisation, order and augmentation"),
    "eval-every": (int, "steps between evaluations (default: an epoch, or a 40th of the run)"),
    "save-every": (int, "steps between checkpoints (default: an epoch, or a 40th of the run)"),
    "keep": (int, "checkpoints that stay"),
    "workers": (int, "processes that read images from disk"),
}


def add_parser(subparsers) -> None:
    """Add this subcommand."""
    parser = add_command(
        subparsers, "train", run, "train a model on a data set or on your images", TEXT, EXAMPLES
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="as `swin_lessons.models.list_models()` names it")
    add("--data", required=True, metavar="SET", help="data set, or imagefolder:PATH")
    add("--out", type=Path, metavar="FOLDER", help="the run's folder (default: runs/MODEL-SET)")
    add("--resume", action="store_true", help="go on with the run in that folder")
    add("--eval-only", action="store_true", help="evaluate best.safetensors (or --pretrained) and stop")
    add("--pretrained", action="store_true", help="start from pretrained weights")
    add("--img-size", type=image_side, metavar="PX", help="side of the images (default: the model's)")
    window = "window side in patches (default: the model's); a window larger than the map shrinks to it"
    add("--window-size", type=int, metavar="N", help=window)
    add("--drop-path", type=float, metavar="P", help="stochastic depth of the last block")
    add("--checkpointing", action="store_true", help="recompute blocks in the backward pass, to save memory")
    add("--attention", metavar="HOW", help="auto, reference, sdpa or triton (default: auto)")
    add(
        "--kernels",
        metavar="PARTS",
        help="torch (default), triton, or parts to fuse such as norm+windows+mlp",
    )
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")
    add("--parallel", choices=("ddp", "fsdp"), help="how torchrun's processes work together (default: ddp)")
    add("--threads", type=thread_count, metavar="N", help="CPU threads (default: PyTorch's choice)")
    add("--root", metavar="FOLDER", help="where data sets lie or go")
    add("--skip-bad", action="store_true", help="leave out images that cannot be read")
    recipe = parser.add_argument_group("recipe")
    length = recipe.add_mutually_exclusive_group()
    for name, (kind, text) in OVERRIDES.items():
        group = length if name in ("epochs", "steps") else recipe
        group.add_argument(f"--{name}", type=kind, metavar="TEXT" if kind is str else "N", help=text)


def run(args: argparse.Namespace) -> int:
    """Train, or evaluate, and print a summary; of several processes the first one prints."""
    import torch

    from swin_lessons.cli import _runs
    from swin_lessons.runtime import keep_freed_memory
    from swin_lessons.training.processes import process_group

    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = _runs.pick_device(args.device)
    with process_group(device) as processes, _runs.one_voice(processes) as say:
        job = _runs.prepare(args, overrides(args), device)
        say(job.headline())
        if not args.eval_only:
            job.train(resume=args.resume)
        say(table(job.evaluate()))
    return 0


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of TrainConfig that the user set."""
    fields = {name.replace("-", "_") for name in OVERRIDES}
    return {name: value for name, value in vars(args).items() if name in fields and value is not None}
