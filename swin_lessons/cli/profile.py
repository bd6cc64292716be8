"""`swin-lessons profile`: where a model's time, work and memory go."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from swin_lessons.cli._page import add_command, check_writable, image_side, thread_count

TEXT = """\
Show where the time of a step goes, kind by kind: patch embedding, LayerNorm, partition and shift of
windows, QKV, attention, proj, MLP, merging, residual, head, loss, optimiser. Weights and images are
random: only the shapes matter.

columns:
  fwd ms, bwd ms  time in the forward and in the backward pass, under PyTorch's profiler; on a GPU,
                  of the kernels
  MMACs           multiply-accumulates of matrix products, in millions
  MB moved        what the operations read and write, if nothing stays in a cache
  MB kept         what the forward pass keeps for the backward pass
  launches        operations on a CPU, kernels on a GPU
  FLOP/B          intensity: operations for each byte moved
  bound ms        the least time that this machine's roofline allows for so much work; "limit" says
                  whether memory or compute decides it
  of roof         bound over time. Low: the operations, or the way they are launched, waste time.
                  Above 100 %: the data stayed in the cache

The roofline (copy bandwidth and matrix rate) is measured once and kept in the cache folder.
With --train, a ledger predicts the peak memory of a step, and the measured peak stands beside it.
"""
EXAMPLES = """\
  swin-lessons profile swin_tiny_patch4_window7_224 --infer
  swin-lessons profile swinv2_micro_fmnist --train --batch 64
  swin-lessons profile swin_tiny_patch4_window7_224 --train --layers       MACs and memory of every layer
  swin-lessons profile swin_micro_fmnist --train --trace step.json.gz      open it at ui.perfetto.dev
  swin-lessons profile deit_small_patch16_224 --infer --json > deit.json
  nsys profile swin-lessons profile swin_tiny_patch4_window7_224 --train --device cuda --nvtx
"""
NVTX_STEPS = 5


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    parser = add_command(subparsers, "profile", run, "where time, work and memory go", TEXT, EXAMPLES)
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
    add(
        "--rounds",
        type=int,
        default=7,
        metavar="N",
        help="samples of the step's time, at least 7 (default: 7)",
    )
    add("--top", type=int, default=15, metavar="N", help="operations to list (default: 15)")
    add("--layers", action="store_true", help="list MACs, and with --train memory, layer by layer")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for Perfetto or Chrome, as .json or .json.gz",
    )
    add("--remeasure", action="store_true", help="measure the roofline again: close other programs first")
    add("--nvtx", action="store_true", help="only run some steps, with NVTX ranges for Nsight Systems (CUDA)")
    add("--json", action="store_true", help="print everything as JSON, with its provenance")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter; read when PyTorch loads
    import torch

    from swin_lessons.cli._runs import pick_device

    if args.batch < 1:
        raise ValueError(f"--batch {args.batch}: at least one image")
    if args.rounds < 7:
        raise ValueError(f"--rounds {args.rounds} is too few for a median: use at least 7")
    if args.top < 0:
        raise ValueError(f"--top {args.top}: how many operations to list, 0 or more")
    args.device = str(pick_device(args.device))
    if args.nvtx and not args.device.startswith("cuda"):
        raise ValueError("--nvtx marks what a GPU does: use --device cuda; on a CPU, use --trace FILE")
    check_writable(args.trace, "--trace", "step.json.gz")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.nvtx:
        return run_with_ranges(args)
    result = measure(args)
    if args.trace:
        result["profile"].trace.save(args.trace)
    print(json.dumps(to_json(result), indent=1) if args.json else to_text(result, args))
    return 0


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The model, images and labels, on the device."""
    from swin_lessons.models import create_model
    from swin_lessons.profiling.steps import images_and_labels

    model: Any = create_model(args.model, img_size=args.img_size).to(args.device)
    config = model.config
    size = config.img_size if isinstance(config.img_size, int) else config.img_size[0]
    x, y = images_and_labels(args.batch, config.in_chans, size, config.num_classes)
    return model, x.to(args.device), y.to(args.device)


def run_with_ranges(args: argparse.Namespace) -> int:
    """Steps for `nsys profile`: one to warm up, then some within NVTX ranges."""
    from swin_lessons.profiling.kinds import nvtx_ranges
    from swin_lessons.profiling.steps import Contestant

    model, x, y = build(args)
    contestant = Contestant(args.model, "ours", model, "train" if args.train else "infer", args.dtype)
    step = contestant.step(x, y)
    step()
    with nvtx_ranges(model, args.device, contestant.optimizer):
        for _ in range(NVTX_STEPS):
            step()
    print(f"{NVTX_STEPS} steps with NVTX ranges")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{"macs": MacReport, "profile": Profile}."""
    from swin_lessons.profiling import count_macs, profile_model, roofline

    model, x, y = build(args)
    macs = count_macs(model, tuple(x.shape[1:]))
    roof = roofline(args.device, remeasure=args.remeasure)
    made = profile_model(model, x, y, roof, train=args.train, dtype=args.dtype, rounds=args.rounds)
    return {"macs": macs, "profile": made}


def to_text(result: dict[str, Any], args: argparse.Namespace) -> str:
    """The report for people."""
    from swin_lessons.profiling import kind_table
    from swin_lessons.profiling.trace import ops_table

    macs, made = result["macs"], result["profile"]
    memory = made.memory
    parts = [
        f"{args.model}, {macs.input_size}: {macs.total / 1e9:.3f} GMACs an image, {macs.params:,} parameters",
        f"{step_line(made, args)}\n\n{kind_table(made)}",
        f"Roof of this machine: {made.roofline.text()}",
        *([f"Memory of a step, batch {args.batch}\n{memory.table()}\n{peak_line(made)}"] if memory else []),
        *([macs.table("layer")] if args.layers else []),
        *([memory.layer_table()] if args.layers and memory else []),
        ops_table(made.ops, args.top),
        *([f"wrote {args.trace}: open it at ui.perfetto.dev"] if args.trace else []),
    ]
    return "\n\n".join(parts)


def step_line(made: Any, args: argparse.Namespace) -> str:
    """What was measured, and how long it takes."""
    timing = made.timing
    idle = f", {made.idle * 1e3:,.1f} of them without a kernel" if args.device.startswith("cuda") else ""
    return (
        f"A {'training' if args.train else 'forward'} step, batch {args.batch}, {args.dtype}: median "
        f"{timing.median * 1e3:,.1f} ms, IQR {timing.iqr * 1e3:,.1f} ms; under the profiler "
        f"{made.profiled * 1e3:,.1f} ms{idle}"
    )


def peak_line(made: Any) -> str:
    """The measured peak beside the predicted one."""
    ratio = made.memory.peak / made.peak
    return f"{'measured':12s}{made.peak / 1e6:12,.1f} MB  (peak predicted / measured: {ratio:.2f})"


def to_json(result: dict[str, Any]) -> dict[str, Any]:
    """The report for programs."""
    from dataclasses import asdict

    from swin_lessons.profiling.trace import by_kind
    from swin_lessons.results import provenance

    made = result["profile"]
    ops = made.ops
    return {
        "provenance": provenance(),
        "macs": result["macs"].to_dict(),
        **made.to_dict(),
        "memory_bytes": asdict(made.memory) if made.memory else None,
        "seconds_by_kind": by_kind(ops),
        "ops": [asdict(op) | {"kind": op.kind} for op in ops],
    }
