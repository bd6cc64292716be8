"""A kernel beside its maths: the same call in fp64 by PyTorch, and in a dtype by Triton; values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# of the largest reference value: rounding of the result, and of what lies between
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers that `dtype` can hold exactly, as a leaf that asks for its gradient."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    numbers = scale * torch.randn(*shape, generator=generator)
    return numbers.to(dtype).to(DEVICE).requires_grad_()


def check(
    op: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """`op(*inputs, impl="triton")` equals `reference(*inputs)`, by default `op` with impl="torch" in fp64.

    Outputs and the gradients of all inputs are compared, relative to the largest number of the reference.
    """
    reference = reference or (lambda *args: op(*args, impl="torch", **options))
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    expected, wanted = run(reference, exact)
    found, gradients = run(lambda *args: op(*args, impl="triton", **options), inputs)
    limit = tolerance or TOLERANCE[inputs[0].dtype]
    assert len(found) == len(expected)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        close(ours, theirs, limit, f"output {i}")
    for i, (ours, theirs) in enumerate(zip(gradients, wanted, strict=True)):
        close(ours, theirs, 2 * limit, f"gradient of input {i}")
    for x, gradient in zip((x for x in inputs if x.requires_grad), gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)


def run(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of a weighted sum of them all."""
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    score = sum((y.double() * _weights(y)).sum() for y in outputs)
    leaves = [x for x in inputs if x.requires_grad]
    return outputs, list(torch.autograd.grad(score, leaves)) if leaves else []


def _weights(y: Tensor) -> Tensor:
    """Eighths, which every dtype holds: so the gradient that enters is the same in all of them."""
    eighths = torch.randint(-8, 9, y.shape, generator=torch.Generator().manual_seed(y.numel()))
    return (eighths / 8).double().to(y.device)


def close(ours: Tensor, theirs: Tensor, limit: float, what: str) -> None:
    """Finite, of the same shape, and off by at most `limit` of the largest number of the reference."""
    assert ours.shape == theirs.shape, what
    assert ours.isfinite().all(), f"{what} holds numbers that are not finite"
    error = (ours.double() - theirs).abs().max() if theirs.numel() else torch.tensor(0.0)
    scale = theirs.abs().max().clamp(min=1e-3) if theirs.numel() else torch.tensor(1.0)
    assert error <= limit * scale, (
        f"{what}: off by {error / scale:.2e} of the largest, {limit:.0e} is allowed"
    )
