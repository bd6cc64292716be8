"""Window order as one permutation of rows, for the eager fast path.

A stage's tokens are `(B * H * W, C)` rows. Cutting into windows, rolling and padding only choose an order of those
rows, so the order is worked out once per size and kept. Windows are grouped by how the shift's seam crosses them:
inside the map, at its right edge, at its bottom edge, or at the corner. One mask serves a whole group, which is why
no `(num_windows, N, N)` tensor is needed, and the groups run across the batch, so a group is one slice of the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .fast import Group, permute_rows, window_runs
from .windows import Size

KINDS = ((0, 0), (0, 1), (1, 0), (1, 1))  # does the seam cross (rows, columns): inside, right, bottom, corner
CACHE = 64  # sizes remembered; the oldest is forgotten first


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows whose rows lie one after the other, those of one kind together."""

    groups: tuple[Group, ...]  # the windows of each kind
    pad: Tensor | None  # (M, 1) True on rows that only fill up a window; None when there are none

    def runs(self, step: int, N: int) -> Iterator[tuple[slice, "Windows"]]:
        """Runs of `step` windows of N tokens: where the rows of each lie, and its windows."""
        for (start, stop), groups in window_runs(self.groups, step):
            rows = slice(start * N, stop * N)
            yield rows, Windows(groups=groups, pad=None if self.pad is None else self.pad[rows])


@dataclass(frozen=True, kw_only=True)
class RowLayout(Windows):
    """The order of the rows of `B` maps of one size under one window and shift."""

    padded: Size  # the map's size after padding to whole windows
    order: Tensor  # (M,) which raster row stands at each place
    place: Tensor  # (M,) where each raster row stands: the inverse of `order`
    image: Tensor  # (M,) the image of the batch that each row belongs to


def _image_order(padded: Size, window: Size, shift: Size) -> tuple[np.ndarray, list[int]]:
    """One image: the raster positions in window order `(num_windows, N)`, kinds together; windows of each kind."""
    (H, W), (h, w) = padded, window
    grid = np.roll(np.arange(H * W).reshape(H, W), (-shift[0], -shift[1]), (0, 1))
    windows = grid.reshape(H // h, h, W // w, w).swapaxes(1, 2).reshape(-1, h * w)
    seam_y = (np.arange(H // h) == H // h - 1) & (shift[0] > 0)
    seam_x = (np.arange(W // w) == W // w - 1) & (shift[1] > 0)
    kind = (2 * seam_y[:, None] + seam_x[None, :]).reshape(-1)
    if shift == (0, 0):
        return windows, [len(windows)]
    return windows[np.argsort(kind, kind="stable")], np.bincount(kind, minlength=len(KINDS)).tolist()


def _batch_order(B: int, windows: np.ndarray, counts: list[int], length: int) -> np.ndarray:
    """Row order over the batch: kind by kind, within a kind image by image."""
    start = np.arange(B)[:, None] * length
    runs = np.split(windows, np.cumsum(counts)[:-1])
    return np.concatenate([(start + run.reshape(1, -1)).reshape(-1) for run in runs])


def _pad_rows(order: np.ndarray, size: Size, padded: Size) -> np.ndarray | None:
    if size == padded:
        return None
    y, x = np.divmod(order % (padded[0] * padded[1]), padded[1])
    return ((y >= size[0]) | (x >= size[1]))[:, None]


@lru_cache(maxsize=CACHE)
def row_layout(B: int, size: Size, window: Size, shift: Size, device: torch.device) -> RowLayout:
    """The layout of `B` maps of `size`, built once per size."""
    padded = (size[0] + -size[0] % window[0], size[1] + -size[1] % window[1])
    length = padded[0] * padded[1]
    windows, counts = _image_order(padded, window, shift)
    order = _batch_order(B, windows, counts, length)
    pad = _pad_rows(order, size, padded)
    ends = np.cumsum([n * B for n in counts]).tolist()
    return RowLayout(
        padded=padded,
        order=_to_device(order, device),
        place=_to_device(np.argsort(order), device),
        groups=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        image=_to_device(order // length, device),
        pad=None if pad is None else _to_device(pad, device),
    )


@lru_cache(maxsize=CACHE)
def _change(
    B: int, size: Size, window: Size, before: Size, after: Size, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Index and inverse that take rows from one shift's order to another's."""
    a = row_layout(B, size, window, before, device)
    b = row_layout(B, size, window, after, device)
    with torch.inference_mode(False):
        return a.place[b.order], b.place[a.order]


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor that autograd may use later, even when the first forward pass runs in inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(array).to(device)


@lru_cache(maxsize=CACHE)
def kind_masks(window: Size, shift: Size, device: torch.device) -> Tensor:
    """What each kind of window must not see: `(4, N, N)`, True where query and key lie across the seam."""
    (h, w), (dy, dx) = window, shift
    y, x = np.divmod(np.arange(h * w), w)
    sides = np.stack([2 * (ky & (y >= h - dy)) + (kx & (x >= w - dx)) for ky, kx in KINDS])  # (4, N)
    return _to_device(sides[:, :, None] != sides[:, None, :], device)


class RowOrder:
    """Where the rows of a stage stand now; moves them when a block needs another order."""

    def __init__(self, B: int, size: Size, window: Size, device: torch.device):
        self.B, self.size, self.window, self.device = B, size, window, device
        self.shift: Size = (0, 0)

    def layout(self) -> RowLayout:
        return row_layout(self.B, self.size, self.window, self.shift, self.device)

    def from_map(self, x: Tensor, shift: Size) -> Tensor:
        """`(B, H, W, C)` -> rows `(M, C)` in the order of `shift`: one copy."""
        self.shift = shift
        layout = self.layout()
        if layout.padded != self.size:
            x = F.pad(x, (0, 0, 0, layout.padded[1] - self.size[1], 0, layout.padded[0] - self.size[0]))
        return permute_rows(x.reshape(-1, x.shape[-1]), layout.order, layout.place)

    def to_shift(self, rows: Tensor, shift: Size) -> Tensor:
        """Rows in the order of another shift: one copy, none when nothing changes."""
        if shift == self.shift:
            return rows
        index, inverse = _change(self.B, self.size, self.window, self.shift, shift, self.device)
        self.shift = shift
        return permute_rows(rows, index, inverse)

    def to_map(self, rows: Tensor) -> Tensor:
        """Rows -> `(B, H, W, C)`, padding cut off: one copy."""
        layout = self.layout()
        x = permute_rows(rows, layout.place, layout.order)
        x = x.view(self.B, *layout.padded, -1)
        return x[:, : self.size[0], : self.size[1]]
