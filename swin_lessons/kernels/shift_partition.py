"""LayerNorm, padding, cyclic shift and window partition in one pass: from a map to what attention reads.

The pre-norm block (Swin V1) normalises each token on its way; V2, which normalises later, only moves it. Padding comes
after the norm: its tokens are zeros, not the bias.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.windows import Size
from .cost import Cost
from .launch import ceil_div, once_only, tl, triton, use_triton
from .layer_norm import (
    check_parameters,
    layer_norm_cost,
    layer_norm_torch,
    limit,
    norm_specs,
    normalise,
    normalise_backward,
    partial_sums,
    tile,
)
from .spec import Spec
from .window_rows import (
    STAGES,
    Layout,
    check_map,
    count_rows,
    cut,
    cut_torch,
    layout_of,
    map_rows,
    move_cost,
    window_scalars,
    window_tiles,
    windows_of,
)

# --- the maths, in PyTorch


def shift_partition_torch(
    x: Tensor,
    window_size: Size,
    shift_size: Size,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise if there is a weight, pad with zeros, roll, cut."""
    if weight is not None and bias is not None:
        x = layer_norm_torch(x, weight, bias, eps, dtype)
    return cut_torch(x, window_size, shift_size)


# --- the kernels


@triton.jit
def _forward_kernel(
    x_ptr,  # (B, H, W, C)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    windows_ptr,  # (rows, C)
    mean_ptr,  # (rows,) fp32, in window order
    rstd_ptr,  # (rows,) fp32
    rows,
    C,
    eps,
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
    column = tl.arange(0, BLOCK_C)
    there = is_token[:, None] & (column < C)[None, :]
    x = tl.load(x_ptr + place[:, None] * C + column[None, :], mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    y, mean, rstd = normalise(x, there, weight, bias, C, eps)
    y = tl.where(there, y, 0.0)  # padding is added after the norm
    in_window = row.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(windows_ptr + in_window, y, mask=(row < rows)[:, None] & (column < C)[None, :])
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_kernel(
    dwindows_ptr,  # (rows, C)
    x_ptr,  # (B, H, W, C)
    weight_ptr,  # (C,)
    mean_ptr,  # (rows,) fp32, in window order
    rstd_ptr,  # (rows,) fp32
    dx_ptr,  # (B, H, W, C)
    dweight_ptr,  # (programs, C) fp32: partial sums
    dbias_ptr,  # (programs, C) fp32
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
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(program, tl.cdiv(rows, BLOCK_R), programs):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        place, is_token = map_rows(row, rows, H, W, shift_y, shift_x, WINDOW_H, WINDOW_W)
        there = is_token[:, None] & (column < C)[None, :]
        in_window = row.to(tl.int64)[:, None] * C + column[None, :]
        on_map = place[:, None] * C + column[None, :]
        dy = tl.load(dwindows_ptr + in_window, mask=there, other=0.0).to(tl.float32)  # none for padding
        x = tl.load(x_ptr + on_map, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=is_token, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=is_token, other=0.0)
        dx, unit = normalise_backward(dy, x, there, weight, mean, rstd, C)
        dweight += dy * unit
        dbias += dy
        tl.store(dx_ptr + on_map, dx, mask=there)
    tl.store(dweight_ptr + program * C + column, tl.sum(dweight, 0), mask=column < C)
    tl.store(dbias_ptr + program * C + column, tl.sum(dbias, 0), mask=column < C)


# --- launching them


@torch.library.custom_op("swin_lessons::shift_partition", mutates_args=())
def _shift_partition(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`(windows, mean, rstd)`, the windows in `dtype`."""
    windows, (BLOCK_R, BLOCK_C, warps) = windows_of(x, layout, dtype), tile(x.shape[-1])
    rows = count_rows(windows)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    pointers = (x.contiguous(), weight.contiguous(), bias.contiguous(), windows, mean, rstd)
    if rows:
        args = (*pointers, rows, x.shape[-1], eps, *layout, BLOCK_R, BLOCK_C)
        _forward_kernel[(ceil_div(rows, BLOCK_R),)](*args, num_warps=warps)
    return windows, mean, rstd


@_shift_partition.register_fake
def _(x, weight, bias, eps, layout, dtype):
    windows = windows_of(x, layout, dtype)
    statistic = x.new_empty(count_rows(windows), dtype=torch.float32)
    return windows, statistic, torch.empty_like(statistic)


@torch.library.custom_op("swin_lessons::shift_partition_backward", mutates_args=())
def _shift_partition_backward(
    dwindows: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dx, dweight, dbias)`."""
    x, rows, (BLOCK_R, BLOCK_C, warps) = x.contiguous(), len(mean), tile(x.shape[-1])
    dx, (dweight, dbias) = torch.empty_like(x), partial_sums(x, rows)
    pointers = (dwindows.contiguous(), x, weight.contiguous(), mean, rstd, dx, dweight, dbias)
    args = (*pointers, rows, x.shape[-1], *layout, BLOCK_R, BLOCK_C)
    _backward_kernel[(len(dweight),)](*args, num_warps=warps)
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype)


@_shift_partition_backward.register_fake
def _(dwindows, x, weight, mean, rstd, layout):
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, _, _, ctx.layout, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *output[1:])


def _gradients(ctx: Any, dwindows: Tensor, *_: Tensor) -> tuple:
    return *_shift_partition_backward(dwindows, *ctx.saved_tensors, ctx.layout), None, None, None


_shift_partition.register_autograd(_gradients, setup_context=_keep)
once_only(_shift_partition_backward)


# --- the operation


def shift_partition(
    x: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """From a map to its windows: `(B, H, W, C)` -> `(B * num_windows, N, C)`.

    Sizes that windows do not tile get zero tokens below and on the right, also where one window is larger than the
    map (models shrink it before, by `fit_window`). Then the map is rolled up and to the left, and cut. Attention has
    to mask what the roll brought together.

    Args:
        window_size: (h, w) of a window, in tokens; N = h * w.
        shift_size: rows and columns to roll by.
        weight, bias: `(C,)`, both or neither: LayerNorm of each token before the padding, statistics in fp32.
        dtype: of the windows behind a LayerNorm; that of `x` when None. Under mixed precision, what the next matrix
            product reads.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; weight without bias; a dtype without them; with
            impl="triton", more than 8,192 channels or a dtype other than fp32, fp16 and bf16.
    """
    check_map(x, window_size, shift_size)
    if (weight is None) != (bias is None):
        raise ValueError("weight and bias: LayerNorm needs both, a pure move neither")
    if weight is None and dtype not in (None, x.dtype):
        raise ValueError(f"dtype={dtype}: a pure move keeps {x.dtype}; cast before or after")
    if weight is not None and bias is not None:
        check_parameters(x, weight, bias, eps, dtype)
    if not use_triton(impl, x, limit(x)):
        return shift_partition_torch(x, window_size, shift_size, weight, bias, eps, dtype)
    layout = layout_of(x, window_size, shift_size)
    if weight is None or bias is None:
        return cut(x, layout)
    return _shift_partition(x, weight, bias, eps, layout, dtype or x.dtype)[0]


# --- what to expect


def shift_partition_cost(
    shape: Sequence[int],
    window_size: Size,
    shift_size: Size,
    itemsize: int,
    *,
    norm: bool = True,
    backward: bool = False,
) -> Cost:
    """A map `(B, H, W, C)` to its windows. PyTorch: LayerNorm, pad, roll, copy; backward in the other order."""
    B, H, W, C = shape
    move = move_cost(shape, window_size, shift_size, itemsize, back=backward)
    if not norm:
        return move
    plain = layer_norm_cost(B * H * W, C, itemsize, backward)
    return Cost(
        plain.launches_before + move.launches_before,
        plain.launches_after,
        plain.bytes_before + move.bytes_before,
        plain.bytes_after + move.bytes_after - 2 * B * H * W * C * itemsize,  # of each token once
        plain.flops,
    )


def specs() -> list[Spec]:
    """The launches to compile for a report."""
    found = []
    for C, side in STAGES:
        sizes, (tiles, warps) = window_scalars(C, side), window_tiles(C)
        label = f"shift_partition[C={C}]"
        found += norm_specs(label, (_forward_kernel, _backward_kernel), sizes, tiles, warps)
    return found
