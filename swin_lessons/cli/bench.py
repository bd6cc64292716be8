"""`swin-lessons bench`: time this package against its peers, fairly."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swin_lessons.cli._page import add_command, check_writable, thread_count

TEXT = """\
Time this package against timm, torchvision and transformers in one process: the same weights, the
same images, checked to give the same results, taking turns in a random order. Medians, spreads and
ratios to timm; the bytes that each keeps for the backward pass.

Close other programs first. The whole suite takes up to half an hour on 2 cores and up to
10 GB of memory; --quick a minute or two. The exit status is 0 whether a bar is met or not: read
the table.
"""
EXAMPLES = """\
  swin-lessons bench --quick
  swin-lessons bench --against timm --models swin_tiny_patch4_window7_224 --batch 1,8
  swin-lessons bench --mode train --dtype bf16 --batch 8
  swin-lessons bench --out book/results/bench_cpu.json
  swin-lessons bench --suite train-ladder --out book/results/train_ladder.json
  swin-lessons bench --suite gpu --quick --out book/results/gpu.json
"""


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    parser = add_command(subparsers, "bench", run, "time this package against its peers", TEXT, EXAMPLES)
    add = parser.add_argument
    add(
        "--suite", default="cpu", metavar="NAME", help="cpu (default), train-ladder, kernels, or gpu for both"
    )
    add("--against", type=names, default=None, metavar="LIST", help="timm,torchvision,transformers; or none")
    add(
        "--models",
        type=names,
        default=(),
        metavar="LIST",
        help="timm's names, or swin_lesson_c48 and the like",
    )
    add("--batch", type=numbers, default=(), metavar="LIST", help="batch sizes, such as 1,8,32")
    add("--mode", type=names, default=("infer", "train"), metavar="LIST", help="infer,train (default: both)")
    add("--dtype", type=names, default=(), metavar="LIST", help="fp32,fp16,bf16 (default: the suite's)")
    add(
        "--micro-batch", type=int, default=4, metavar="N", help="images a piece at large batches (default: 4)"
    )
    add("--rounds", type=int, default=7, metavar="N", help="samples of each, at least 7 (default: 7)")
    add("--threads", type=thread_count, metavar="N", help="CPU threads (default: PyTorch's choice)")
    add("--quick", action="store_true", help="the smallest cases only")
    add("--full", action="store_true", help="every contestant in the long cases too")
    add("--out", type=Path, metavar="FILE", help="write everything as JSON, with its provenance")


def names(text: str) -> tuple[str, ...]:
    """`a,b` -> ("a", "b"); `none` -> ()."""
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    """`1,8` -> (1, 8)."""
    try:
        return tuple(int(part) for part in names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,8,32") from None


def run(args: argparse.Namespace) -> int:
    """Run the suite, print its tables, and write the JSON."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter; read when PyTorch loads
    import torch

    if args.suite != "cpu" and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, below

    from swin_lessons.profiling.suites import find_suite

    suite, options = find_suite(args.suite), bench_options(args)
    check_writable(args.out)
    if args.threads:
        torch.set_num_threads(args.threads)
    with Console(args.suite, args.out) as console:
        result = suite.run(options, console)
    print(suite.summary(result))
    if args.out:
        print(f"wrote {console.keep(result)}")
    return 0


def bench_options(args: argparse.Namespace) -> Any:
    """The suite's options; a wrong value raises ValueError."""
    from swin_lessons.profiling.suites import BenchOptions

    chosen = {} if args.against is None else {"against": args.against}
    return BenchOptions(
        models=args.models,
        batches=args.batch,
        modes=args.mode,
        dtypes=args.dtype,
        rounds=args.rounds,
        micro_batch=args.micro_batch,
        quick=args.quick,
        full=args.full,
        **chosen,
    )


class Console:
    """Progress bars on a terminal; tables on stdout always; results in a file if there is one."""

    def __init__(self, suite: str = "", out: Path | None = None) -> None:
        self.suite, self.out = suite, out

    def __enter__(self) -> Console:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=RichConsole(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def section(self, title: str, samples: int) -> Iterator[Callable[[str], Any]]:
        """A bar for one case."""
        task = self._progress.add_task(title, total=samples)
        try:
            yield lambda name: self._progress.update(task, advance=1, description=f"{title}: {name}")
        finally:
            self._progress.remove_task(task)

    def text(self, text: str) -> None:
        """A finished table."""
        print(text, flush=True)

    def keep(self, result: dict[str, Any]) -> Path | None:
        """Write what there is, with its provenance; a later call replaces it."""
        from swin_lessons.results import save_result

        return self.out and save_result(self.out, {"suite": self.suite, **result})
