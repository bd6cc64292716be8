"""What to run once on a GPU: every kernel checked and timed, then the training ladder."""

from __future__ import annotations

from typing import Any

from swin_lessons.profiling.suites import BenchOptions, Show, kernels, train_ladder

__all__ = ["run", "summary"]


def run(options: BenchOptions, show: Show) -> dict[str, Any]:
    """{"kernels": ..., "train_ladder": ...}: a kernel that is wrong ends the run before anything is timed."""
    train_ladder.plan(options)  # what the ladder refuses is refused before the kernels take their time
    result = {"kernels": kernels.run(options, show)}
    show.keep(result)
    return result | {"train_ladder": train_ladder.run(options, show)}


def summary(result: dict[str, Any]) -> str:
    """Both summaries."""
    return "\n".join([kernels.summary(result["kernels"]), train_ladder.summary(result["train_ladder"])])
