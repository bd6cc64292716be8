"""From what attention wrote back to the map: reverse, un-shift, crop, add, LayerNorm in one pass.

V1 (pre-norm) needs the sum and, for the MLP, the sum normalised; V2 (res-post-norm) normalises what comes from the
windows and adds that to the shortcut.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..models.windows import Size
from .checks import check_tensors
from .cost import Cost
from .launch import ceil_div, once_only, tl, triton, use_triton
from .layer_norm import (
    POST,
    PRE,
    check_parameters,
    layer_norm_cost,
    layer_norm_torch,
    limit,
    norm_specs,
    normalise,
    normalise_backward,
    outputs,
    partial_sums,
    tile,
)
from .spec import Spec
from .window_rows import (
    STAGES,
    Layout,
    check_map,
    count_rows,
    layout_of,
    map_rows,
    move_cost,
    padded,
    paste,
    paste_torch,
    window_scalars,
    window_shape,
    window_tiles,
    windows_of,
)

# --- the maths, in PyTorch


def reverse_unshift_torch(
    windows: Tensor,
    shortcut: Tensor,
    window_size: Size,
    shift_size: Size,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    order: str | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor] | Tensor:
    """Put back, roll back, crop; then add and normalise, in the order asked for."""
    _, H, W, _ = shortcut.shape
    x = paste_torch(windows, H, W, window_size, shift_size)
    if weight is None or bias is None:
        return shortcut + x
    if order == "post":
        wide = torch.promote_types(shortcut.dtype, x.dtype)
        return (shortcut + layer_norm_torch(x, weight, bias, eps, wide)).to(dtype or wide)
    total = shortcut + x
    return total, layer_norm_torch(total, weight, bias, eps, dtype)


# --- the kernels


@triton.jit
def _forward_kernel(
    windows_ptr,  # (rows, C)
    shortcut_ptr,  # (B, H, W, C)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    sum_ptr,  # (B, H, W, C), written in mode PRE
    y_ptr,  # (B, H, W, C)
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
    MODE: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    place, is_token = map_rows(row, rows, H, W, shift_y, shift_x, WINDOW_H, WINDOW_W)
    column = tl.arange(0, BLOCK_C)
    there = is_token[:, None] & (column < C)[None, :]
    in_window = row.to(tl.int64)[:, None] * C + column[None, :]
    on_map = place[:, None] * C + column[None, :]
    normed = tl.load(windows_ptr + in_window, mask=there, other=0.0).to(tl.float32)
    shortcut = tl.load(shortcut_ptr + on_map, mask=there, other=0.0).to(tl.float32)
    if MODE == 1:
        normed = (shortcut + normed).to(sum_ptr.dtype.element_ty).to(tl.float32)  # as it is stored
        tl.store(sum_ptr + on_map, normed, mask=there)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    y, mean, rstd = normalise(normed, there, weight, bias, C, eps)
    if MODE == 2:
        y += shortcut
    tl.store(y_ptr + on_map, y, mask=there)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (B, H, W, C)
    dsum_ptr,  # (B, H, W, C), a second gradient that reaches the sum, in mode PRE
    x_ptr,  # the rows that were normalised: the sum (B, H, W, C) in mode PRE, else windows (rows, C)
    weight_ptr,  # (C,)
    mean_ptr,  # (rows,) fp32, in window order
    rstd_ptr,  # (rows,) fp32
    dwindows_ptr,  # (rows, C)
    dshortcut_ptr,  # (B, H, W, C), written in mode PRE: the same numbers in the map's order
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
    MODE: tl.constexpr,
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
        dy = tl.load(dy_ptr + on_map, mask=there, other=0.0).to(tl.float32)
        if MODE == 1:
            x = tl.load(x_ptr + on_map, mask=there, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + in_window, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=is_token, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=is_token, other=0.0)
        dx, unit = normalise_backward(dy, x, there, weight, mean, rstd, C)
        dweight += dy * unit
        dbias += dy
        if MODE == 1:
            dx += tl.load(dsum_ptr + on_map, mask=there, other=0.0).to(tl.float32)
            tl.store(dshortcut_ptr + on_map, dx, mask=there)
        every = (row < rows)[:, None] & (column < C)[None, :]
        tl.store(dwindows_ptr + in_window, dx, mask=every)  # zeros for padding
    tl.store(dweight_ptr + program * C + column, tl.sum(dweight, 0), mask=column < C)
    tl.store(dbias_ptr + program * C + column, tl.sum(dbias, 0), mask=column < C)


# --- launching them


@torch.library.custom_op("swin_lessons::reverse_unshift", mutates_args=())
def _reverse_unshift(
    windows: Tensor,
    shortcut: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    mode: int,
    layout: Layout,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(y, sum, mean, rstd)`, y in `dtype`, sum in `wide`; sum is empty unless `mode` is PRE."""
    windows, shortcut = windows.contiguous(), shortcut.contiguous()
    rows, C = count_rows(windows), windows.shape[-1]
    BLOCK_R, BLOCK_C, warps = tile(C, mixed=windows.dtype != shortcut.dtype)
    y, total = outputs(shortcut, mode, dtype, wide)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=windows.device) for _ in range(2))
    if rows:
        pointers = (windows, shortcut, weight.contiguous(), bias.contiguous(), total, y, mean, rstd)
        args = (*pointers, rows, C, eps, *layout, BLOCK_R, BLOCK_C, mode)
        _forward_kernel[(ceil_div(rows, BLOCK_R),)](*args, num_warps=warps)
    return y, total, mean, rstd


@_reverse_unshift.register_fake
def _(windows, shortcut, weight, bias, eps, mode, layout, dtype, wide):
    statistic = windows.new_empty(count_rows(windows), dtype=torch.float32)
    return *outputs(shortcut, mode, dtype, wide), statistic, torch.empty_like(statistic)


@torch.library.custom_op("swin_lessons::reverse_unshift_backward", mutates_args=())
def _reverse_unshift_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    mode: int,
    layout: Layout,
    windows_dtype: torch.dtype,
    shortcut_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(dwindows, dshortcut, dweight, dbias)` for the rows `x` that were normalised; dshortcut in mode PRE only."""
    BLOCK_R, BLOCK_C, warps = tile(x.shape[-1], mixed=windows_dtype != shortcut_dtype)
    rows, dy = len(mean), dy.contiguous()
    dwindows = windows_of(dy, layout, windows_dtype)
    dshortcut = dy.new_empty(dy.shape if mode == PRE else 0, dtype=shortcut_dtype)
    dweight, dbias = partial_sums(dy, rows)
    second = dsum.contiguous() if dsum is not None else dy
    normed = (x.contiguous(), weight.contiguous(), mean, rstd)
    args = (dy, second, *normed, dwindows, dshortcut, dweight, dbias, rows, x.shape[-1], *layout)
    _backward_kernel[(len(dweight),)](*args, BLOCK_R, BLOCK_C, mode, num_warps=warps)
    return dwindows, dshortcut, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype)


@_reverse_unshift_backward.register_fake
def _(dy, dsum, x, weight, mean, rstd, mode, layout, windows_dtype, shortcut_dtype):
    dshortcut = dy.new_empty(dy.shape if mode == PRE else 0, dtype=shortcut_dtype)
    return (
        windows_of(dy, layout, windows_dtype),
        dshortcut,
        torch.empty_like(weight),
        torch.empty_like(weight),
    )


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    windows, shortcut, weight, _, _, ctx.mode, ctx.layout, *_ = inputs
    ctx.dtypes = (windows.dtype, shortcut.dtype)
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(total if ctx.mode == PRE else windows, weight, mean, rstd)


def _gradients(ctx: Any, dy: Tensor, dsum: Tensor | None, *_: Tensor) -> tuple:
    dsum = dsum if ctx.mode == PRE else None
    found = _reverse_unshift_backward(dy, dsum, *ctx.saved_tensors, ctx.mode, ctx.layout, *ctx.dtypes)
    dwindows, dshortcut, dweight, dbias = found
    to_shortcut = dshortcut if ctx.mode == PRE else dy.to(ctx.dtypes[1])
    return dwindows, to_shortcut, dweight, dbias, None, None, None, None, None


_reverse_unshift.register_autograd(_gradients, setup_context=_keep)
once_only(_reverse_unshift_backward)


# --- the operation


@overload
def reverse_unshift(
    windows: Tensor,
    shortcut: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    order: Literal["pre"],
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def reverse_unshift(
    windows: Tensor,
    shortcut: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    order: Literal["post"] | None = None,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor: ...


def reverse_unshift(
    windows: Tensor,
    shortcut: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    order: str | None = None,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor] | Tensor:
    """Undo `shift_partition` and add the shortcut: `(B * num_windows, N, C)` and `(B, H, W, C)` -> `(B, H, W, C)`.

    With x for the windows put back on the map, and LN for LayerNorm with `weight` and `bias`, statistics in fp32:

    - `order=None`: returns `shortcut + x`;
    - `order="pre"` (Swin V1): `s = shortcut + x`, returns `(s, LN(s))`;
    - `order="post"` (Swin V2's res-post-norm, arXiv:2111.09883, figure 1): returns `shortcut + LN(x)`.

    The sum has the wider of the two dtypes: under mixed precision `shortcut` is fp32 and `windows`, what attention
    found, fp16 or bf16.

    Args:
        window_size, shift_size: as `shift_partition` had them. What the windows hold for padding is dropped.
        weight, bias: `(C,)`, with an order; none without.
        dtype: of `LN(s)` with "pre", of the result with "post"; that of the sum when None.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; another `order`; a dtype without an order; an order
            without weight and bias, or these without an order; with impl="triton", the limits of `shift_partition`.
    """
    check_map(shortcut, window_size, shift_size)
    _check(windows, shortcut, window_size)
    _check_order(order, weight, bias)
    wide = torch.promote_types(windows.dtype, shortcut.dtype)
    if order is None and dtype not in (None, wide):
        raise ValueError(f"dtype={dtype}: an addition without LayerNorm gives {wide}; cast before or after")
    if weight is not None and bias is not None:
        check_parameters(shortcut, weight, bias, eps, dtype)
    if not (use_triton(impl, shortcut, limit(shortcut)) and use_triton(impl, windows)):
        return reverse_unshift_torch(
            windows, shortcut, window_size, shift_size, weight, bias, eps, order, dtype
        )
    layout = layout_of(shortcut, window_size, shift_size)
    if weight is None or bias is None:
        return paste(windows, shortcut, layout)
    mode = PRE if order == "pre" else POST
    y, total, _, _ = _reverse_unshift(windows, shortcut, weight, bias, eps, mode, layout, dtype or wide, wide)
    return (total, y) if order == "pre" else y


def _check(windows: Tensor, shortcut: Tensor, window_size: Size) -> None:
    check_tensors(windows=windows, shortcut=shortcut)
    expected = window_shape(shortcut.shape, window_size)
    if windows.shape != expected:
        raise ValueError(
            f"windows {tuple(windows.shape)} do not fit: a shortcut {tuple(shortcut.shape)} in windows of "
            f"{tuple(window_size)} is cut into {expected}"
        )


def _check_order(order: str | None, weight: Tensor | None, bias: Tensor | None) -> None:
    if order not in (None, "pre", "post"):
        raise ValueError(f"order={order!r}: choose 'pre' (Swin V1), 'post' (Swin V2) or None (no LayerNorm)")
    if {weight is None, bias is None} != {order is None}:
        raise ValueError(f"order={order!r}: LayerNorm needs an order, a weight and a bias, or none of them")


# --- what to expect

# what one pass reads and writes beside the windows and one map
FORWARD_MAPS = {None: 1, "pre": 2, "post": 1}  # the shortcut; the sum
BACKWARD_MAPS = {None: 0, "pre": 3, "post": 1}  # the sum, its gradient, the shortcut's; the windows
STATISTICS = 8  # bytes of a token's mean and 1 / deviation


def reverse_unshift_cost(
    shape: Sequence[int],
    window_size: Size,
    shift_size: Size,
    itemsize: int,
    *,
    order: str | None = None,
    backward: bool = False,
) -> Cost:
    """Windows back to a map `(B, H, W, C)`, with the shortcut. PyTorch: copy, roll, add, LayerNorm, once each.

    A map that was cropped is no longer contiguous, so that LayerNorm (order "post") copies it first.
    """
    B, H, W, C = shape
    one = B * H * W * C * itemsize
    move = move_cost(shape, window_size, shift_size, itemsize, back=not backward)
    norm = layer_norm_cost(B * H * W, C, itemsize, backward) if order else Cost(0, 1, 0, 0, 0)
    adds = order == "pre" if backward else True
    copies = order == "post" and not backward and padded(H, W, window_size) != (H, W)
    maps = BACKWARD_MAPS[order] if backward else FORWARD_MAPS[order]
    return Cost(
        move.launches_before + norm.launches_before + adds + copies,
        norm.launches_after,
        move.bytes_before + norm.bytes_before + 3 * one * adds + 2 * one * copies,
        move.bytes_after + maps * one + STATISTICS * B * H * W * bool(order),
        norm.flops + adds * B * H * W * C,
    )


def specs() -> list[Spec]:
    """The launches to compile for a report."""
    found = []
    for C, side in STAGES:
        sizes = window_scalars(C, side)
        for mode, order, wide in (
            (PRE, "pre", ()),
            (POST, "post", ()),
            (PRE, "pre, fp32 sum", ("shortcut_ptr", "sum_ptr", "dsum_ptr", "x_ptr", "dshortcut_ptr")),
        ):
            label, (tiles, warps) = f"reverse_unshift[C={C}, {order}]", window_tiles(C, mixed=bool(wide))
            tiles["MODE"] = mode
            found += norm_specs(label, (_forward_kernel, _backward_kernel), sizes, tiles, warps, wide)
    return found
