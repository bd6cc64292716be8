"""A linear layer in whole numbers: int8 times int8, summed in int32, and everything after that in the epilogue.

The sums never reach memory: scaled back, with bias, GELU and residual, they leave as halves, or again as int8 for the
next layer. Weights have a scale for each output, inputs one for all. Scales along K are not possible: they would have
to multiply each product before it is summed.

An input with a zero point z needs no other kernel: `sum((q - z) w) = sum(q w) - z sum(w)`, and the second part is a
constant for each output that belongs into the bias.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cost import Cost
from .int8 import check_int8, check_result, quantize_torch, scale_tensor, to_int8, use_triton_int8
from .launch import tl, triton
from .products import (
    GROUP,
    Tile,
    add_products,
    best_of,
    count_rows,
    gelu,
    integer_product,
    over_tiles,
    tile_origin,
)
from .spec import Spec

KEY = ("K", "N", "GELU", "RESIDUAL", "REQUANTIZE")  # a GPU looks for the best tile once for each

# Steps along K of 32 waste nothing where K is 96; one instruction takes 32.
INT8_32 = [Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 4), Tile(128, 128, 32, 8, 4)]
INT8_64 = [Tile(128, 64, 64, 8, 3), Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3)]


# --- the maths, in PyTorch


def int8_linear_torch(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    out_scale: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_linear` step by step: sum, scale back, add the bias, GELU, add the residual, quantise or cast."""
    sums = integer_product(x.reshape(-1, x.shape[-1]), weight)
    y = sums.float() * (x_scale * weight_scale)
    if bias is not None:
        y = y + bias.float()
    if gelu:
        y = F.gelu(y)
    y = y.view(*x.shape[:-1], weight.shape[0])
    if residual is not None:
        y = y + residual.float()
    return y.to(dtype) if out_scale is None else quantize_torch(y, out_scale)


# --- the kernel


@triton.jit
def _forward_kernel(
    x_ptr,  # (M, K) int8
    weight_ptr,  # (N, K) int8
    x_scale_ptr,  # (1,) fp32
    weight_scale_ptr,  # (N,) fp32, or (1,) unless CHANNELS
    bias_ptr,  # (N,) where BIAS
    residual_ptr,  # (M, N) where RESIDUAL
    out_scale_ptr,  # (1,) fp32, or (N,) where OUT_CHANNELS; where REQUANTIZE
    y_ptr,  # (M, N): int8 where REQUANTIZE
    M,
    K,
    N,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REQUANTIZE: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row0, column0 = tile_origin(M, N, GROUP, BLOCK_M, BLOCK_N)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    row_there, column_there = row < M - row0, column < N - column0
    x_ptr += row0.to(tl.int64) * K
    weight_ptr += column0.to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    x_at, weight_at = row[:, None] * K, column[None, :] * K
    total = add_products(
        total, x_ptr, x_at, row_there, weight_ptr, weight_at, column_there, K, False, "ieee", BLOCK_K
    )
    factor = tl.load(x_scale_ptr) * per_channel(weight_scale_ptr, column0 + column, column_there, CHANNELS)
    y = total.to(tl.float32) * factor[None, :]
    if BIAS:
        y += tl.load(bias_ptr + column0 + column, mask=column_there, other=0.0).to(tl.float32)[None, :]
    if GELU:
        y = gelu(y)
    tile = row0.to(tl.int64) * N + column0
    at, there = row[:, None] * N + column[None, :], row_there[:, None] & column_there[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + tile + at, mask=there, other=0.0).to(tl.float32)
    if REQUANTIZE:
        scale = per_channel(out_scale_ptr, column0 + column, column_there, OUT_CHANNELS)
        y = to_int8(y, tl.broadcast_to(scale[None, :], (BLOCK_M, BLOCK_N)))
    tl.store(y_ptr + tile + at, y, mask=there)


@triton.jit
def per_channel(ptr, column, there, CHANNELS: tl.constexpr):
    """A number for each column: its own, or the one that all have."""
    if CHANNELS:
        return tl.load(ptr + column, mask=there, other=1.0)
    return tl.load(ptr + 0 * column)


# --- launching it


def int8_tiles(K: int) -> list[Tile]:
    """What is worth trying for rows of `K` numbers."""
    return INT8_64 if K % 64 == 0 else INT8_32


@torch.library.custom_op("swin_lessons::int8_linear", mutates_args=())
def _int8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    out_scale: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_linear` by Triton."""
    (N, K), M = weight.shape, count_rows(x)
    x, weight = x.contiguous(), weight.contiguous()
    y = x.new_empty(*x.shape[:-1], N, dtype=torch.int8 if out_scale is not None else dtype)
    if y.numel():
        # an absent tensor is never read: any other stands for it
        tensors = (
            *(x, weight, x_scale, weight_scale),
            x_scale if bias is None else bias.contiguous(),
            x_scale if residual is None else residual.contiguous(),
            x_scale if out_scale is None else out_scale,
            y,
        )
        flags = {
            "CHANNELS": weight_scale.numel() > 1,
            "BIAS": bias is not None,
            "GELU": gelu,
            "RESIDUAL": residual is not None,
            "REQUANTIZE": out_scale is not None,
            "OUT_CHANNELS": out_scale is not None and out_scale.numel() > 1,
        }
        kernel, sides = best_of(_forward_kernel, int8_tiles(K), KEY)
        kernel[over_tiles(M, N)](*tensors, M, K, N, **flags, GROUP=GROUP, **sides)
    return y


@_int8_linear.register_fake
def _(x, weight, x_scale, weight_scale, bias, gelu, out_scale, residual, dtype):
    dtype = torch.int8 if out_scale is not None else dtype
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)


# --- the operation


def int8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | float,
    weight_scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    out_scale: Tensor | float | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """A linear layer of int8 by int8: `(..., K)` -> `(..., N)`, in a floating dtype, or as int8 with `out_scale`.

    `y = sum(x w) * x_scale * weight_scale + bias`, then GELU, then `+ residual`, then `y / out_scale`, rounded (halves
    to even) and saturated. Sums are exact in int32 up to K = 131,071; what follows is fp32. There is no gradient.

    Args:
        x: int8.
        weight: `(N, K)` int8, as `nn.Linear` keeps its weight.
        x_scale: one positive number; as a tensor on the device of `x` it costs no copy.
        weight_scale: `(N,)`, or one number.
        bias: `(N,)` of any floating dtype. A zero point z of `x` goes into it: subtract
            `z * x_scale * weight_scale * weight.sum(1)`.
        gelu: GELU (exact, by erf) after the bias.
        out_scale: of the result, one number or `(N,)`; the result is int8 then.
        residual: `(..., N)` of any floating dtype, added last.
        dtype: fp32, fp16 or bf16: of a result that is not int8; that of the residual when None, fp32 without one.
        impl: "auto", "torch" or "triton". Triton tries a few tiles at its first launch for a `(K, N)` on a GPU.

    Raises:
        ValueError: shapes, dtypes, devices or scales that do not fit.
    """
    check_int8(x=x, weight=weight)
    _check(x, weight, bias, residual, out_scale, dtype)
    N = weight.shape[0]
    x_scale = scale_tensor(x_scale, x, "x_scale")
    weight_scale = scale_tensor(weight_scale, x, "weight_scale", N)
    out = None if out_scale is None else scale_tensor(out_scale, x, "out_scale", N)
    if dtype is None:
        dtype = torch.float32 if residual is None else residual.dtype
    run: Any = _int8_linear if use_triton_int8(impl, x) else int8_linear_torch
    return run(x, weight, x_scale, weight_scale, bias, gelu, out, residual, dtype)


MAX_K = 131_071  # (2^31 - 1) / 128^2


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_scale: Any,
    dtype: torch.dtype | None,
) -> None:
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be (..., K) and (N, K)")
    if weight.shape[1] > MAX_K:
        raise ValueError(f"K={weight.shape[1]}: sums of more than {MAX_K} products may not fit int32")
    shape = (*x.shape[:-1], weight.shape[0])
    for name, t, wanted in (("bias", bias, shape[-1:]), ("residual", residual, shape)):
        if t is None:
            continue
        if t.shape != wanted or not t.is_floating_point():
            raise ValueError(f"{name} is {tuple(t.shape)} of {t.dtype}: floating point {wanted} is needed")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} asks for a gradient, which int8_linear does not have: use torch.no_grad()"
            )
    if len({t.device for t in (x, weight, bias, residual) if t is not None}) > 1:
        raise ValueError("x, weight, bias and residual must be on one device")
    if dtype is not None:
        check_result(dtype)
        if out_scale is not None:
            raise ValueError("the result is int8 with out_scale, and of a dtype without: give one of them")


# --- what to expect


def int8_linear_cost(
    M: int,
    K: int,
    N: int,
    itemsize: int,
    *,
    gelu: bool = False,
    residual: bool = False,
    requantize: bool = False,
) -> Cost:
    """`(M, K)` to `(M, N)` in int8; floats outside have `itemsize` bytes.

    Before, as separate kernels: the product writes int32, and one more reads it for scale and bias; GELU, addition and
    quantisation each read and write. After, the sums stay in registers. Bytes of scales and bias are counted once.
    """
    operands, small = M * K + N * K, N * (4 + itemsize)
    numbers = M * N
    before, launches = operands + 2 * 4 * numbers + numbers * itemsize + small, 2
    if gelu:
        before, launches = before + 2 * numbers * itemsize, launches + 1
    if residual:
        before, launches = before + 3 * numbers * itemsize, launches + 1
    if requantize:
        before, launches = before + numbers * (itemsize + 1), launches + 1
    after = operands + small + numbers * (1 if requantize else itemsize) + residual * numbers * itemsize
    return Cost(launches, 1, before, after, 2 * M * K * N)


def specs() -> list[Spec]:
    """The launches to compile for a report: the MLP of stages 1 and 3 of Swin-T at batch 32."""
    first, third = (32 * 56 * 56, 96, 384), (32 * 14 * 14, 384, 1536)
    found = [_spec("gelu, int8", *sizes, tile) for sizes in (first, third) for tile in int8_tiles(sizes[1])]
    back = (32 * 14 * 14, 1536, 384)
    return [*found, _spec("residual", *back, int8_tiles(back[1])[0])]


def _spec(label: str, M: int, K: int, N: int, tile: Tile) -> Spec:
    last = label == "residual"
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", *(() if last else ("y_ptr",))), "i8")
    pointers |= dict.fromkeys(("x_scale_ptr", "weight_scale_ptr", "out_scale_ptr"), "fp32")
    flags = {
        "CHANNELS": True,
        "BIAS": True,
        "GELU": not last,
        "RESIDUAL": last,
        "REQUANTIZE": not last,
        "OUT_CHANNELS": False,
        "GROUP": GROUP,
    }
    name, sizes = f"int8_linear[{K}, {N}, {label}] {tile.name}", {"M": M, "K": K, "N": N}
    constants = flags | tile.sides
    return Spec(name, _forward_kernel, pointers, sizes, constants, tile.num_warps, tile.num_stages, ("fp16",))
