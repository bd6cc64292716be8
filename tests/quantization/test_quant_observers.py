"""Observers: what range they find, and that they lose nothing on the way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_cases import numbers
from torch.nn import functional as F

from swin_lessons.quantization import Grid, HistogramObserver, make_observer
from swin_lessons.quantization.grid import centred, scale_and_zero_point
from swin_lessons.quantization.observers import BINS, ROW_BINS

SYMMETRIC, AFFINE = Grid(8), Grid(8, symmetric=False)
ALL = ("minmax", "moving", "percentile", "entropy", "mse")


def limits(kind: str, *batches: torch.Tensor, grid=AFFINE, **options) -> tuple[torch.Tensor, torch.Tensor]:
    observer = make_observer(kind, len(batches[0]), **options)
    for batch in batches:
        observer(batch)
    return observer.limits(grid)


def test_min_max_is_exact_over_all_batches():
    low, high = limits("minmax", torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]]))
    assert (low.item(), high.item()) == (-3.0, 2.0)


def test_moving_average():
    low, high = limits("moving", torch.tensor([[-1.0, 2.0]]), torch.tensor([[-3.0, 12.0]]), momentum=0.1)
    assert low.item() == pytest.approx(-1.2)
    assert high.item() == pytest.approx(3.0)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.floats(-30, 30)), min_size=1, max_size=6), st.integers(0, 99)
)
def test_a_histogram_that_widens_keeps_every_count_in_its_place(steps, seed):
    """Batches of any size and scale, in any order: as if all had come at once into the final bins."""
    observer, seen = HistogramObserver(2), []
    for i, (count, exponent) in enumerate(steps):
        batch = numbers(2, count, seed=seed + i) * 2.0**exponent
        observer(batch)
        seen.append(batch)
    everything = torch.cat(seen, 1)
    assert observer.counts.sum(1).tolist() == [everything.shape[1]] * 2
    for row in range(2 if everything.numel() else 0):
        width = observer.width[row].double()
        bins = (everything[row].double() / width).floor() + ROW_BINS // 2
        expected = torch.bincount(bins.clamp(0, ROW_BINS - 1).long(), minlength=ROW_BINS)
        # an edge may round differently from one width to its double: by one bin, and seldom
        assert (observer.counts[row].cumsum(0) - expected.cumsum(0)).abs().max() <= 1


def test_zeros_first_then_numbers():
    observer = HistogramObserver()
    observer(torch.zeros(1, 10))
    observer(torch.zeros(1, 0))
    observer(torch.tensor([[-4.0, 4.0]]))
    assert observer.counts[0, BINS // 2] == 10
    assert observer.counts.sum() == 12
    assert observer.batches == 2


@pytest.mark.parametrize("grid", [SYMMETRIC, AFFINE], ids=["symmetric", "affine"])
def test_percentile_is_numpy_s(grid):
    x = numbers(1, 50_000) * 3
    low, high = (t.item() for t in limits("percentile", *x.split(7_000, 1), grid=grid, percentile=99.0))
    if grid.symmetric:
        expected = (-np.percentile(x.abs(), 99), np.percentile(x.abs(), 99))
    else:
        expected = tuple(np.percentile(x, [0.5, 99.5]))
    assert (low, high) == pytest.approx(expected, abs=0.02)


def test_percentile_100_is_min_max():
    x = numbers(1, 1000)
    low, high = limits("percentile", x, percentile=100)
    assert (low.item(), high.item()) == (x.min().item(), x.max().item())


def test_one_outlier_does_not_widen_a_percentile():
    x = torch.cat([numbers(1, 100_000), torch.tensor([[500.0]])], 1)
    low, high = limits("percentile", x, percentile=99.9)
    assert -4 < low.item() < -3
    assert 3 < high.item() < 4
    assert limits("minmax", x)[1].item() == 500


def squared_error(x, low, high, grid):
    scale, zero = scale_and_zero_point(low, high, grid)
    return (centred(x, scale, zero, grid) * scale - x).double().square().sum()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_beats_min_max_and_a_search_on_the_numbers_themselves_hardly_beats_it(bits, symmetric):
    grid = Grid(bits, symmetric)
    x = torch.distributions.Laplace(0.0, 1.0).icdf(torch.linspace(1e-5, 1 - 1e-5, 20_001))[None]
    low, high = limits("mse", x, grid=grid)
    error = squared_error(x, low, high, grid)
    whole = x.abs().max()
    grid_search = min(squared_error(x, -whole * a, whole * a, grid) for a in torch.linspace(0.05, 1, 200))
    assert error <= 1.02 * grid_search
    assert error < squared_error(x, x.min(), x.max(), grid)


def test_entropy_cuts_a_long_tail_and_keeps_a_flat_distribution():
    tail = torch.cat([numbers(1, 50_000), numbers(1, 20) * 30], 1)
    assert 3 < limits("entropy", tail, grid=SYMMETRIC)[1].item() < 20
    assert limits("minmax", tail)[1].item() > 40
    flat = torch.linspace(-1, 1, 100_001)[None]
    assert limits("entropy", flat, grid=SYMMETRIC)[1].item() > 0.95


@pytest.mark.parametrize("kind", ALL)
def test_after_a_gelu_the_range_stays_lopsided(kind):
    """mct#1337: a symmetric range would spend half of its integers on what never comes."""
    x = F.gelu(numbers(1, 20_000) * 2)
    low, high = limits(kind, x)
    assert -0.1701 < low.item() < -0.165
    assert high.item() > 3


@pytest.mark.parametrize("kind", ALL)
def test_rows_do_not_see_each_other(kind):
    x = numbers(3, 2000) * torch.tensor([[1.0], [100.0], [1e-4]])
    together = limits(kind, x)
    for i in range(3):
        alone = limits(kind, x[i : i + 1].expand(2, -1))
        for a, b in zip(together, alone, strict=True):
            assert a[i].item() == pytest.approx(b[0].item(), rel=1e-6)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_nan_and_infinity_are_refused_by_name(kind, bad, word):
    observer = make_observer(kind, name="layers.0.attn.qkv.input")
    with pytest.raises(ValueError, match=rf"layers\.0\.attn\.qkv\.input saw {word}"):
        observer(torch.tensor([[1.0, bad]]))
    with pytest.raises(RuntimeError, match=r"layers\.0\.attn\.qkv\.input is not calibrated"):
        observer.limits(AFFINE)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("value", [0.0, 1e-40, 5.0])
def test_a_constant(kind, value):
    low, high = limits(kind, torch.full((1, 64), value))
    scale, _ = scale_and_zero_point(low, high, AFFINE)
    assert 0 < scale.item() < np.inf
    assert high.item() == pytest.approx(value, rel=0.05)


def test_half_precision_keeps_the_range():
    observer = make_observer("minmax").half()
    observer(torch.tensor([[1e-4, 3.0]]).half())
    assert observer.low.dtype == torch.float32


def test_an_unknown_observer():
    with pytest.raises(ValueError, match="'median': choose minmax"):
        make_observer("median")
