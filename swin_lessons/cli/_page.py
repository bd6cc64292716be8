"""Help pages: description, options, examples."""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_PX = 4096  # side of an image: a million tokens of 4 x 4 px, already far beyond what these models are for
NO_MEMORY = re.compile("DefaultCPUAllocator|out of memory|Storage size calculation overflowed")
SMALLER = ("batch", "batch_size", "micro_batch", "img_size")  # options that decide how much memory is needed

Run = Callable[[argparse.Namespace], int]


def add_command(
    subparsers: Any,
    name: str,
    run: Run,
    summary: str,
    text: str,
    examples: str,
) -> argparse.ArgumentParser:
    """A subcommand whose `--help` shows `text` and `examples` as they are written."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=text,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=explain_memory(run))
    return parser


def explain_memory(run: Run) -> Run:
    """`run`, whose failed allocations become a ValueError that says how much was asked for and what to change."""

    @functools.wraps(run)
    def explained(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
                raise ValueError(memory_message(str(error), args)) from error
            raise

    return explained


def memory_message(text: str, args: argparse.Namespace) -> str:
    """How much a failed allocation asked for, and which of the command's options ask for less."""
    asked = re.search(r"allocate ([\d.]+) ?(\w+)", text)
    amount = f" for {readable(*asked.groups())} more" if asked else ""
    options = " or ".join(f"--{name.replace('_', '-')}" for name in SMALLER if hasattr(args, name))
    remedy = f"use a smaller {options}" if options else "close other programs"
    return f"not enough memory{amount}; {remedy}"


def readable(number: str, unit: str) -> str:
    """PyTorch counts bytes on the CPU, and has larger units on a GPU."""
    return f"{int(number) / 2**30:,.1f} GiB" if unit == "bytes" else f"{number} {unit}"


def thread_count(text: str) -> int:
    """Argument type of --threads: 1 up to eight times the cores of this machine, beyond which PyTorch may crash."""
    most = 8 * (os.cpu_count() or 1)
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from 1 to {most}")
    return int(text)


def image_side(text: str) -> int:
    """Argument type of --img-size: at most MOST_PX. How small it may be depends on the model, which says so."""
    if not (text.removeprefix("-").isdecimal() and int(text) <= MOST_PX):
        raise argparse.ArgumentTypeError(
            f"{text!r}: use a whole number of px up to {MOST_PX:,}; memory grows with its square"
        )
    return int(text)


def table(rows: list[tuple[str, str]], indent: str = "  ") -> str:
    """Two columns, the first padded to its widest entry."""
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"{indent}{left:<{width}}  {right}".rstrip() for left, right in rows)


def check_writable(path: Path | None, option: str = "--out", example: str = "bench.json") -> None:
    """Before half an hour of work, not after. Raises OSError that names the file and the remedy."""
    from swin_lessons.training.files import refuse_file

    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder: name a file, such as {path / example}")
    refuse_file(path.parent, option)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise OSError(f"{option} {path} cannot be written: {error.strerror}; name another file") from error
    if path.stat().st_size == 0:
        path.unlink()
