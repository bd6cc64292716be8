"""The matrix products of a model's linear layers, alone: the part of its time that no rewriting around them removes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["linear_products", "products_step"]

Product = tuple[Tensor, Tensor]  # rows (M, K) and weight (O, K)


@torch.no_grad()
def linear_products(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32) -> list[Product]:
    """Random rows and the weight for each call of an `nn.Linear` while the model runs on `x` `(B, C, H, W)`.

    Layers with equal shapes share their rows. Raises ValueError for a model without linear layers.
    """
    rows: dict[tuple[int, int], Tensor] = {}
    found: list[Product] = []

    def note(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = layer.weight.detach().to(dtype)
        shape = (inputs[0].numel() // weight.shape[1], weight.shape[1])
        if shape not in rows:
            rows[shape] = torch.randn(shape, device=x.device, dtype=dtype)
        found.append((rows[shape], weight))

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear: there are no products to time")
    handles = [m.register_forward_hook(note) for m in linears]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def products_step(products: list[Product], mode: str, times: int = 1) -> Callable[[], None]:
    """A function that multiplies all of them `times` times: forward, and in training both products backward."""

    @torch.no_grad()
    def step() -> None:
        for _ in range(times):
            for rows, weight in products:
                y = F.linear(rows, weight)
                if mode == "train":
                    F.linear(y, weight.t())  # the gradient of the rows
                    y.t() @ rows  # of the weight

    return step
