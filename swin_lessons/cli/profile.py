"""`swin-lessons profile`: where a model's work, memory and time go."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from swin_lessons.cli._page import add_command, image_side, thread_count

TEXT = """\
Count a model's multiply-accumulates (MACs) and parameters, measure where the time of a step goes, and,
with --train, where its memory goes. Weights and images are random: only the shapes matter.
"""
EXAMPLES = """\
  swin-lessons profile swin_tiny_patch4_window7_224 --infer
  swin-lessons profile swinv2_micro_fmnist --train --batch 64
  swin-lessons profile swin_tiny_patch4_window7_224 --infer --layers       a row for every layer
  swin-lessons profile deit_small_patch16_224 --infer --json > deit.json
"""


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    parser = add_command(subparsers, "profile", run, "where work, memory and time go", TEXT, EXAMPLES)
    add = parser.add_argument
    add("model", metavar="MODEL", help="as `swin_lessons.models.list_models()` names it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--infer", action="store_true", help="a forward pass (default)")
    what.add_argument("--train", action="store_true", help="forward, backward and an AdamW step")
    add("--batch", type=int, default=1, metavar="N", help="images a step (default: 1)")
    add("--img-size", type=image_side, metavar="PX", help="side of the images (default: the model's)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="fp32, or bf16 by autocast")
    add("--device", default="cpu", metavar="NAME", help="cpu or cuda")
    add("--threads", type=thread_count, metavar="N", help="CPU threads (default: PyTorch's choice)")
    add("--top", type=int, default=15, metavar="N", help="operations to list (default: 15)")
    add("--layers", action="store_true", help="list MACs layer by layer")
    add("--json", action="store_true", help="print everything as JSON, with its provenance")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter; read when PyTorch loads
    import torch

    from swin_lessons.cli._runs import pick_device

    if args.batch < 1:
        raise ValueError(f"--batch {args.batch}: at least one image")
    args.device = str(pick_device(args.device))
    if args.threads:
        torch.set_num_threads(args.threads)
    result = measure(args)
    print(json.dumps(to_json(result), indent=1) if args.json else to_text(result, args))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{"macs": MacReport, "ops": [OpTime], "memory": MemoryLedger or None}."""
    from swin_lessons.models import create_model
    from swin_lessons.profiling import count_macs, memory_ledger
    from swin_lessons.profiling.steps import Contestant, images_and_labels
    from swin_lessons.profiling.trace import profile_step

    model: Any = create_model(args.model, img_size=args.img_size).to(args.device)
    config = model.config
    size = config.img_size if isinstance(config.img_size, int) else config.img_size[0]
    x, y = images_and_labels(args.batch, config.in_chans, size, config.num_classes)
    x, y = x.to(args.device), y.to(args.device)
    mode = "train" if args.train else "infer"
    step = Contestant(args.model, "ours", model, mode, args.dtype).step(x, y)
    return {
        "macs": count_macs(model, (config.in_chans, size, size)),
        "memory": memory_ledger(model, x) if args.train else None,
        "ops": profile_step(step, cuda=args.device.startswith("cuda")),
    }


def to_text(result: dict[str, Any], args: argparse.Namespace) -> str:
    """The report for people."""
    from swin_lessons.profiling.trace import by_kind, ops_table

    macs, kinds = result["macs"], by_kind(result["ops"])
    total = sum(kinds.values())
    shares = "\n".join(f"{kind:16s}{s * 1e3:10.2f} ms{100 * s / total:7.1f}%" for kind, s in kinds.items())
    parts = [
        f"{args.model}, {macs.input_size}: {macs.total / 1e9:.3f} GMACs an image, {macs.params:,} parameters",
        macs.table("layer" if args.layers else "kind"),
        *([f"Memory of a step, batch {args.batch}\n{result['memory'].table()}"] if result["memory"] else []),
        f"Time of a {'training' if args.train else 'forward'} step, batch {args.batch}, {args.dtype}\n{shares}",
        ops_table(result["ops"], args.top),
    ]
    return "\n\n".join(parts)


def to_json(result: dict[str, Any]) -> dict[str, Any]:
    """The report for programs."""
    from dataclasses import asdict

    from swin_lessons.profiling.trace import by_kind
    from swin_lessons.results import provenance

    return {
        "provenance": provenance(),
        "macs": result["macs"].to_dict(),
        "memory_bytes": asdict(result["memory"]) if result["memory"] else None,
        "seconds_by_kind": by_kind(result["ops"]),
        "ops": [asdict(op) | {"kind": op.kind} for op in result["ops"]],
    }
