"""Which profile this machine runs the lessons in, and numbers chosen by it."""

from __future__ import annotations

import os
from typing import TypeVar

PROFILES = ("ci", "cpu", "gpu")
VARIABLE = "SWIN_LESSONS_PROFILE"
T = TypeVar("T")


def profile() -> str:
    """ "ci", "cpu" or "gpu": the variable SWIN_LESSONS_PROFILE, else found.

    A CUDA device means "gpu". The variable CI, which build services set, means "ci". All else is "cpu".

    Raises:
        ValueError: SWIN_LESSONS_PROFILE is none of the three.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if named not in PROFILES:
            raise ValueError(f"{VARIABLE} is {named!r}: set it to one of {', '.join(PROFILES)}, or unset it")
        return named
    import torch

    if torch.cuda.is_available():
        return "gpu"
    return "ci" if os.environ.get("CI", "").lower() in ("1", "true") else "cpu"


def by_profile(*, ci: T, cpu: T, gpu: T) -> T:
    """The value that belongs to this machine's profile: `epochs = by_profile(ci=1, cpu=8, gpu=30)`."""
    return {"ci": ci, "cpu": cpu, "gpu": gpu}[profile()]


def keep_freed_memory() -> bool:
    """Tell glibc to keep the memory that tensors give back, instead of returning it to the system each time.

    Otherwise every large activation is mapped anew, page by page, which costs Swin-T about 5 % of a training
    step on a CPU. It holds for this process until it ends. Returns whether the C library took it; only glibc does.
    """
    import ctypes

    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))
