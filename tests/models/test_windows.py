"""Windows: cutting, padding, the mask of a shift and coordinates, against definitions written out in loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swin_cases import images

from swin_lessons.models.windows import (
    cyclic_shift,
    fit_window,
    pad_to_windows,
    relative_coords_table,
    relative_position_index,
    shift_mask,
    window_partition,
    window_reverse,
)

few = st.integers(1, 4)
side = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(B=few, rows=few, columns=few, h=side, w=side)
def test_partition_cuts_row_by_row_and_reverse_puts_back(B, rows, columns, h, w):
    x = images(B, rows * h, columns * w, 3)
    windows = window_partition(x, (h, w))
    expected = [
        x[b, i * h : (i + 1) * h, j * w : (j + 1) * w].reshape(h * w, 3)
        for b in range(B)
        for i in range(rows)
        for j in range(columns)
    ]
    assert torch.equal(windows, torch.stack(expected))
    assert torch.equal(window_reverse(windows, (h, w), rows * h, columns * w), x)


@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [
        ((7, 14), (7, 7), (0, 3)),  # the authors' code would not shift at all
        ((14, 7), (7, 7), (3, 0)),
        ((7, 7), (7, 7), (0, 0)),
        ((8, 8), (7, 7), (3, 3)),
        ((5, 20), (5, 7), (0, 3)),
        ((1, 1), (1, 1), (0, 0)),
    ],
)
def test_each_axis_fits_its_window_and_shift(size, window, shift):
    assert fit_window(size, (7, 7), (3, 3)) == (window, shift)


@settings(max_examples=40, deadline=None)
@given(H=st.integers(1, 12), W=st.integers(1, 12), h=side, w=side)
def test_padding_is_least_and_lies_below_and_right(H, W, h, w):
    x = images(2, H, W, 3)
    padded = pad_to_windows(x, (h, w))
    assert padded.shape[1:3] == (math.ceil(H / h) * h, math.ceil(W / w) * w)
    assert torch.equal(padded[:, :H, :W], x)
    assert (padded != 0).sum() == (x != 0).sum()


def test_shift_moves_up_and_left_and_back():
    x = images(1, 5, 6, 2)
    shifted = cyclic_shift(x, (2, 1))
    assert torch.equal(shifted[0, 0, 0], x[0, 2, 1])
    assert torch.equal(cyclic_shift(shifted, (-2, -1)), x)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_mask_lets_tokens_meet_that_the_roll_did_not_bring_together(data):
    """Two tokens of a window may meet when they are as far apart in the map as they are in the window."""
    sizes, windows, shifts = [], [], []
    for _ in "yx":
        window, number = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 3))
        windows.append(window)
        sizes.append(window * number)
        shifts.append(data.draw(st.integers(0, window - 1)))
    (H, W), (h, w), (dy, dx) = sizes, windows, shifts
    y, x = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    rolled = cyclic_shift(torch.stack([y, x], -1)[None], (dy, dx))
    before = window_partition(rolled, (h, w))  # where each token of each window came from
    inside = window_partition(torch.stack([y, x], -1)[None], (h, w))  # where it stands now
    apart = before[:, :, None] - before[:, None, :]
    now = inside[:, :, None] - inside[:, None, :]
    assert torch.equal(shift_mask(H, W, (h, w), (dy, dx)), (apart == now).all(-1))


@pytest.mark.parametrize("window", [(1, 1), (2, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("larger", [0, 2])
def test_index_finds_the_row_of_an_offset_also_in_a_larger_table(window, larger):
    (h, w), table = window, (window[0] + larger, window[1] + larger)
    rows = torch.arange((2 * table[0] - 1) * (2 * table[1] - 1)).view(2 * table[0] - 1, -1)
    index = relative_position_index(window, table)
    for q in range(h * w):
        for k in range(h * w):
            dy, dx = q // w - k // w, q % w - k % w
            assert index[q, k] == rows[dy + table[0] - 1, dx + table[1] - 1]


def test_coordinates_of_window_8_are_the_published_ones():
    x = relative_coords_table((8, 8)).view(15, 15, 2)
    expected = torch.tensor([0, 0.3665, 0.5721, 0.7156, 0.8260, 0.9157, 0.9913, 1.0566])
    torch.testing.assert_close(x[0, 7:, 1], expected, atol=5e-5, rtol=0)
    torch.testing.assert_close(x[7:, 0, 0], expected, atol=5e-5, rtol=0)
    assert torch.equal(x, -x.flip(0, 1))


@pytest.mark.parametrize(
    ("trained", "window", "largest"), [(8, 16, 1.3938), (12, 16, 1.1913), (12, 24, 1.3826)]
)
def test_coordinates_after_a_transfer_reach_beyond_one(trained, window, largest):
    table = relative_coords_table((window, window), (trained, trained))
    assert table.abs().max().item() == pytest.approx(largest, abs=5e-5)


@pytest.mark.parametrize(
    ("window", "trained"), [((1, 1), (0, 0)), ((1, 1), (1, 1)), ((3, 1), (0, 0)), ((4, 4), (1, 1))]
)
def test_coordinates_of_a_single_token_are_finite(window, trained):
    table = relative_coords_table(window, trained)
    assert torch.isfinite(table).all()
    assert (table.view(2 * window[0] - 1, 2 * window[1] - 1, 2)[window[0] - 1, window[1] - 1] == 0).all()
