"""Benchmark suites: one module each, with `run(options, show) -> dict` for JSON."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["SUITES", "BenchOptions", "Show", "find_suite"]

SUITES = {"cpu": "Swin-T, SwinV2-T and the lesson-size models against their peers, inference and training"}


@dataclass(frozen=True)
class BenchOptions:
    """What a suite measures. Empty tuples mean the suite's own choice."""

    against: tuple[str, ...] = ("timm", "torchvision", "transformers")
    models: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    modes: tuple[str, ...] = ("infer", "train")
    dtypes: tuple[str, ...] = ("fp32",)
    rounds: int = 7
    micro_batch: int = 4
    quick: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        _check_subset("against", self.against, ("timm", "torchvision", "transformers"))
        _check_subset("mode", self.modes, ("infer", "train"))
        _check_subset("dtype", self.dtypes, ("fp32", "bf16"))
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


def find_suite(name: str) -> Any:
    """The suite's module.

    Raises:
        ValueError: unknown name.
    """
    if name not in SUITES:
        raise ValueError(f"suite={name!r} is unknown: use {', '.join(SUITES)}")
    return importlib.import_module(f"{__name__}.{name}")


def _check_subset(option: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    wrong = [value for value in values if value not in allowed]
    if wrong:
        raise ValueError(f"{option}={','.join(wrong)} is unknown: use {', '.join(allowed)}")
