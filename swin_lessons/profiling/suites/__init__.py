"""Benchmark suites: one module each, with `run(options, show) -> dict` for JSON and `summary(dict) -> str`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["SUITES", "BenchOptions", "Show", "find_suite"]

SUITES = {
    "cpu": "Swin-T, SwinV2-T and the lesson-size models against their peers, inference and training",
    "train_ladder": "training made faster rung by rung, against torch.compile; small without a GPU",
    "kernels": "every fused kernel against its maths, then against PyTorch; not timed without a GPU",
    "gpu": "kernels, then train_ladder: what to run once on a GPU",
}


@dataclass(frozen=True)
class BenchOptions:
    """What a suite measures. Empty tuples mean the suite's own choice."""

    against: tuple[str, ...] = ("timm", "torchvision", "transformers")
    models: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    modes: tuple[str, ...] = ("infer", "train")
    dtypes: tuple[str, ...] = ()
    rounds: int = 7
    micro_batch: int = 4
    quick: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        _check_subset("against", self.against, ("timm", "torchvision", "transformers"))
        _check_subset("mode", self.modes, ("infer", "train"))
        _check_subset("dtype", self.dtypes, ("fp32", "fp16", "bf16"))
        for name, values in (("batch", self.batches), ("micro-batch", (self.micro_batch,))):
            if any(value < 1 for value in values):
                raise ValueError(f"{name}={values}: give sizes of at least 1")
        if self.rounds < 7:
            raise ValueError(f"rounds={self.rounds} is too few for a median: use at least 7")


class Show(Protocol):
    """How a suite tells what it does: on a terminal, a progress bar; elsewhere, nothing or lines."""

    def section(self, title: str, samples: int) -> AbstractContextManager[Callable[[str], Any]]:
        """A case with so many samples; the context gives a function to call after each."""

    def text(self, text: str) -> None:
        """A finished table."""

    def keep(self, result: dict[str, Any]) -> None:
        """What is finished of a long run, so that an interruption does not lose it."""


def find_suite(name: str) -> Any:
    """The suite's module.

    Raises:
        ValueError: unknown name.
    """
    name = name.replace("-", "_")
    if name not in SUITES:
        raise ValueError(f"suite={name!r} is unknown: use {', '.join(SUITES)}")
    return importlib.import_module(f"{__name__}.{name}")


def check_kernels_run() -> None:
    """Raise ValueError where Triton's kernels cannot run: neither on a GPU nor in the interpreter."""
    import torch

    from swin_lessons.kernels.launch import HAS_TRITON, interpreting

    if not (HAS_TRITON and torch.cuda.is_available()) and not interpreting():
        raise ValueError(
            "the fused kernels need triton and a GPU, or TRITON_INTERPRET=1 set before Python starts"
        )


def _check_subset(option: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    wrong = [value for value in values if value not in allowed]
    if wrong:
        raise ValueError(f"{option}={','.join(wrong)} is unknown: use {', '.join(allowed)}")
