"""Help pages: description, options, examples."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any


def add_command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
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
    parser.set_defaults(run=run)
    return parser


def thread_count(text: str) -> int:
    """Argument type of --threads: 1 up to eight times the cores of this machine, beyond which PyTorch may crash."""
    most = 8 * (os.cpu_count() or 1)
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from 1 to {most}")
    return int(text)


def table(rows: list[tuple[str, str]], indent: str = "  ") -> str:
    """Two columns, the first padded to its widest entry."""
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"{indent}{left:<{width}}  {right}".rstrip() for left, right in rows)
