"""Learning rate as a function of the step alone, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from swin_lessons.training.config import TrainConfig


def warmup_steps(config: TrainConfig, total: int) -> int:
    """Steps of the linear warm-up: a part of the run where `warmup` is below 1, else a number of steps."""
    return min(int(config.warmup * total) if config.warmup < 1 else int(config.warmup), total - 1)


def check_warmup(config: TrainConfig, total: int) -> None:
    """Raises ValueError where the warm-up, given in steps, takes the whole run."""
    if config.warmup >= 1 and total <= config.warmup:
        raise ValueError(
            f"TrainConfig.warmup is {config.warmup:g} steps, but the run has {total}: use fewer, or a part of the "
            "run (below 1)"
        )


def lr_at(step: int, total: int, config: TrainConfig) -> float:
    """Rate of step `step` (from 0) of `total`: linear warm-up to `lr`, then half a cosine to `min_lr`.

    Source: Loshchilov and Hutter, SGDR, eq. 5, one cycle; warm-up as in the Swin paper, appendix A2.1.
    """
    warm = warmup_steps(config, total)
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / (total - warm)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
