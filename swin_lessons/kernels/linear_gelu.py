"""The first half of an MLP, a linear layer and its GELU, with the GELU in the epilogue of the matrix product.

The product is written once, after bias and GELU, instead of written, read and written again. Training keeps the rows
before the GELU too, since its derivative needs them: a write, but no read.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.fast import autocast_on
from .checks import check_tensors
from .cost import Cost
from .launch import ceil_div, interpreting, multiprocessors, once_only, tl, triton, use_triton
from .products import (
    FULL,
    GROUP,
    Tile,
    add_products,
    best_of,
    count_rows,
    float_tiles,
    gelu,
    over_tiles,
    precision,
    tile_origin,
)
from .spec import Spec

BLOCK_R, BLOCK_C = 16, 64  # tile of the backward pass
KEY = ("K", "N", "SAVE")  # a GPU looks for the best tile once for each


# --- the maths, in PyTorch


def linear_gelu_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (exact, by erf) of a linear layer."""
    return F.gelu(F.linear(x, weight, bias))


# --- the kernels


@triton.jit
def _forward_kernel(
    x_ptr,  # (M, K)
    weight_ptr,  # (N, K)
    bias_ptr,  # (N,)
    y_ptr,  # (M, N)
    linear_ptr,  # (M, N), what enters the GELU; written if SAVE
    M,
    K,
    N,
    SAVE: tl.constexpr,
    WIDE: tl.constexpr,  # operands to fp32 first: the interpreter cannot multiply bf16
    PRECISION: tl.constexpr,  # of fp32 operands: "ieee" or "tf32"
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row0, column0 = tile_origin(M, N, GROUP, BLOCK_M, BLOCK_N)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # inside the tile, where 32 bits are enough
    row_there, column_there = row < M - row0, column < N - column0
    x_ptr += row0.to(tl.int64) * K
    weight_ptr += column0.to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = add_products(
        total,
        x_ptr,
        row[:, None] * K,
        row_there,
        weight_ptr,
        column[None, :] * K,
        column_there,
        K,
        WIDE,
        PRECISION,
        BLOCK_K,
    )
    bias = tl.load(bias_ptr + column0 + column, mask=column_there, other=0.0).to(tl.float32)
    linear = total + bias[None, :]
    tile = row0.to(tl.int64) * N + column0
    at = row[:, None] * N + column[None, :]
    there = row_there[:, None] & column_there[None, :]
    if SAVE:
        tl.store(linear_ptr + tile + at, linear, mask=there)
    y = gelu(linear)
    tl.store(y_ptr + tile + at, y, mask=there)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (M, N)
    linear_ptr,  # (M, N)
    dlinear_ptr,  # (M, N)
    dbias_ptr,  # (programs along the rows, N) fp32: partial sums
    M,
    N,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tiles = tl.cdiv(N, BLOCK_C)
    program, programs = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    column = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(program, tl.cdiv(M, BLOCK_R), programs):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        there = (row < M)[:, None] & (column < N)[None, :]
        at = row[:, None] * N + column[None, :]
        dy = tl.load(dy_ptr + at, mask=there, other=0.0).to(tl.float32)
        z = tl.load(linear_ptr + at, mask=there, other=0.0).to(tl.float32)
        below = 0.5 * (1 + tl.erf(z * 0.7071067811865476))  # of the normal distribution, the part below z
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)  # 1 / sqrt(2 pi)
        dlinear = dy * (below + z * density)
        tl.store(dlinear_ptr + at, dlinear, mask=there)
        dbias += dlinear
    tl.store(dbias_ptr + program * N + column, tl.sum(dbias, 0), mask=column < N)


# --- launching them


@torch.library.custom_op("swin_lessons::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """`(y, linear)`; `linear`, which the backward pass needs, is empty unless `save`."""
    (N, K), M = weight.shape, count_rows(x)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y = x.new_empty(*x.shape[:-1], N)
    linear = torch.empty_like(y) if save else x.new_empty(0)
    if y.numel():
        wide = interpreting() and x.dtype == torch.bfloat16
        args = (x, weight, bias, y, linear, M, K, N, save, wide, precision(), GROUP)
        kernel, sides = best_of(_forward_kernel, float_tiles(K, x.element_size()), KEY)
        kernel[over_tiles(M, N)](*args, **sides)
    return y, linear


@_linear_gelu.register_fake
def _(x, weight, bias, save):
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


@torch.library.custom_op("swin_lessons::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """`(dlinear, dbias)`: the gradient of what entered the GELU, and its sum over rows in fp32."""
    dy, linear = dy.contiguous(), linear.contiguous()
    M, N = count_rows(linear), linear.shape[-1]
    across = ceil_div(N, BLOCK_C)
    along = max(1, min(ceil_div(M, BLOCK_R), 8 * multiprocessors(linear) // across))
    dlinear = torch.empty_like(linear)
    dbias = torch.empty(along, N, dtype=torch.float32, device=linear.device)
    if N:
        _backward_kernel[(along * across,)](dy, linear, dlinear, dbias, M, N, BLOCK_R, BLOCK_C)
    return dlinear, dbias.sum(0)


@_gelu_backward.register_fake
def _(dy, linear):
    return linear.new_empty(linear.shape), linear.new_empty(linear.shape[-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, bias, _ = inputs
    _, linear = output
    ctx.bias_dtype = bias.dtype
    ctx.mark_non_differentiable(linear)
    ctx.save_for_backward(x, weight, linear)


def _gradients(ctx: Any, dy: Tensor, _: Tensor) -> tuple:
    x, weight, linear = ctx.saved_tensors
    dlinear, dbias = _gelu_backward(dy, linear)
    dx = dlinear @ weight if ctx.needs_input_grad[0] else None
    dweight = None
    if ctx.needs_input_grad[1]:
        dweight = dlinear.reshape(-1, weight.shape[0]).t() @ x.reshape(-1, weight.shape[1])
    return dx, dweight, dbias.to(ctx.bias_dtype), None


_linear_gelu.register_autograd(_gradients, setup_context=_keep)
once_only(_gelu_backward)


# --- the operation


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, *, impl: str = "auto") -> Tensor:
    """GELU (exact, by erf) of a linear layer: `(..., K)` -> `(..., N)`; sums in fp32.

    What enters the GELU is kept only where a gradient will be asked for. Under autocast the operands are cast first, as
    those of `F.linear` are. Products of fp32 are exact unless `torch.backends.cuda.matmul` allows TF32.

    Args:
        weight: `(N, K)`, as in `nn.Linear`.
        bias: `(N,)`.
        impl: "auto", "torch" or "triton". Triton tries a few tiles at its first launch for a `(K, N)` on a GPU.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; with impl="triton", a dtype other than fp32, fp16 and
            bf16.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    if autocast_on(x.device) and x.dtype != torch.float64:
        x, weight, bias = (t.to(torch.get_autocast_dtype(x.device.type)) for t in (x, weight, bias))
    _check(x, weight, bias)
    if not use_triton(impl, x):
        return linear_gelu_torch(x, weight, bias)
    save = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
    return _linear_gelu(x, weight, bias, save)[0]


def _check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1] or bias.shape != weight.shape[:1]:
        raise ValueError(f"{shapes}: they must be (..., K), (N, K) and (N,)")
    if len({t.dtype for t in (x, weight, bias)}) > 1:
        kinds = ", ".join(str(t.dtype) for t in (x, weight, bias))
        raise ValueError(
            f"x, weight and bias are {kinds}: they must be alike; cast them, or use torch.autocast"
        )


# --- what to expect


def linear_gelu_cost(
    M: int, K: int, N: int, itemsize: int, training: bool = False, backward: bool = False
) -> Cost:
    """`(M, K)` to `(M, N)`: a linear layer with its bias, then GELU; `training` keeps what enters the GELU.

    Backward, both have the two products; before, the derivative of GELU and the sum of the bias are separate.
    """
    operands, wide = (M * K + N * K + N) * itemsize, M * N * itemsize
    if backward:
        products = 2 * (wide + (M * K + N * K) * itemsize)
        rest = 3 * wide + N * itemsize
        return Cost(4, 4, products + rest + wide, products + rest, 4 * M * K * N)
    return Cost(2, 1, operands + 3 * wide, operands + (1 + training) * wide, 2 * M * K * N)


def specs() -> list[Spec]:
    """The launches to compile for a report: the first layer of the MLP in stages 1 and 3 of Swin-T at batch 32."""
    found = []
    for C, M in ((96, 32 * 56 * 56), (384, 32 * 14 * 14)):
        sizes, label = {"M": M, "K": C, "N": 4 * C}, f"linear_gelu[{C}, {4 * C}]"
        for itemsize, dtypes in ((4, ("fp32",)), (2, ("fp16", "bf16"))):
            for tile in float_tiles(C, itemsize):
                found.append(_spec(f"{label} {tile.name}", sizes, tile, dtypes))
        found.append(_spec(f"{label} tf32", sizes, FULL[0], ("fp32",), "tf32"))
        found.append(
            Spec(
                f"{label} backward",
                _backward_kernel,
                {"dbias_ptr": "fp32"},
                {"M": M, "N": 4 * C},
                {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C},
            )
        )
    return found


def _spec(
    name: str, sizes: dict[str, int], tile: Tile, dtypes: tuple[str, ...], products: str = "ieee"
) -> Spec:
    fixed = {"SAVE": True, "WIDE": False, "PRECISION": products, "GROUP": GROUP}
    return Spec(name, _forward_kernel, {}, sizes, fixed | tile.sides, tile.num_warps, tile.num_stages, dtypes)
