"""The command `swin-lessons`: one module a subcommand, each with `add_parser(subparsers)` and `run(args)`.

Modules import PyTorch and the package inside their functions, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swin_lessons import __version__

DESCRIPTION = "Swin Transformers: build them, train them, speed them up, shrink them."
EPILOG = """\
examples:
  swin-lessons doctor                                  what this machine has, and what that means
  swin-lessons data fashion-mnist                      fetch and check the book's data set
  swin-lessons train --model swin_micro_fmnist --data fashion-mnist
  swin-lessons train --model swin_tiny_patch4_window7_224 --data imagefolder:~/photos

`swin-lessons COMMAND --help` explains a command. Errors say what to change;
`swin-lessons --traceback COMMAND ...` shows where they rose.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit status: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    with _interrupts() as interrupts:
        try:
            parser = build_parser()
            args = parser.parse_args(argv)
            if args.command is None:
                parser.print_help(sys.stderr)
                return 2
            return _run(args, interrupts)
        except (KeyboardInterrupt, Exception) as error:
            if not interrupts and not isinstance(error, KeyboardInterrupt):
                raise
            print("interrupted", file=sys.stderr)
            return 130


def _run(args: argparse.Namespace, interrupts: list[int]) -> int:
    try:
        with _notes(args):
            return args.run(args)
    except BrokenPipeError:
        return 1  # the reader of our output has gone, as in `swin-lessons doctor | head -1`
    except Exception as error:
        if interrupts or args.traceback or not _is_expected(error):
            raise
        print(f"swin-lessons {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ArithmeticError) else 2


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Each Ctrl-C so far: a library that is stopped while it is imported may raise another exception for it."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _notes(args: argparse.Namespace) -> Iterator[None]:
    """Each warning looks like the command's other messages, and comes once; --traceback shows where it rose."""
    before, seen = warnings.formatwarning, {""}

    def note(message: Warning | str, *_: Any, **__: Any) -> str:
        text = f"swin-lessons {args.command}: note: {message}\n"
        text = "" if text in seen else text
        seen.add(text)
        return text

    warnings.formatwarning = before if args.traceback else note
    try:
        yield
    finally:
        warnings.formatwarning = before


def _is_expected(error: Exception) -> bool:
    """Is it an error whose message is written for the user? Others are bugs and keep their traceback."""
    if isinstance(error, (ValueError, OSError, ImportError, ArithmeticError)):
        return True
    return type(error).__name__ == "CheckpointError"


def build_parser() -> argparse.ArgumentParser:
    """The whole parser: every module of this package adds its subcommand."""
    parser = argparse.ArgumentParser(
        prog="swin-lessons",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error rose")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in command_modules():
        importlib.import_module(f"{__name__}.{name}").add_parser(commands)
    return parser


def command_modules() -> list[str]:
    """Names of the modules that hold a subcommand; those with a leading underscore help them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
