"""Random numbers that a run can repeat from any step on.

The state of a generator is never stored. Before each step the generators are seeded with a number computed
from (seed, step). A run that restarts at step 1,000 draws what the first run drew there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """One 63-bit seed from whole numbers, by the mixing function of splitmix64 (Steele et al., 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, on every device."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Give the caller's generators back as they were, on the CPU and the current CUDA device."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
