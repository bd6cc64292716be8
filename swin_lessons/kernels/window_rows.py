"""Tokens in the order of their windows: a map is padded, shifted and cut in one pass, and put back in one.

PyTorch pads, rolls and copies the map once each. Here a kernel walks through the rows of the windows and works out
where on the map each token lies, so that a token is read once and written once. A row of C numbers moves as a whole.
The same walk serves both directions, with LayerNorm (`shift_partition`, `reverse_unshift`) or without.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.windows import (
    Size,
    cyclic_shift,
    pad_to_windows,
    window_partition,
    window_reverse,
    windows_along,
)
from .checks import check_pair, check_tensors
from .cost import Cost
from .launch import ceil_div, tl, triton
from .layer_norm import tile
from .spec import Spec

# --- the maths, in PyTorch


def cut_torch(x: Tensor, window_size: Size, shift_size: Size) -> Tensor:
    """Pad with zeros, roll, cut: `(B, H, W, C)` -> `(B * num_windows, N, C)`."""
    return window_partition(cyclic_shift(pad_to_windows(x, window_size), shift_size), window_size)


def paste_torch(windows: Tensor, H: int, W: int, window_size: Size, shift_size: Size) -> Tensor:
    """Put back, roll back, crop: `(B * num_windows, N, C)` -> `(B, H, W, C)`. Undoes `cut_torch`."""
    Hp, Wp = padded(H, W, window_size)
    x = window_reverse(windows, window_size, Hp, Wp)
    return cyclic_shift(x, (-shift_size[0], -shift_size[1]))[:, :H, :W]


def padded(H: int, W: int, window_size: Size) -> Size:
    """The size of a map that windows tile."""
    h, w = window_size
    return windows_along(H, h) * h, windows_along(W, w) * w


# --- the kernels


@triton.jit
def map_rows(
    row,  # (BLOCK_R,): rows in window order, of `(B * num_windows * N, C)`
    rows,
    H,
    W,
    shift_y,  # 0 .. padded H - 1
    shift_x,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
):
    """Their rows on the map, of `(B * H * W, C)`, and whether a token lies there: else it is padding."""
    down, across = tl.cdiv(H, WINDOW_H), tl.cdiv(W, WINDOW_W)
    window, token = row // (WINDOW_H * WINDOW_W), row % (WINDOW_H * WINDOW_W)
    image, window_y, window_x = window // across // down, window // across % down, window % across
    y = window_y * WINDOW_H + token // WINDOW_W + shift_y
    x = window_x * WINDOW_W + token % WINDOW_W + shift_x
    y = tl.where(y < down * WINDOW_H, y, y - down * WINDOW_H)  # rolled over the edge of the padded map
    x = tl.where(x < across * WINDOW_W, x, x - across * WINDOW_W)
    return (image * H + y).to(tl.int64) * W + x, (row < rows) & (y < H) & (x < W)


@triton.jit
def _cut_kernel(
    x_ptr,  # (B, H, W, C)
    windows_ptr,  # (rows, C)
    rows,
    C,
    H,
    W,
    shift_y,
    shift_x,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    place, is_token = map_rows(row, rows, H, W, shift_y, shift_x, WINDOW_H, WINDOW_W)
    column = tl.arange(0, BLOCK_C)[None, :]
    on_map, in_window = place[:, None] * C + column, row.to(tl.int64)[:, None] * C + column
    token = tl.load(x_ptr + on_map, mask=is_token[:, None] & (column < C), other=0.0)
    tl.store(windows_ptr + in_window, token, mask=(row < rows)[:, None] & (column < C))


@triton.jit
def _paste_kernel(
    windows_ptr,  # (rows, C)
    shortcut_ptr,  # (B, H, W, C), where ADD
    x_ptr,  # (B, H, W, C)
    rows,
    C,
    H,
    W,
    shift_y,
    shift_x,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    place, is_token = map_rows(row, rows, H, W, shift_y, shift_x, WINDOW_H, WINDOW_W)
    column = tl.arange(0, BLOCK_C)[None, :]
    on_map, in_window = place[:, None] * C + column, row.to(tl.int64)[:, None] * C + column
    there = is_token[:, None] & (column < C)
    token = tl.load(windows_ptr + in_window, mask=there, other=0.0)
    if ADD:
        token = tl.load(shortcut_ptr + on_map, mask=there, other=0.0).to(tl.float32) + token.to(tl.float32)
    tl.store(x_ptr + on_map, token, mask=there)


# --- launching them

Layout = Sequence[int]  # H, W, shift_y, shift_x, h, w: what a kernel is told of a map and its windows


def layout_of(x: Tensor, window_size: Size, shift_size: Size) -> Layout:
    """The `Layout` of a map `(B, H, W, C)`; a shift of either sign becomes one within the padded map."""
    _, H, W, _ = x.shape
    Hp, Wp = padded(H, W, window_size)
    return H, W, shift_size[0] % Hp, shift_size[1] % Wp, *window_size


def window_shape(shape: Sequence[int], window_size: Sequence[int]) -> tuple[int, int, int]:
    """What a map of `shape` `(B, H, W, C)` is cut into: `(B * num_windows, N, C)`."""
    (B, H, W, C), (h, w) = shape, window_size
    return B * windows_along(H, h) * windows_along(W, w), h * w, C


def windows_of(x: Tensor, layout: Layout, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the windows of a map `x`, unset; of its dtype, unless another is named."""
    return x.new_empty(window_shape(x.shape, layout[-2:]), dtype=dtype or x.dtype)


def map_of(windows: Tensor, shortcut: Tensor | None, layout: Layout) -> Tensor:
    """Memory for the map that `windows` cover, in the wider dtype of the two: `(B, H, W, C)`, unset."""
    H, W, _, _, h, w = layout
    B = windows.shape[0] // (windows_along(H, h) * windows_along(W, w))
    dtype = windows.dtype if shortcut is None else torch.promote_types(windows.dtype, shortcut.dtype)
    return windows.new_empty((B, H, W, windows.shape[-1]), dtype=dtype)


def count_rows(x: Tensor) -> int:
    """How many rows of C numbers there are."""
    return x.numel() // x.shape[-1]


@torch.library.custom_op("swin_lessons::cut", mutates_args=())
def cut(x: Tensor, layout: Layout) -> Tensor:
    """`cut_torch` by Triton."""
    windows, (BLOCK_R, BLOCK_C, warps) = windows_of(x, layout), tile(x.shape[-1])
    rows = count_rows(windows)
    if rows:
        args = (x.contiguous(), windows, rows, x.shape[-1], *layout, BLOCK_R, BLOCK_C)
        _cut_kernel[(ceil_div(rows, BLOCK_R),)](*args, num_warps=warps)
    return windows


@torch.library.custom_op("swin_lessons::paste", mutates_args=())
def paste(windows: Tensor, shortcut: Tensor | None, layout: Layout) -> Tensor:
    """`paste_torch` by Triton, plus the map `shortcut` if there is one."""
    x, (BLOCK_R, BLOCK_C, warps) = map_of(windows, shortcut, layout), tile(windows.shape[-1])
    rows, windows = count_rows(windows), windows.contiguous()
    other = windows if shortcut is None else shortcut.contiguous()
    if rows:
        sizes = (rows, windows.shape[-1], *layout, BLOCK_R, BLOCK_C)
        args = (windows, other, x, *sizes, shortcut is not None)
        _paste_kernel[(ceil_div(rows, BLOCK_R),)](*args, num_warps=warps)
    return x


@cut.register_fake
def _(x, layout):
    return windows_of(x, layout)


@paste.register_fake
def _(windows, shortcut, layout):
    return map_of(windows, shortcut, layout)


def _keep_layout(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.layout = inputs[-1]


def _keep_dtypes(ctx: Any, inputs: tuple, output: Tensor) -> None:
    windows, shortcut, ctx.layout = inputs
    ctx.dtypes = windows.dtype, None if shortcut is None else shortcut.dtype


def _paste_back(ctx: Any, dwindows: Tensor) -> tuple:
    return paste(dwindows, None, ctx.layout), None


def _cut_again(ctx: Any, dx: Tensor) -> tuple:
    windows_dtype, shortcut_dtype = ctx.dtypes
    return cut(dx.to(windows_dtype), ctx.layout), dx.to(shortcut_dtype) if shortcut_dtype else None, None


cut.register_autograd(_paste_back, setup_context=_keep_layout)
paste.register_autograd(_cut_again, setup_context=_keep_dtypes)


# --- what callers may ask for


def check_map(x: Tensor, window_size: Size, shift_size: Size) -> None:
    """Refuse what is no map `(B, H, W, C)`, no window and no shift.

    Raises:
        ValueError: names the value.
    """
    check_tensors(map=x)
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(f"a map of shape {tuple(x.shape)}: (B, H, W, C) is needed, with at least one token")
    check_pair("window_size", window_size, 1)
    check_pair("shift_size", shift_size)


# --- what to expect


def move_cost(
    shape: Sequence[int], window_size: Size, shift_size: Size, itemsize: int, *, back: bool
) -> Cost:
    """Moving a map `(B, H, W, C)` to its windows, or back: PyTorch pads, rolls and copies as far as it must.

    `torch.roll` over two axes rolls one after the other, so it copies the map twice (`roll_common` in PyTorch's
    `TensorTransformations.h`). Cropping is a view. The copy is one too where a single window is as wide as the map.
    """
    B, H, W, C = shape
    Hp, Wp = padded(H, W, window_size)
    tokens, all_tokens = B * H * W * C * itemsize, B * Hp * Wp * C * itemsize
    pads = not back and (Hp, Wp) != (H, W)  # fills with zeros, then copies
    passes = 2 * (tuple(shift_size) != (0, 0)) + (Wp > window_size[1])
    before = pads * (all_tokens + 2 * tokens) + passes * 2 * all_tokens
    after = 2 * tokens if back else tokens + all_tokens
    return Cost(2 * pads + passes, 1, before, after, 0)


# --- for the report

STAGES = (
    (96, 56),
    (768, 14),
)  # channels and side of Swin-T's stages 1 and 4, for images of 224 and 448 pixels


def window_scalars(C: int, side: int) -> dict[str, int]:
    """Sizes at batch 32 of a square map in windows of 7 that are shifted by 3."""
    return {"rows": 32 * side * side, "C": C, "H": side, "W": side, "shift_y": 3, "shift_x": 3}


def window_tiles(C: int, mixed: bool = False) -> tuple[dict[str, int], int]:
    """Constants of the kernels, and warps."""
    BLOCK_R, BLOCK_C, warps = tile(C, mixed)
    return {"WINDOW_H": 7, "WINDOW_W": 7, "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C}, warps


def specs() -> list[Spec]:
    """The launches to compile for a report: moves without LayerNorm."""
    found = []
    for C, side in STAGES:
        sizes, (tiles, warps) = window_scalars(C, side), window_tiles(C)
        label, add = f"[C={C}, no norm]", {"ADD": True}
        found += [
            Spec(f"shift_partition{label}", _cut_kernel, {}, sizes, tiles, warps),
            Spec(f"reverse_unshift{label}", _paste_kernel, {}, sizes, tiles | add, warps),
        ]
    return found
