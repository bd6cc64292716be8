"""Fake quantisers: they round numbers to a grid and give them back as floats, with a gradient to train through."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.models.fast import autocast_on

from .exact import exact_product
from .grid import Grid, centred, coded, scale_and_zero_point
from .observers import KeepsFloat32, Observer

WHEN = ("never", "training", "always")


def wide(x: Tensor) -> Tensor:
    """Half precisions become fp32; fp32 and fp64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Place(NamedTuple):
    """Where a quantiser stands: a layer's name, one of `KINDS`, and "input", "weight", "output", "query" and so on."""

    layer: str = ""
    kind: str = ""
    role: str = "input"


class Quantizer(nn.Module):
    """Rounds to a grid. `FakeQuantize` knows its scale beforehand, `DynamicQuantize` finds it as numbers come.

    Attributes:
        grid: the integers.
        layer, kind, role: its `Place`.
        quantizing: on or off; off, numbers pass unchanged.
    """

    def __init__(self, grid: Grid, place: Place = Place()) -> None:  # noqa: B008  (it cannot change)
        super().__init__()
        self.grid = grid
        self.layer, self.kind, self.role = place
        self.quantizing = True

    @property
    def name(self) -> str:
        """`layers.0.blocks.1.mlp.fc1.input`: what errors call it."""
        return f"{self.layer or 'this layer'}.{self.role}"

    def forward(self, x: Tensor) -> Tensor:
        """Any shape and float dtype -> the same, on the grid. Arithmetic is in fp32 at least."""
        x = self.watch(x)
        if not self.quantizing:
            return x
        whole, scale = self.integers(x)
        return (whole * scale).to(x.dtype)

    def watch(self, x: Tensor) -> Tensor:
        """Show `x` to the observer where one is on; returns `x`."""
        return x

    def integers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`code − zero point` as whole floats of the shape of `x`, and the scale that broadcasts against them."""
        scale, zero_point = self.grid_of(x)
        return centred(wide(x), scale, zero_point, self.grid), scale

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """int8 codes of the shape of `x`, the scale, and the zero point (None for 0)."""
        scale, zero_point = self.grid_of(x)
        return coded(wide(x), scale, zero_point, self.grid).to(torch.int8), scale, zero_point

    def grid_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point for `x`, such that they broadcast; None for the zero point 0."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.grid.bits} bits, {'symmetric' if self.grid.symmetric else 'affine'}" + (
            "" if self.quantizing else ", off"
        )


class DynamicQuantize(Quantizer):
    """Scales from the numbers themselves, as they come: one a token (the last axis), or one for the whole tensor."""

    def __init__(self, grid: Grid, per: str = "token", place: Place = Place()) -> None:  # noqa: B008
        super().__init__(grid, place)
        self.per = per

    def grid_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x.detach() if x.numel() else x.new_zeros(1, 1)
        rows = x if self.per == "token" and x.ndim else x.reshape(1, -1)
        scale, zero_point = scale_and_zero_point(
            rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True), self.grid
        )
        if self.per != "token":
            scale, zero_point = scale.reshape(()), zero_point.reshape(())
        return scale, None if self.grid.symmetric else zero_point


class FakeQuantize(KeepsFloat32, Quantizer):
    """Rounds to a grid whose scale is kept: found by an observer, loaded from a file, or trained (LSQ).

    Args:
        grid: the integers.
        shape: of a weight `(O, ...)`; leave it out for activations, which share one scale.
        granularity: "tensor", "channel" (the first axis) or "group" (of `group_size` along the flattened other axes).
        observer: what finds the range; None for a range set by `set_range`.
        place: where it stands.

    Attributes:
        scale: fp32, `()`, `(O,)` or `(O, groups)`; NaN until it is calibrated. A buffer, or a parameter once learnable.
        zero_point: int32, as the scale.
        observes: "never", "training" (in training mode alone) or "always".
        deferred: the observer looks, but the scale is worked out by `update` at the end.
    """

    scale: Tensor
    zero_point: Tensor
    observer: Observer | None

    def __init__(
        self,
        grid: Grid,
        shape: tuple[int, ...] = (),
        granularity: str = "tensor",
        group_size: int = 32,
        observer: Observer | None = None,
        place: Place = Place(),  # noqa: B008
    ) -> None:
        super().__init__(grid, place)
        self.granularity, self.group_size, self.shape = granularity, group_size, tuple(shape)
        size = scale_shape(self.shape, granularity, group_size)
        self.register_buffer("scale", torch.full(size, torch.nan))
        self.register_buffer("zero_point", torch.zeros(size, dtype=torch.int32))
        self.observer = observer
        self.observes, self.deferred = "never", False
        self._checked: tuple = ()

    # --- scale and zero point ---

    @torch.no_grad()
    def set_range(self, low: Tensor | float, high: Tensor | float) -> None:
        """Cover `low`..`high`; tensors have one number a scale."""
        low, high = (torch.as_tensor(t, dtype=torch.float32, device=self.scale.device) for t in (low, high))
        scale, zero_point = scale_and_zero_point(low, high, self.grid)
        self.scale.copy_(scale.expand(self.scale.numel()).view_as(self.scale))
        self.zero_point.copy_(zero_point.expand(self.scale.numel()).view_as(self.scale))

    def update(self) -> None:
        """Cover the range that the observer has found.

        Raises:
            RuntimeError: it has seen nothing.
        """
        if self.observer is not None:
            self.set_range(*self.observer.limits(self.grid))

    def learn_scale(self) -> None:
        """Make the scale a parameter, to be trained by gradient: LSQ (arXiv:1902.08153)."""
        if "scale" in self._buffers:
            start = self.scale.detach().clone()
            del self.scale
            self.scale = nn.Parameter(start)

    def fix_scale(self) -> None:
        """Make a trained scale a plain number again."""
        if "scale" in self._parameters:
            found = self.scale.detach().clone()
            del self.scale
            self.register_buffer("scale", found)

    def watch(self, x: Tensor) -> Tensor:
        due = self.observes == "always" or (self.observes == "training" and self.training)
        if due and self.observer is not None:
            if self.role == "weight":  # it changes as a whole: what it was does not matter
                self.observer.reset()
            self.observer(self.rows(x))
            if not self.deferred and self.observer.seen:
                self.update()
        return x

    def rows(self, x: Tensor) -> Tensor:
        """`x` as `(R, n)`: the numbers that share a scale in a row. The last group is filled up with zeros."""
        if self.granularity == "tensor":
            return x.reshape(1, -1)
        x = x.reshape(len(x), -1)
        if self.granularity == "channel":
            return x
        return F.pad(x, (0, -x.shape[1] % self.group_size)).reshape(-1, self.group_size)

    def grid_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check()
        scale: Tensor = self.scale
        if torch.is_grad_enabled() and scale.requires_grad:
            scale = ScaleGradient.apply(scale, self._gradient_factor(x))
        return self._spread(scale, x), None if self.grid.symmetric else self._spread(self.zero_point, x)

    def _spread(self, numbers: Tensor, x: Tensor) -> Tensor:
        if self.granularity == "tensor":
            return numbers
        if self.granularity == "channel":
            return numbers.view(-1, *[1] * (x.ndim - 1))
        spread = numbers.repeat_interleave(self.group_size, 1)[:, : x[0].numel()]
        return spread.reshape(x.shape)

    def _gradient_factor(self, x: Tensor) -> float:
        """LSQ's g = 1 / √(n · qmax). n: how many numbers share a weight's scale; of activations, those of one image."""
        sharing = x.numel() / self.scale.numel() if self.role == "weight" else x.numel() / max(len(x), 1)
        return 1 / math.sqrt(max(sharing, 1) * self.grid.high)

    # --- refusals ---

    def check(self) -> None:
        """Raise where nothing was calibrated, or a scale is no positive number. A scale is looked at once a change."""
        scale = self.scale
        if torch.compiler.is_compiling() or scale.is_meta:
            return
        stamp = () if scale.is_inference() else (scale.data_ptr(), scale._version)
        if stamp and stamp == self._checked:
            return
        self.check_scale()
        self._checked = stamp

    def check_scale(self) -> None:
        """The test behind `check`.

        Raises:
            RuntimeError: it was never calibrated.
            ValueError: a scale is zero, negative, infinite or NaN.
        """
        if torch.isnan(self.scale).all():
            raise RuntimeError(
                f"{self.name} is not calibrated: use ptq, or load a quantised checkpoint, not a float one"
            )
        good = torch.isfinite(self.scale) & (self.scale > 0)
        if not good.all():
            bad = self.scale[~good].flatten()[0].item()
            raise ValueError(
                f"{self.name} has a scale of {bad:g}: scales are finite and positive; calibrate it again, or train "
                "with a smaller learning rate"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_checked": ()}  # an address means nothing in a copy


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, scale: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return scale.view_as(scale)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_shape(shape: tuple[int, ...], granularity: str, group_size: int) -> tuple[int, ...]:
    """Shape of the scales of a weight `(O, ...)`."""
    if granularity == "tensor":
        return ()
    if granularity == "channel":
        return (shape[0],)
    return (shape[0], -(-math.prod(shape[1:]) // group_size))


Q = TypeVar("Q", bound=Quantizer)


def quantized(quantizer: Quantizer | None, x: Tensor) -> Tensor:
    """`x` through a quantiser, or unchanged where there is none."""
    return x if quantizer is None else quantizer(x)


def quantized_product(a: Tensor, qa: Quantizer | None, b: Tensor, qb: Quantizer | None) -> Tensor:
    """`a @ b`, each quantised: where both have one fixed scale, an exact sum of integers, then scaled once."""
    if is_fixed(qa) and is_fixed(qb) and not autocast_on(a.device):
        (x, sx), (y, sy) = qa.integers(qa.watch(a)), qb.integers(qb.watch(b))
        return (exact_product(x, y, qa.grid.reach * qb.grid.reach) * (sx * sy)).to(a.dtype)
    return quantized(qa, a) @ quantized(qb, b)


def is_on(quantizer: Q | None) -> TypeGuard[Q]:
    """Is there a quantiser, and does it quantise?"""
    return quantizer is not None and quantizer.quantizing


def is_fixed(quantizer: Quantizer | None) -> TypeGuard[Quantizer]:
    """Does it quantise with a scale that is known beforehand?"""
    return is_on(quantizer) and isinstance(quantizer, FakeQuantize)


def quantizers(model: nn.Module) -> Iterator[Quantizer]:
    """All quantisers of a model, in order."""
    return (m for m in model.modules() if isinstance(m, Quantizer))


def switch(model: nn.Module, *, observe: str | None = None, quantize: bool | None = None) -> None:
    """Turn all observers and quantisers of a model on or off; None leaves them.

    Args:
        observe: "never" (frozen), "training" or "always". Scales follow what is observed at once, also where `quantize`
            is off. Scales that are learned, or whose quantiser has no observer, stay.
        quantize: round numbers, or let them pass.

    Raises:
        ValueError: another word.
    """
    if observe not in (None, *WHEN):
        raise ValueError(f"observe={observe!r}: choose one of {', '.join(WHEN)}")
    for quantizer in quantizers(model):
        if quantize is not None:
            quantizer.quantizing = quantize
        if observe is not None and isinstance(quantizer, FakeQuantize):
            quantizer.observes = observe
