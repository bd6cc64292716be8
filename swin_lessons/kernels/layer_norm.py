"""LayerNorm, alone or together with the residual addition beside it.

A row of C numbers is normalised in registers: read once, written once. Several short rows share a program, since one
row of 96 numbers would leave most lanes idle. Statistics are fp32 whatever the input is.

The backward pass needs sums over all rows for the gradients of weight and bias. Each program adds up the rows that it
visits and writes one partial sum; a second, small sum adds those. No atomics: the result is the same each time.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_dtype, check_number, check_tensors
from .cost import Cost
from .launch import ceil_div, multiprocessors, once_only, power_of_2, tl, triton, use_triton
from .spec import FLOATS, HALVES, Spec

MAX_CHANNELS = 8192  # a row must fit the registers of one program
TILE = 4096  # numbers in a program's tile, at most, unless one row has more
PARAMETERS = ("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr")  # fp32 always
PLAIN, PRE, POST = 0, 1, 2  # LN(x); s = x + r with LN(s); x + LN(r)


# --- the maths, in PyTorch


def layer_norm_torch(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, dtype: torch.dtype | None = None
) -> Tensor:
    """LayerNorm over the last axis; statistics in fp32, the result in `dtype`, or that of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps)
    return y.to(dtype or x.dtype)


# --- the arithmetic of rows that lie in registers, for all kernels that normalise


@triton.jit
def normalise(x, there, weight, bias, C, eps):
    """Rows `(BLOCK_R, BLOCK_C)` in fp32, normalised, and their mean and 1 / deviation; `there` is no padding."""
    mean = tl.sum(x, 1) / C
    centred = tl.where(there, x - mean[:, None], 0.0)  # padding must not enter the variance
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    return centred * rstd[:, None] * weight[None, :] + bias[None, :], mean, rstd


@triton.jit
def normalise_backward(dy, x, there, weight, mean, rstd, C):
    """The gradient of the rows, and the normalised rows before weight and bias."""
    unit = tl.where(there, (x - mean[:, None]) * rstd[:, None], 0.0)
    dunit = dy * weight[None, :]
    along = tl.sum(dunit * unit, 1) / C  # what the variance takes back
    level = tl.sum(dunit, 1) / C  # what the mean takes back
    return (dunit - level[:, None] - unit * along[:, None]) * rstd[:, None], unit


# --- the kernels


@triton.jit
def _forward_kernel(
    x_ptr,  # (rows, C)
    residual_ptr,  # (rows, C), unless MODE is PLAIN
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    sum_ptr,  # (rows, C), written in mode PRE
    y_ptr,  # (rows, C)
    mean_ptr,  # (rows,) fp32
    rstd_ptr,  # (rows,) fp32
    rows,
    C,
    eps,
    MODE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    there = (row < rows)[:, None] & (column < C)[None, :]
    at = row[:, None] * C + column[None, :]
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    normed = x
    if MODE != 0:
        residual = tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
        normed = residual
        if MODE == 1:
            normed = (x + residual).to(sum_ptr.dtype.element_ty).to(tl.float32)  # as it is stored
            tl.store(sum_ptr + at, normed, mask=there)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    y, mean, rstd = normalise(normed, there, weight, bias, C, eps)
    if MODE == 2:
        y += x
    tl.store(y_ptr + at, y, mask=there)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (rows, C)
    dsum_ptr,  # (rows, C), a second gradient that reaches the normalised rows, in mode PRE
    x_ptr,  # (rows, C): the rows that were normalised
    weight_ptr,  # (C,)
    mean_ptr,  # (rows,) fp32
    rstd_ptr,  # (rows,) fp32
    dx_ptr,  # (rows, C)
    dweight_ptr,  # (programs, C) fp32: partial sums
    dbias_ptr,  # (programs, C) fp32
    rows,
    C,
    MODE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(program, tl.cdiv(rows, BLOCK_R), programs):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        there = (row < rows)[:, None] & (column < C)[None, :]
        at = row[:, None] * C + column[None, :]
        dy = tl.load(dy_ptr + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        dx, unit = normalise_backward(dy, x, there, weight, mean, rstd, C)
        dweight += dy * unit
        dbias += dy
        if MODE == 1:
            dx += tl.load(dsum_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx, mask=there)
    tl.store(dweight_ptr + program * C + column, tl.sum(dweight, 0), mask=column < C)
    tl.store(dbias_ptr + program * C + column, tl.sum(dbias, 0), mask=column < C)


# --- launching them


def tile(C: int, mixed: bool = False) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps; fewer rows where two dtypes meet, or registers spill."""
    BLOCK_C = power_of_2(C)
    BLOCK_R = max(1, min(8 if mixed else 16, TILE // 2 // BLOCK_C))
    return BLOCK_R, BLOCK_C, 4 if BLOCK_R * BLOCK_C <= TILE else 8


def partial_sums(x: Tensor, rows: int) -> Tensor:
    """`(2, programs, C)` fp32, unset: what each program of a backward kernel adds up for weight and bias."""
    C = x.shape[-1]
    programs = max(1, min(ceil_div(rows, tile(C)[0]), 2 * multiprocessors(x)))
    return torch.empty(2, programs, C, dtype=torch.float32, device=x.device)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


@torch.library.custom_op("swin_lessons::norm", mutates_args=())
def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    mode: int,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(y, sum, mean, rstd)`, y in `dtype`, sum in `wide`; sum is empty unless `mode` is PRE."""
    x, C = x.contiguous(), x.shape[-1]
    residual = x if residual is None else residual.contiguous()
    y, total = outputs(x, mode, dtype, wide)
    mean, rstd = (torch.empty(_rows(x), dtype=torch.float32, device=x.device) for _ in range(2))
    BLOCK_R, BLOCK_C, warps = tile(C, mixed=len({x.dtype, residual.dtype, dtype}) > 1)
    grid = (ceil_div(_rows(x), BLOCK_R),)
    weight, bias = weight.contiguous(), bias.contiguous()
    if x.numel():
        args = (x, residual, weight, bias, total, y, mean, rstd, _rows(x), C, eps, mode, BLOCK_R, BLOCK_C)
        _forward_kernel[grid](*args, num_warps=warps)
    return y, total, mean, rstd


def outputs(x: Tensor, mode: int, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for y and the sum, unset; for no sum unless `mode` is PRE."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape if mode == PRE else 0, dtype=wide)


@_norm.register_fake
def _(x, residual, weight, bias, eps, mode, dtype, wide):
    statistic = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return *outputs(x, mode, dtype, wide), statistic, torch.empty_like(statistic)


@torch.library.custom_op("swin_lessons::norm_backward", mutates_args=())
def _norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dx, dweight, dbias)` for the rows `x` that were normalised."""
    x, dy, C = x.contiguous(), dy.contiguous(), x.shape[-1]
    dsum = dy if dsum is None else dsum.contiguous()
    dx, rows = torch.empty_like(x), _rows(x)
    BLOCK_R, BLOCK_C, warps = tile(C, mixed=dy.dtype != x.dtype)
    dweight, dbias = partial_sums(x, rows)
    args = (dy, dsum, x, weight.contiguous(), mean, rstd, dx, dweight, dbias, rows, C, mode, BLOCK_R, BLOCK_C)
    _backward_kernel[(len(dweight),)](*args, num_warps=warps)
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype)


@_norm_backward.register_fake
def _(dy, dsum, x, weight, mean, rstd, mode):
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, residual, weight, _, _, mode, *_ = inputs
    _, total, mean, rstd = output
    ctx.mode, ctx.dtypes = mode, (x.dtype, x.dtype if residual is None else residual.dtype)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward((x, total, residual)[mode], weight, mean, rstd)


def _gradients(ctx: Any, dy: Tensor, dsum: Tensor | None, *_: Tensor) -> tuple:
    x, weight, mean, rstd = ctx.saved_tensors
    dsum = dsum if ctx.mode == PRE else None
    dx, dweight, dbias = _norm_backward(
        dy, dsum, x, weight, mean, rstd, ctx.mode if dsum is not None else PLAIN
    )
    to_x = (dy if ctx.mode == POST else dx).to(ctx.dtypes[0])
    to_residual = None if ctx.mode == PLAIN else dx.to(ctx.dtypes[1])
    return to_x, to_residual, dweight, dbias, None, None, None, None


_norm.register_autograd(_gradients, setup_context=_keep)
once_only(_norm_backward)


# --- the operations


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """LayerNorm over the last axis: `(..., C)` -> `(..., C)`, statistics in fp32.

    Args:
        weight, bias: `(C,)`, of any floating dtype.
        dtype: of the result; that of `x` when None. Under mixed precision, what the next matrix product reads.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a negative `eps`; with impl="triton", more than 8,192
            channels or a dtype other than fp32, fp16 and bf16.
    """
    check_parameters(x, weight, bias, eps, dtype)
    if not use_triton(impl, x, limit(x)):
        return layer_norm_torch(x, weight, bias, eps, dtype)
    return _norm(x, None, weight, bias, eps, PLAIN, dtype or x.dtype, x.dtype)[0]


@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    order: Literal["pre"] = "pre",
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    order: Literal["post"],
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor: ...


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    order: str = "pre",
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor] | Tensor:
    """A residual addition and the LayerNorm beside it, in one pass over `(..., C)`.

    `order="pre"` (Swin V1): `s = x + residual`, returns `(s, LN(s))`. `order="post"` (Swin V2's res-post-norm,
    arXiv:2111.09883, figure 1): returns `x + LN(residual)`.

    The sum has the wider of the two dtypes: under mixed precision `x` is fp32 and `residual`, what a branch found,
    fp16 or bf16.

    Args:
        dtype: of `LN(s)` with "pre", of the result with "post"; that of the sum when None.

    Raises:
        ValueError: as `layer_norm`; another `order`; `x` and `residual` of different shape.
    """
    check_tensors(x=x, residual=residual)
    check_parameters(x, weight, bias, eps, dtype)
    if order not in ("pre", "post"):
        raise ValueError(f"order={order!r}: choose 'pre' (Swin V1) or 'post' (Swin V2)")
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape")
    wide = torch.promote_types(x.dtype, residual.dtype)
    if use_triton(impl, residual, limit(x)) and use_triton(impl, x):
        mode = PRE if order == "pre" else POST
        y, total, _, _ = _norm(x, residual, weight, bias, eps, mode, dtype or wide, wide)
        return (total, y) if order == "pre" else y
    if order == "post":
        return (x + layer_norm_torch(residual, weight, bias, eps, wide)).to(dtype or wide)
    total = x + residual
    return total, layer_norm_torch(total, weight, bias, eps, dtype)


def limit(x: Tensor) -> str:
    """Why the kernels cannot take these channels; empty when they can."""
    C = x.shape[-1]
    return (
        "" if C <= MAX_CHANNELS else f"{C} channels are more than {MAX_CHANNELS}, what one program can hold"
    )


def check_parameters(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype | None) -> None:
    """Refuse a weight and a bias that do not fit the channels of `x`, a negative `eps` and whole numbers.

    Raises:
        ValueError: names the shapes, or the value.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    check_number("eps", eps, 0)
    check_dtype(dtype)
    if x.ndim == 0 or weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
        raise ValueError(f"{shapes}: weight and bias need one number for each of x's channels")
    if x.shape[-1] == 0:
        raise ValueError(f"x {tuple(x.shape)}: at least one channel is needed")


# --- what to expect


def layer_norm_cost(rows: int, C: int, itemsize: int, backward: bool = False) -> Cost:
    """LayerNorm of `(rows, C)`: eager PyTorch reads and writes as the kernel does, in fp32 or one dtype."""
    if backward:
        moved = 3 * rows * C * itemsize + 8 * rows  # dy, x, dx; two statistics
        return Cost(
            2, 2, moved + 2 * rows * C * itemsize, moved, 14 * rows * C
        )  # dW and dB read dy and x again
    moved = 2 * rows * C * itemsize + 8 * rows
    return Cost(1, 1, moved, moved, 8 * rows * C)


def add_layer_norm_cost(rows: int, C: int, itemsize: int) -> Cost:
    """Addition, then LayerNorm of the sum: the sum is not read again."""
    one = rows * C * itemsize
    return Cost(2, 1, 5 * one + 8 * rows, 4 * one + 8 * rows, 9 * rows * C)


def specs() -> list[Spec]:
    """The launches to compile for a report: stages 1 and 4 of Swin-T at batch 32."""
    found = []
    for C, rows in ((96, 32 * 56 * 56), (768, 32 * 7 * 7)):
        for mode, name, wide in (
            (PLAIN, f"layer_norm[C={C}]", ()),
            (PRE, f"add_layer_norm[C={C}]", ()),
            (PRE, f"add_layer_norm[C={C}, fp32 sum]", ("x_ptr", "sum_ptr", "dsum_ptr", "dx_ptr")),
        ):
            BLOCK_R, BLOCK_C, warps = tile(C, mixed=bool(wide))
            tiles = {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C, "MODE": mode}
            found += norm_specs(
                name, (_forward_kernel, _backward_kernel), {"rows": rows, "C": C}, tiles, warps, wide
            )
    return found


def norm_specs(
    label: str,
    kernels: tuple[Any, Any],
    sizes: dict[str, int],
    tiles: dict[str, int],
    warps: int,
    wide: Sequence[str] = (),
) -> list[Spec]:
    """Forward and backward pass of an operation with LayerNorm; what is `wide` stays fp32, as under autocast."""
    forward, backward = kernels
    pointers = dict.fromkeys((*PARAMETERS, *wide), "fp32")
    dtypes = HALVES if wide else FLOATS
    return [
        Spec(label, forward, pointers, sizes | {"eps": 1e-5}, tiles, warps, dtypes=dtypes),
        Spec(f"{label} backward", backward, pointers, sizes, tiles, warps, dtypes=dtypes),
    ]
