"""Observers: they watch numbers go by and say which range the integers should cover.

An observer sees rows `(R, n)`: one row where a whole tensor shares a scale, else a row a channel or group. Memory does
not grow with what it has seen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .grid import Grid, centred, scale_and_zero_point

BINS = 4096  # of a histogram: half of them below zero
ROW_BINS = 1024  # of each, where many rows have one: a channel has few numbers
COARSE, FINE = (
    16,
    128,
)  # "mse" and "entropy" try these parts of the whole range, then those around the best of them
CHUNK = 1 << 24  # numbers that a search works on at once


def check_finite(x: Tensor, name: str) -> None:
    """Raise ValueError that names the layer where a tensor holds NaN or infinity."""
    if not torch.isfinite(x).all():
        bad = "NaN" if torch.isnan(x).any() else "infinity"
        raise ValueError(
            f"{name} saw {bad} in calibration: look for it in the batches and in the layers before"
        )


class KeepsFloat32(nn.Module):
    """A module whose own fp32 numbers stay fp32 when the model becomes another dtype: scales are no weights."""

    def _apply(self, fn, recurse=True):
        own = {**self._parameters, **self._buffers}
        kept = {n: t.detach() for n, t in own.items() if t is not None and t.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = getattr(self, name)
            if now.dtype != torch.float32:
                now.data = before.to(now.device)
        return self


class Observer(KeepsFloat32):
    """Smallest and largest number of each of `rows` rows.

    Attributes:
        low, high: fp32 `(rows,)`, exact over all that was seen.
        batches: tensors seen.
    """

    low: Tensor
    high: Tensor

    def __init__(self, rows: int = 1, *, name: str = "this observer") -> None:
        super().__init__()
        self.name, self.batches = name, 0
        self.register_buffer("low", torch.full((rows,), torch.inf))
        self.register_buffer("high", torch.full((rows,), -torch.inf))

    @torch.no_grad()
    def forward(self, x: Tensor) -> None:
        """Look at `(rows, n)`; no number is no news.

        Raises:
            ValueError: NaN or infinity among the numbers; the message has the layer's name.
        """
        if not x.numel():
            return
        x = x.detach().float()
        check_finite(x, self.name)
        self.add(x)
        self.batches += 1

    def add(self, x: Tensor) -> None:
        """Take in finite fp32 `(rows, n)`."""
        self.low.copy_(torch.minimum(self.low, x.amin(1)))
        self.high.copy_(torch.maximum(self.high, x.amax(1)))

    def limits(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The range for this grid, `(rows,)` each.

        Raises:
            RuntimeError: nothing was seen.
        """
        self._refuse_unseen()
        return self.low, self.high

    def reset(self) -> None:
        """Forget everything."""
        self.low.fill_(torch.inf)
        self.high.fill_(-torch.inf)

    def _refuse_unseen(self) -> None:
        if not self.seen:
            raise RuntimeError(f"{self.name} is not calibrated: it saw no batch")

    @property
    def seen(self) -> bool:
        """Has it seen anything, or been loaded with what another one saw?"""
        return bool((self.low <= self.high).all())


class MovingAverageObserver(Observer):
    """Average of each batch's minimum and maximum, the newest with weight `momentum`; for training."""

    def __init__(self, rows: int = 1, *, momentum: float = 0.01, name: str = "this observer") -> None:
        super().__init__(rows, name=name)
        self.momentum = momentum

    def add(self, x: Tensor) -> None:
        if not self.seen:
            return super().add(x)
        self.low.lerp_(x.amin(1), self.momentum)
        self.high.lerp_(x.amax(1), self.momentum)


class HistogramObserver(Observer):
    """Counts in bins of equal width around zero. Too small a histogram doubles its width: pairs of bins are added.

    So no count is ever lost or split, and zero stays an edge.

    Attributes:
        counts: int64 `(rows, bins)`; bin `i` holds `[(i − bins/2) · width, (i + 1 − bins/2) · width)`.
        width: fp32 `(rows,)`; 0 as long as only zeros were seen.
    """

    counts: Tensor
    width: Tensor

    def __init__(self, rows: int = 1, *, name: str = "this observer") -> None:
        super().__init__(rows, name=name)
        self.bins = BINS if rows == 1 else ROW_BINS
        self.register_buffer("counts", torch.zeros(rows, self.bins, dtype=torch.int64), persistent=False)
        self.register_buffer("width", torch.zeros(rows), persistent=False)

    def reset(self) -> None:
        super().reset()
        self.counts.zero_()
        self.width.zero_()

    def add(self, x: Tensor) -> None:
        super().add(x)
        self._widen(x.abs().amax(1))
        width = torch.where(self.width > 0, self.width, 1.0)[:, None]
        bins = (x / width).floor_().add_(self.bins // 2).clamp_(0, self.bins - 1).long()
        bins += self.bins * torch.arange(len(x), device=x.device)[:, None]
        self.counts += torch.bincount(bins.flatten(), minlength=self.counts.numel()).view_as(self.counts)

    def _widen(self, reach: Tensor) -> None:
        first = torch.finfo(torch.float32).tiny * 2
        fresh = (self.width == 0) & (reach > 0)
        self.width.copy_(torch.where(fresh, (reach / (self.bins // 2)).clamp(min=first), self.width))
        while (small := (self.width > 0) & (reach > self.width * (self.bins // 2))).any():
            pairs = self.counts.unflatten(1, (-1, 2)).sum(2)
            wider = nn.functional.pad(pairs, (self.bins // 4, self.bins // 4))
            self.counts.copy_(torch.where(small[:, None], wider, self.counts))
            self.width.copy_(torch.where(small, self.width * 2, self.width))

    def centres(self) -> Tensor:
        """Middles of the bins, `(rows, bins)`; the outermost ones moved to what was really seen."""
        middle = torch.arange(self.bins, device=self.width.device) - (self.bins - 1) / 2
        x = middle * self.width[:, None]
        return torch.maximum(torch.minimum(x, self.high[:, None]), self.low[:, None])


class PercentileObserver(HistogramObserver):
    """The range that keeps `percentile` % of the numbers.

    Symmetric grids count distances from zero, others cut the same share at both ends. Within a bin, numbers count as
    spread evenly.
    """

    def __init__(self, rows: int = 1, *, percentile: float = 99.99, name: str = "this observer") -> None:
        super().__init__(rows, name=name)
        self.percentile = percentile

    def limits(self, grid: Grid) -> tuple[Tensor, Tensor]:
        self._refuse_unseen()
        kept, half = self.percentile / 100, self.bins // 2
        negative, positive = self.counts[:, :half].flip(1), self.counts[:, half:]
        if grid.symmetric:
            reach = _quantile(negative + positive, kept) * self.width
            low, high = -reach, reach
        else:
            cut = self.counts.sum(1).double() * (1 - kept) / 2
            low = -self.width * _at_count(negative, negative.sum(1) - cut)
            high = self.width * _at_count(positive, positive.sum(1) - cut)
        return torch.maximum(low, self.low), torch.minimum(high, self.high)


def _quantile(counts: Tensor, share: float) -> Tensor:
    return _at_count(counts, counts.sum(1).double() * share)


def _at_count(counts: Tensor, wanted: Tensor) -> Tensor:
    """How many bins hold the first `wanted` numbers of each row, with a fraction of the last bin; 0 for none."""
    total = counts.double().cumsum(1)
    wanted = wanted.double().clamp(min=0)
    bin = torch.searchsorted(total, wanted[:, None]).clamp(max=counts.shape[1] - 1)
    inside = counts.gather(1, bin).double().clamp(min=1)
    before = total.gather(1, bin) - counts.gather(1, bin)
    return (bin + (wanted[:, None] - before) / inside).squeeze(1).float()


class SearchObserver(HistogramObserver):
    """The best of ranges between a few percent of what was seen and all of it, judged on the histogram."""

    def limits(self, grid: Grid) -> tuple[Tensor, Tensor]:
        self._refuse_unseen()
        rows = max(1, CHUNK // (self.bins * 4))
        parts = [self._search(slice(i, i + rows), grid) for i in range(0, len(self.low), rows)]
        low, high = (torch.cat(side) for side in zip(*parts, strict=True))
        return low, high

    def _search(self, part: slice, grid: Grid) -> tuple[Tensor, Tensor]:
        x, counts = self.centres()[part], self.counts[part].double()
        whole_low, whole_high = self.low[part].clamp(max=0), self.high[part].clamp(min=0)
        reach = torch.maximum(-whole_low, whole_high)

        def cut(part: Tensor) -> tuple[Tensor, Tensor]:
            return torch.maximum(whole_low, -reach * part), torch.minimum(whole_high, reach * part)

        def better(best: Tensor, least: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
            cost = self.cost(x, counts, *cut(part), grid)
            return torch.where(cost < least, part, best), torch.minimum(least, cost)

        best = torch.ones_like(reach)
        least = self.cost(x, counts, *cut(best), grid)
        for step in range(COARSE - 1, 0, -1):  # a tie goes to the wider range
            best, least = better(best, least, torch.full_like(best, step / COARSE))
        coarse, few = best, FINE // COARSE
        for step in (*range(1, few), *range(-1, -few, -1)):
            best, least = better(best, least, (coarse + step / FINE).clamp(max=1))
        return cut(best)

    def cost(self, x: Tensor, counts: Tensor, low: Tensor, high: Tensor, grid: Grid) -> Tensor:
        """What is lost by ranges `low`..`high` `(rows,)`, in rows `x` that occur `counts` times, `(rows, bins)`."""
        raise NotImplementedError


class MSEObserver(SearchObserver):
    """The range with the least squared error of quantisation."""

    def cost(self, x: Tensor, counts: Tensor, low: Tensor, high: Tensor, grid: Grid) -> Tensor:
        scale, zero_point = (t[:, None] for t in scale_and_zero_point(low, high, grid))
        error = centred(x, scale, zero_point, grid) * scale - x
        return (counts * error.double().square()).sum(1)


class EntropyObserver(SearchObserver):
    """The range with the least Kullback-Leibler divergence between the numbers and their quantised selves.

    As TensorRT's calibrator: the reference has what is cut off added to its outermost bins; in the quantised
    distribution each integer spreads its count evenly over the bins that it stands for and that are not empty.
    Made for activations: over the channels of a large model's weights it takes minutes. Where numbers crowd at one end
    of the range, as after a GELU, the crowd decides and it cuts too much: prefer "mse" or "percentile" there.
    """

    def cost(self, x: Tensor, counts: Tensor, low: Tensor, high: Tensor, grid: Grid) -> Tensor:
        scale, zero_point = (t[:, None] for t in scale_and_zero_point(low, high, grid))
        code = (centred(x, scale, zero_point, grid) + zero_point - grid.low).long()
        inside = (x >= low[:, None]) & (x <= high[:, None])
        within = counts * inside
        levels = grid.high - grid.low + 1

        def by_code(values: Tensor) -> Tensor:
            total = values.new_zeros(len(x), levels)
            return total.scatter_add_(1, code, values).gather(1, code)

        filled = ((within > 0).double()).clamp(max=1)
        spread = by_code(within) / by_code(filled).clamp(min=1) * filled
        reference = within + self._cut_off(counts, inside)
        p = reference / reference.sum(1, keepdim=True)
        q = (spread / spread.sum(1, keepdim=True).clamp(min=1)).clamp(min=1e-12)
        return (torch.where(p > 0, p * (p.clamp(min=1e-300) / q).log(), 0.0)).sum(1)

    def _cut_off(self, counts: Tensor, inside: Tensor) -> Tensor:
        """What lies outside, put into the outermost bins inside."""
        index = torch.arange(counts.shape[1], device=counts.device).expand_as(counts)
        first = torch.where(inside, index, self.bins - 1).amin(1, keepdim=True)
        last = torch.where(inside, index, 0).amax(1, keepdim=True)
        below = (counts * (index < first)).sum(1, keepdim=True)
        above = (counts * (index > last)).sum(1, keepdim=True)
        return torch.zeros_like(counts).scatter_add_(1, first, below).scatter_add_(1, last, above)


def make_observer(
    kind: str,
    rows: int = 1,
    *,
    percentile: float = 99.99,
    momentum: float = 0.01,
    name: str = "this observer",
) -> Observer:
    """An observer by the word that `QuantConfig` has for it.

    Raises:
        ValueError: an unknown word.
    """
    if kind == "moving":
        return MovingAverageObserver(rows, momentum=momentum, name=name)
    if kind == "percentile":
        return PercentileObserver(rows, percentile=percentile, name=name)
    plain = {"minmax": Observer, "mse": MSEObserver, "entropy": EntropyObserver}
    if kind not in plain:
        raise ValueError(f"there is no observer {kind!r}: choose minmax, moving, percentile, entropy or mse")
    return plain[kind](rows, name=name)
