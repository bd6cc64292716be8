"""`swin-lessons kernels`: what a compiler makes of the fused kernels, for a GPU that need not be there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from swin_lessons.cli._page import add_command, check_writable

TEXT = """\
Compile the Triton kernels for GPU architectures and say what each needs: registers and spilled bytes of a
thread, shared memory of a program, the matrix instruction, the widest load, and the occupancy.

Nothing runs, so no GPU is needed. Times are not in this table: they come from `swin-lessons bench` on a GPU.
"""
EXAMPLES = """\
  swin-lessons kernels --target sm_90
  swin-lessons kernels --op layer_norm --target sm_80 sm_89 --dtype fp16
  swin-lessons kernels --json
"""
LINE = "{:46s}{:8s}{:6s}{:>5s}{:>7s}{:>9s}  {:22s}{:>5s}{:>11s}"
HEADERS = ("kernel", "target", "dtype", "regs", "spill", "shared", "mma", "load", "occupancy")


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    parser = add_command(subparsers, "kernels", run, "what a compiler makes of the kernels", TEXT, EXAMPLES)
    add = parser.add_argument
    add(
        "--target", nargs="+", metavar="SM", help="sm_80 (A100; default), sm_86, sm_89, sm_90, sm_100; or all"
    )
    add("--op", metavar="NAME", help="kernels whose name begins so (default: all)")
    add("--dtype", nargs="+", choices=("fp32", "fp16", "bf16"), default=["fp32", "fp16", "bf16"])
    add("--json", action="store_true", help="print a JSON list of objects")
    add("--out", type=Path, metavar="FILE", help="also write the rows as a result with its provenance")


def run(args: argparse.Namespace) -> int:
    """Compile and print."""
    from swin_lessons.kernels.report import ARCHITECTURES, compile_report
    from swin_lessons.results import save_result

    check_writable(args.out)
    targets = list(ARCHITECTURES) if args.target == ["all"] else args.target or ["sm_80"]
    rows = [row for target in targets for row in compile_report(args.op, target, args.dtype)]
    if args.out:
        save_result(args.out, {"rows": rows})
    print(json.dumps(rows, indent=1) if args.json else "\n".join([LINE.format(*HEADERS), *map(line, rows)]))
    return 0


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    sizes = (f"{row[key]}" for key in ("registers", "spill_bytes", "shared_bytes"))
    load, share = f"{row['vector_bytes']} B", f"{row['occupancy']:.0%}"
    return LINE.format(row["name"], row["target"], row["dtype"], *sizes, row["mma"] or "-", load, share)
