"""AdamW with the usual groups: no decay for vectors, smaller rates for lower layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from swin_lessons.training.config import TrainConfig


def param_groups(
    model: nn.Module, weight_decay: float = 0.05, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for an optimiser: `params`, their `names`, `weight_decay` and `lr_scale`.

    Biases, other one-dimensional parameters and `model.no_weight_decay()` are not decayed. With `layer_decay`
    below 1 a parameter's rate is scaled by layer_decay ** (layers above it), from `model.layer_id(name)`,
    which runs from 0 (stem) to `model.num_layers + 1` (head). Frozen parameters are left out.

    Raises:
        ValueError: layer decay is asked of a model that does not number its layers.
    """
    skip: set[str] = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        decay = 0.0 if param.ndim <= 1 or name in skip else weight_decay
        scale = _layer_scale(model, name, layer_decay)
        group = groups.setdefault(
            (scale, decay), {"params": [], "names": [], "weight_decay": decay, "lr_scale": scale}
        )
        group["params"].append(param)
        group["names"].append(name)
    if not groups:
        raise ValueError("the model has no trainable parameter: set requires_grad on those to train")
    return list(groups.values())


def _layer_scale(model: nn.Module, name: str, layer_decay: float) -> float:
    if layer_decay == 1:
        return 1.0
    if not hasattr(model, "layer_id"):
        raise ValueError(
            f"layer_decay is {layer_decay}, but {type(model).__name__} does not number its layers "
            "(layer_id): use layer_decay=1"
        )
    head: int = model.num_layers + 1  # type: ignore[assignment, operator]
    return layer_decay ** (head - model.layer_id(name))  # type: ignore[operator]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over `param_groups`: PyTorch's, fused where the device has that, or this package's kernel.

    Raises:
        ValueError: optimizer="triton" for parameters that FSDP shards.
    """
    groups = param_groups(model, config.weight_decay, config.layer_decay)
    if config.optimizer == "triton":
        if any(isinstance(p, DTensor) for group in groups for p in group["params"]):
            raise ValueError(
                "optimizer 'triton' does not take sharded parameters: use 'adamw' with fsdp, or ddp"
            )
        from swin_lessons.kernels import FusedAdamW

        return FusedAdamW(groups, lr=config.lr, betas=config.betas, impl="triton")
    device = groups[0]["params"][0].device.type
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=device in ("cpu", "cuda"))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
