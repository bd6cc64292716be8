"""Initialisation for narrow models."""

from __future__ import annotations

from torch import nn


def init_xavier(model: nn.Module) -> nn.Module:
    """Redraw every linear weight by Glorot's uniform rule, in place; biases and norms stay.

    Swin draws weights with a standard deviation of 0.02. That suits 96 channels and more. A matrix with 48
    inputs then shrinks its input sevenfold, and the first epoch is spent on growing it. Glorot's bound
    sqrt(6 / (fan_in + fan_out)) keeps the scale at any width.

    Source: Glorot and Bengio, AISTATS 2010, eq. 16.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model
