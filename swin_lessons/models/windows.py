"""Windows as plain tensor functions: cut, put back, pad, shift, mask, and the coordinates inside one.

Maps are `(B, H, W, C)`. A window holds `N = window_size[0] * window_size[1]` tokens in row-major order.
Source: Swin Transformer (arXiv:2103.14030), section 3.2; Swin V2 (arXiv:2111.09883), section 3.3.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]


def window_partition(x: Tensor, window_size: Size) -> Tensor:
    """Cut a map into windows: `(B, H, W, C)` -> `(B * num_windows, N, C)`; H and W must be multiples."""
    B, H, W, C = x.shape
    h, w = window_size
    x = x.reshape(B, H // h, h, W // w, w, C)  # (B, rows, h, columns, w, C)
    return x.transpose(2, 3).reshape(B * (H // h) * (W // w), h * w, C)


def window_reverse(windows: Tensor, window_size: Size, H: int, W: int) -> Tensor:
    """Put windows back: `(B * num_windows, N, C)` -> `(B, H, W, C)`. The inverse of `window_partition`."""
    h, w = window_size
    C = windows.shape[-1]
    B = windows.shape[0] // ((H // h) * (W // w))
    x = windows.reshape(B, H // h, W // w, h, w, C)  # (B, rows, columns, h, w, C)
    return x.transpose(2, 3).reshape(B, H, W, C)


def fit_window(size: Size, window_size: Size, shift_size: Size) -> tuple[Size, Size]:
    """The window and shift that a map of this size can take, each axis on its own.

    A window never exceeds the map. Where one window covers an axis, shifting it would change nothing, so
    the shift is 0 there.
    """
    h, w = (min(s, win) for s, win in zip(size, window_size, strict=True))
    dy, dx = (0 if s <= win else d for s, win, d in zip(size, window_size, shift_size, strict=True))
    return (h, w), (dy, dx)


def windows_along(length: int, window: int) -> int:
    """How many windows cover an axis; the last may hang over the edge."""
    return (length + window - 1) // window


def pad_to_windows(x: Tensor, window_size: Size) -> Tensor:
    """Add zero rows below and zero columns on the right until windows tile `(B, H, W, C)`."""
    _, H, W, _ = x.shape
    h, w = window_size
    bottom, right = windows_along(H, h) * h - H, windows_along(W, w) * w - W
    return F.pad(x, (0, 0, 0, right, 0, bottom))


def cyclic_shift(x: Tensor, shift_size: Size) -> Tensor:
    """Roll `(B, H, W, C)` up and to the left by `shift_size`; negative values undo it."""
    if shift_size == (0, 0):
        return x
    return x.roll((-shift_size[0], -shift_size[1]), dims=(1, 2))


def _regions(length: int, window: int, shift: int, device=None) -> Tensor:
    """Number the three bands of a rolled axis: untouched (0), last window (1), wrapped around (2)."""
    position = torch.arange(length, device=device)
    if shift == 0:
        return torch.zeros_like(position)
    return (position >= length - window).long() + (position >= length - shift).long()


def shift_mask(H: int, W: int, window_size: Size, shift_size: Size, device=None) -> Tensor:
    """Who may attend to whom after a cyclic shift: `(num_windows, N, N)`, True where allowed.

    H and W are the padded sizes. Two tokens may meet when they come from the same side of the seam.
    """
    rows = _regions(H, window_size[0], shift_size[0], device)
    columns = _regions(W, window_size[1], shift_size[1], device)
    region = 3 * rows[:, None] + columns[None, :]  # (H, W)
    region = window_partition(region[None, :, :, None], window_size).squeeze(-1)  # (num_windows, N)
    return region[:, :, None] == region[:, None, :]


def relative_position_index(window_size: Size, table_size: Size | None = None, device=None) -> Tensor:
    """For each pair (query, key) of a window, its row in the relative position table: `(N, N)` int64.

    The table has `(2h-1)(2w-1)` rows for the window `table_size` (default: `window_size`) that it was made
    for. A smaller window uses the middle of a larger table: an offset keeps its meaning.
    """
    h, w = window_size
    table_h, table_w = table_size or window_size
    y = torch.arange(h, device=device).repeat_interleave(w)  # row of each token
    x = torch.arange(w, device=device).repeat(h)  # column of each token
    dy = y[:, None] - y[None, :] + table_h - 1  # (N, N), 0 .. 2h-2
    dx = x[:, None] - x[None, :] + table_w - 1
    return dy * (2 * table_w - 1) + dx


def _log_offsets(window: int, reference: int, device=None, dtype=torch.float32) -> Tensor:
    """Signed, log-spaced offsets -(w-1) .. w-1 of one axis: about -1 .. 1 when `window == reference`."""
    offset = torch.arange(-(window - 1), window, device=device, dtype=dtype)
    scaled = 8 * offset / max(reference - 1, 1)  # a window of one token has the single offset 0
    return scaled.sign() * torch.log2(scaled.abs() + 1) / math.log2(8)


def relative_coords_table(
    window_size: Size, pretrained_window_size: Size = (0, 0), device=None, dtype=torch.float32
) -> Tensor:
    """Log-spaced relative coordinates of V2: `((2h-1)(2w-1), 2)`, rows as in `relative_position_index`.

    `pretrained_window_size` is the window that the weights saw in pre-training; 0 means this one. The paper's
    equation 4 has no factors; the 8 and log2(8) are the authors' code's.
    """
    axes = [
        _log_offsets(w, p if p > 0 else w, device, dtype)
        for w, p in zip(window_size, pretrained_window_size, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
