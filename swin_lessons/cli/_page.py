"""Help pages: description, options, examples."""

from __future__ import annotations

import argparse
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


def table(rows: list[tuple[str, str]], indent: str = "  ") -> str:
    """Two columns, the first padded to its widest entry."""
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"{indent}{left:<{width}}  {right}".rstrip() for left, right in rows)
