"""What `swin-lessons train` puts together: data splits, a model that fits them, a run, a report."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from swin_lessons import __version__
from swin_lessons.data import DataSpec, load_dataset
from swin_lessons.data.folders import find_split
from swin_lessons.data.pixels import to_pair
from swin_lessons.models import create_model
from swin_lessons.models.fused import kernel_parts
from swin_lessons.results import save_result
from swin_lessons.training import (
    CheckpointError,
    EvalResult,
    TrainConfig,
    evaluate,
    read_tensors,
    seed_everything,
    train,
)
from swin_lessons.training.batches import in_memory, steps_per_epoch
from swin_lessons.training.checkpoint import FOLDER, check_same_model, list_checkpoints, load_weights_into
from swin_lessons.training.files import refuse_file
from swin_lessons.training.history import EVAL_COLUMNS, CsvLog
from swin_lessons.training.parallel import choose_parallel
from swin_lessons.training.processes import Processes, local_device
from swin_lessons.training.recipes import recipe

UNDIVIDED = {"fashion-mnist", "cifar10", "cifar100", "digits"}  # sets without a validation split
VAL_FRACTION = 0.05  # of their training images is held out


@dataclass
class Job:
    """A model, its data and its recipe, ready to train in `folder`."""

    model: nn.Module
    splits: dict[str, Any]
    config: TrainConfig
    folder: Path
    about: dict[str, Any]
    pretrained_only: bool = False
    parallel: str | None = None
    processes: Processes = field(default_factory=Processes.current)

    def headline(self) -> str:
        """One paragraph on what is about to run."""
        params = sum(param.numel() for param in self.model.parameters())
        sizes = ", ".join(f"{len(dataset):,} {name}" for name, dataset in self.splits.items())
        device = next(self.model.parameters()).device
        return (
            f"{self.about['model']} ({params:,} parameters) on {self.about['data']} ({sizes} images)\n"
            f"{device}, {self.config.precision}, {torch.get_num_threads()} threads -> {self.folder}"
            + self.shares()
        )

    def shares(self) -> str:
        """How several processes share a batch; nothing where there is one."""
        count = self.processes.count
        if count == 1:
            return ""
        images = min(self.config.batch_size, len(self.splits["train"]))
        mine, micro = len(self.processes.share.rows(images)), self.config.micro_batch or images
        passes = f", in {math.ceil(mine / micro)} passes of at most {micro}" if micro < mine else ""
        return (
            f"\n{images} images a step = {count} processes x {mine} images{passes} "
            f"({self.parallel or 'ddp'}, {dist.get_backend()})"
        )

    def train(self, resume: bool) -> None:
        """Run the training loop; on Ctrl-C say how to go on."""
        sets, say = (self.splits["train"], self.splits["val"]), self.say
        first = self.processes.first
        if first and resume and (done := self.steps_done()):
            print(self.where(done), flush=True)
        options: dict[str, Any] = {"about": self.about, "on_eval": say, "parallel": self.parallel}
        try:
            train(self.model, *sets, self.config, self.folder, resume=resume, **options)
        except KeyboardInterrupt:
            if first:
                print(f"\nstopped; the same command with --resume goes on with {self.folder}", flush=True)
            raise

    def steps_done(self) -> int:
        """Optimiser steps of the newest checkpoint, 0 where there is none."""
        found = list_checkpoints(self.folder / FOLDER)
        return int(found[-1].stem.removeprefix("step-")) if found else 0

    def where(self, done: int) -> str:
        """Where a resumed run stands."""
        total = self.config.total_steps(steps_per_epoch(self.splits["train"], self.config))
        if done == total:
            return f"finished: {done} of {total} steps are done, nothing is left to train"
        return f"goes on after step {done} of {total}"

    def say(self, row: dict[str, float]) -> None:
        """A line for each evaluation, above the progress bar where there is one."""
        tqdm.write(
            f"  epoch {row['epoch'] + 1:>3}  step {row['step']:>6}  {row['seconds']:>6.0f} s  "
            f"val loss {row['loss']:.3f}  top-1 {row['top1']:.2%}"
        )

    def load_best(self) -> nn.Module:
        """The model with the weights that were best on the validation images."""
        if not self.pretrained_only:
            load_kept(self.model, self.folder / "best.safetensors")
        return self.model

    def measure(self, split: str, precision: str = "fp32") -> EvalResult:
        """Evaluate the model as it is on one split."""
        return evaluate(self.model, self.splits[split], precision=precision, processes=self.processes)

    def evaluate(self) -> list[tuple[str, str]]:
        """Rows about the best weights on the test images, else the validation images; writes results.json."""
        split = "test" if "test" in self.splits else "val"
        self.load_best()
        started = time.perf_counter()
        result = self.measure(split, self.config.precision)
        seconds = time.perf_counter() - started
        if self.processes.first and not self.pretrained_only:
            save_result(self.folder / "results.json", self.run() | results(result, split))
        return [*report(result, split, self.splits[split].classes), ("evaluated in", f"{seconds:.1f} s")]

    def run(self) -> dict[str, Any]:
        """What was trained, for how long, and each evaluation on the way, as JSON."""
        evals = CsvLog(self.folder / "evals.csv", EVAL_COLUMNS).rows()
        about = {name: self.about[name] for name in ("model", "data", "pretrained")}
        kept = {name: getattr(self.config, name) for name in ("precision", "epochs", "seed")}
        seconds = evals[-1]["seconds"] if evals else None
        return {**about, **kept, "train_seconds": seconds, "evals": list(map(jsonable, evals))}


@contextmanager
def one_voice(processes: Processes) -> Iterator[Callable[[str], None]]:
    """A `print` that is silent in all processes but the first; nor do the others' warnings show."""
    with warnings.catch_warnings():
        if not processes.first:
            warnings.simplefilter("ignore")
        yield lambda text: print(text, flush=True) if processes.first else None


def prepare(args: argparse.Namespace, overrides: dict[str, Any], device: torch.device) -> Job:
    """From the command line to a `Job`; a run to resume or evaluate is read from its config.json."""
    processes = Processes.current()
    choose_parallel(args.parallel, processes)  # a wrong option is an error here
    with processes.first_alone():  # it downloads, and the others find the files
        job = _prepare(args, overrides, device)
    job.parallel = args.parallel
    return job


def check_kernels(args: argparse.Namespace, optimizer: str, device: torch.device) -> None:
    """Before anything is read or written, whether this device runs the kernels that options ask for.

    Raises:
        ValueError: names the options, the reason and the way out.
    """
    asked = [f"--kernels {args.kernels}"] if kernel_parts(args.kernels or "torch") else []
    options = {"attention": args.attention, "optimizer": optimizer}
    asked += [f"--{name} triton" for name, value in options.items() if value == "triton"]
    if not asked:
        return
    from swin_lessons.kernels.launch import obstacle

    if reason := obstacle(torch.empty(0, device=device)):
        raise ValueError(f"{', '.join(asked)}: {reason}; or leave the option out, to run by PyTorch")


def _prepare(args: argparse.Namespace, overrides: dict[str, Any], device: torch.device) -> Job:
    folder = args.out or Path("runs") / re.sub(r"[^\w.-]+", "-", f"{args.model}-{args.data}")
    pretrained_only = args.eval_only and args.pretrained
    refuse_file(folder)
    kept = read_config(folder, args) if args.resume or (args.eval_only and not pretrained_only) else {}
    config = TrainConfig.from_dict(kept.get("train", {}) | overrides)  # a wrong option is an error here
    check_kernels(args, config.optimizer, device)
    kwargs = kept.get("model_kwargs") or wished_input(args)
    sizes = {name: kwargs[name] for name in ("img_size", "in_chans")}
    splits = load_splits(args.data, root=args.root, skip_bad=args.skip_bad, **sizes)
    splits = {name: on_device(dataset, device) for name, dataset in splits.items()}
    train_set = splits["train"]
    check_classes(folder, kept, list(train_set.classes))
    kwargs = {**kwargs, "in_chans": train_set.in_chans, "num_classes": train_set.num_classes}
    pretrained = kept.get("pretrained", args.pretrained)
    seed_everything(config.seed)
    how = {
        "checkpointing": args.checkpointing,
        "pretrained": pretrained,
        "attention": args.attention or "auto",
    }
    how |= {"kernels": args.kernels} if args.kernels else {}
    model = create_model(args.model, **how, **kwargs).to(device)
    if not kept:
        augment = "none" if args.data == "digits" else "flip=0.5"  # a mirrored digit is none
        config = recipe(model, train_set, from_scratch=not pretrained, **{"augment": augment} | overrides)
    about = {
        "model": args.model, "model_kwargs": kwargs, "data": args.data, "pretrained": pretrained,
        "classes": list(train_set.classes), "mean": train_set.mean.tolist(), "std": train_set.std.tolist(),
        "versions": {"swin_lessons": __version__, "torch": torch.__version__},
    }  # fmt: skip
    return Job(model, splits, config, folder, about, pretrained_only)


def wished_input(args: argparse.Namespace) -> dict[str, Any]:
    """Image size and window as asked for, else the model's; channels None where the data decide.

    Raises:
        ValueError: the image size asked for leaves less than one token in the last stage.
    """
    with torch.device("meta"):
        own: Any = create_model(args.model).config
    smallest = own.patch_size * 2 ** (len(getattr(own, "depths", "1")) - 1)
    if args.img_size is not None and args.img_size < smallest:
        raise ValueError(f"--img-size {args.img_size} is too small for {args.model}: use {smallest} or more")
    wish = {
        "img_size": args.img_size or to_pair(own.img_size)[0],
        "in_chans": own.in_chans if args.pretrained else None,
        "window_size": args.window_size,
        "drop_path_rate": args.drop_path,
    }
    return {name: value for name, value in wish.items() if value is not None or name == "in_chans"}


def on_device(dataset: Any, device: torch.device) -> Any:
    """A set held in memory moves to the device whole; others send their batches."""
    return dataset.to(device) if in_memory(dataset) else dataset


def load_splits(
    spec: str, *, img_size: int | None = None, in_chans: int | None = None, **options: Any
) -> dict[str, Any]:
    """The splits "train", "val" and, where the set has one, "test".

    Weights are chosen on "val", which holds no test image; "test" is looked at once, at the end.
    """

    data = DataSpec.parse(spec)
    held_out: dict[str, Any] = {"val_fraction": VAL_FRACTION} if data.name in UNDIVIDED else {}

    def load(split: str) -> Any:
        return load_dataset(data, split=split, img_size=img_size, in_chans=in_chans, **options, **held_out)

    tested = not data.path or find_split(data.path, "test")[0] != find_split(data.path, "val")[0]
    return {split: load(split) for split in ("train", "val", "test")[: 2 + tested]}


def pick_device(name: str) -> torch.device:
    """ "auto": CUDA where it is, else the CPU. Raises ValueError where CUDA is asked for and missing."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device {name!r} is unknown: use auto, cpu, cuda or cuda:NUMBER")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: PyTorch sees no CUDA device here; use --device cpu")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    return torch.device(local_device(name))


def read_config(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """config.json of a run folder. Raises where there is none, or it is of another model or data set."""
    path = folder / "config.json"
    if not path.exists():
        option = "--resume" if args.resume else "--eval-only"
        raise FileNotFoundError(
            f"{folder} holds no run (no config.json): train without {option} first, or set --out"
        )
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        missing = {"model", "data", "model_kwargs", "classes", "train"} - kept.keys()
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): train again in another folder") from error
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: train again in another folder")
    for name in ("model", "data"):
        if kept[name] != getattr(args, name) and not (name == "data" and same_data(kept[name], args.data)):
            raise ValueError(
                f"{folder} holds a run with --{name} {kept[name]}, not {getattr(args, name)}: "
                "set --out to another folder"
            )
    refuse_other_model(folder, kept, args)
    return kept


def same_data(one: str, other: str) -> bool:
    """Do two names of data sets mean the same one? Folders may be written in several ways."""
    specs = DataSpec.parse(one), DataSpec.parse(other)
    return len({(spec.name, spec.path and spec.path.resolve()) for spec in specs}) == 1


def refuse_other_model(folder: Path, kept: dict[str, Any], args: argparse.Namespace) -> None:
    """A kept run has its own model: options that ask for another one would change nothing, so they are refused."""
    asked = {"img_size": args.img_size, "window_size": args.window_size, "drop_path_rate": args.drop_path}
    for name, value in asked.items():
        mine = kept["model_kwargs"].get(name, 0.0 if name == "drop_path_rate" else None)
        if value is not None and value != mine:
            option = name.removesuffix("_rate").replace("_", "-")
            raise ValueError(
                f"--{option} {value}: the run in {folder} has {mine}; set --out to another folder"
            )


def check_classes(folder: Path, kept: dict[str, Any], classes: list[str]) -> None:
    """The outputs of a kept model stand for the classes it was trained on."""
    if kept and kept["classes"] != classes:
        gone = [name for name in kept["classes"] if name not in classes] or kept["classes"]
        new = [name for name in classes if name not in kept["classes"]] or classes
        raise ValueError(
            f"the run in {folder} was trained on other classes: {', '.join(gone)} there, "
            f"{', '.join(new)} here. Restore the folders' names, or set --out to another folder"
        )


def load_kept(model: nn.Module, path: Path) -> None:
    """Load weights that a run kept, strictly. Raises an error that says how to get them where they are bad."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: train first, or name the run's folder with --out")
    last = path.with_name("last.safetensors")
    try:
        weights = read_tensors(path)[0]
    except CheckpointError as error:
        copy = f"Copy {last} over it to use the final weights"
        again = "Delete it and go on with --resume: the next evaluation writes it again"
        raise CheckpointError(f"{error}. {copy if last.exists() else again}") from error
    check_same_model(path, model, weights)
    load_weights_into(model, weights)


def results(result: EvalResult, split: str) -> dict[str, Any]:
    """An `EvalResult` as JSON."""
    scores = {name: getattr(result, name) for name in ("loss", "top1", "top5", "count")}
    return {"split": split, **jsonable(scores), "confusion": result.confusion.tolist()}


def jsonable(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: None stands for them."""
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def report(result: EvalResult, split: str, classes: list[str]) -> list[tuple[str, str]]:
    """Rows of a table: accuracy over all images, then of each class."""
    rows = [
        (f"{split} top-1", f"{result.top1:.2%} of {result.count:,} images"),
        (f"{split} top-5", f"{result.top5:.2%}"),
    ]
    parts = ["no images" if math.isnan(part) else f"{part:.1%}" for part in result.per_class.tolist()]
    return rows + list(zip(classes, parts, strict=True))
