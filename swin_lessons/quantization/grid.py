"""The integers that stand for real numbers, and the one formula for their scale and zero point.

`x ≈ scale · (code − zero_point)` with `code = clamp(round(x / scale) + zero_point)`, halves to the even neighbour: what
ONNX's QuantizeLinear computes. Codes are signed; add 128 to a code and to its zero point for uint8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Signed integers of some bits.

    Attributes:
        bits: 8 or 4.
        symmetric: zero point 0, and as much room below zero as above.
        narrow: leave out the lowest integer, so that every code has its negative: -127..127.
    """

    bits: int = 8
    symmetric: bool = True
    narrow: bool = False

    @property
    def low(self) -> int:
        """Lowest code: -128, or -127 where narrow; of 4 bits -8 or -7."""
        return -(1 << (self.bits - 1)) + self.narrow

    @property
    def high(self) -> int:
        """Highest code: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    @property
    def reach(self) -> int:
        """Largest distance of a code from its zero point."""
        return -self.low if self.symmetric else self.high - self.low


def scale_and_zero_point(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale (fp32, above 0) and zero point (int32) that fit the ranges `low`..`high`, of any shape, onto the grid.

    The only such formula of the package. The range is widened to hold 0, which has a code of its own then. Symmetric:
    `scale = max(−low, high) / grid.high`. Affine: `scale = (high − low) / (grid.high − grid.low)`. A range of nothing
    but 0 has scale 1. NaN stays NaN, so that whoever checks sees it.
    """
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    if grid.symmetric:
        scale = torch.maximum(-low, high) / grid.high
    else:
        scale = (high / 2 - low / 2) / ((grid.high - grid.low) / 2)  # halves: the difference may overflow
    scale = torch.where(torch.maximum(-low, high) == 0, 1.0, scale.clamp(min=torch.finfo(torch.float32).tiny))
    if grid.symmetric:
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    zero_point = (grid.low - (low / scale).round()).clamp(grid.low, grid.high)
    return scale, zero_point.nan_to_num().int()


def coded(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid) -> Tensor:
    """The code of each number, as whole numbers in the dtype of `x` (fp32 or fp64).

    The gradient goes straight through the rounding where a code is on the grid, and stops where it was clamped.
    `scale` and `zero_point` broadcast against `x`; None for the zero point 0.
    """
    steps = x / scale
    offset = 0 if zero_point is None else zero_point
    whole = steps.detach().round()  # halves to even
    code = whole + offset
    if not (torch.is_grad_enabled() and steps.requires_grad):
        return code.clamp_(grid.low, grid.high)
    # `where`, not `clamp`: PyTorch's versions differ in the gradient of a clamp at its bounds
    inside = (code >= grid.low) & (code <= grid.high)
    straight = steps + (whole - steps).detach()  # is `whole` exactly: close neighbours differ by a float
    return torch.where(inside, straight + offset, code.clamp_(grid.low, grid.high))


def centred(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid) -> Tensor:
    """`code − zero_point` of each number; otherwise as `coded`."""
    code = coded(x, scale, zero_point, grid)
    if zero_point is None:
        return code
    return code - zero_point if code.requires_grad else code.sub_(zero_point)
