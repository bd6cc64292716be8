"""Linear layers of inference that write where the next operation reads: no transposition, no pass for an addition.

One product, three ways to write it. `linear` writes rows. `linear_residual` adds the shortcut, and puts rows that come
in windows back to their places on the map. `qkv_linear` takes tokens from the map, window by window, and writes
queries, keys and values apart, head by head, as attention reads them.

None has a backward pass: training runs `F.linear`, whose products a library does as well.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.fast import autocast_on
from ..models.windows import Size
from .cost import Cost
from .launch import interpreting, no_gradient, tl, triton, use_triton
from .products import (
    GROUP,
    Tile,
    add_products,
    best_of,
    count_rows,
    float_tiles,
    over_tiles,
    precision,
    tile_origin,
)
from .spec import HALVES, Spec
from .window_rows import check_map, cut_torch, layout_of, map_rows, paste_torch, window_shape

KEY = ("K", "N", "WRITE", "RESIDUAL")  # a GPU looks for the best tile once for each
ROWS, MAP, HEADS = 0, 1, 2  # where results go: row by row; to the map; to (3, windows, heads, N, head_dim)


# --- the kernel


@triton.jit
def _forward_kernel(
    x_ptr,  # (M, K); where WRITE is HEADS the map (B, H, W, K)
    weight_ptr,  # (N, K)
    bias_ptr,  # (N,) where BIAS
    residual_ptr,  # like y, where RESIDUAL
    y_ptr,  # (M, N), (B, H, W, N) or (3, windows, N / 3 / DIM, WINDOW_H * WINDOW_W, DIM)
    M,
    K,
    N,
    H,
    W,
    shift_y,
    shift_x,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    DIM: tl.constexpr,
    WRITE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row0, column0 = tile_origin(M, N, GROUP, BLOCK_M, BLOCK_N)
    inside, column = tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
    row = row0 + inside
    row_there, column_there = row < M, column < N
    place, is_token = row.to(tl.int64), row_there
    if WRITE != 0:
        place, is_token = map_rows(row, M, H, W, shift_y, shift_x, WINDOW_H, WINDOW_W)
    x_at = row.to(tl.int64)[:, None] * K
    x_there = row_there
    if WRITE == 2:
        x_at, x_there = place[:, None] * K, is_token  # padding counts as zeros
    weight_at = column.to(tl.int64)[None, :] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = add_products(
        total, x_ptr, x_at, x_there, weight_ptr, weight_at, column_there, K, WIDE, PRECISION, BLOCK_K
    )
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column_there, other=0.0).to(tl.float32)[None, :]
    if WRITE == 2:
        TOKENS: tl.constexpr = WINDOW_H * WINDOW_W
        heads, windows = N // (3 * DIM), M // TOKENS
        part, head, channel = column // DIM // heads, column // DIM % heads, column % DIM
        window, token = row // TOKENS, row % TOKENS
        first = (part.to(tl.int64)[None, :] * windows + window[:, None]) * heads + head[None, :]
        at = (first * TOKENS + token[:, None]) * DIM + channel[None, :]
        there = row_there[:, None] & column_there[None, :]
    else:
        at = place[:, None] * N + column[None, :]
        there = is_token[:, None] & column_there[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total, mask=there)


# --- launching it


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    M: int,
    write: int,
    *sizes: int,
) -> None:
    """One product of M rows; `sizes` are a `window_rows.Layout` and the channels of a head."""
    N, K = weight.shape
    if not y.numel():
        return
    x, weight = x.contiguous(), weight.contiguous()
    tensors = (
        *(x, weight, weight if bias is None else bias.contiguous()),
        *(weight if residual is None else residual.contiguous(), y),
    )
    flags = {
        "WRITE": write,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "WIDE": interpreting() and x.dtype == torch.bfloat16,
        "PRECISION": precision(),
    }
    kernel, sides = best_of(_forward_kernel, float_tiles(K, x.element_size()), KEY)
    kernel[over_tiles(M, N)](*tensors, M, K, N, *sizes, **flags, GROUP=GROUP, **sides)


@torch.library.custom_op("swin_lessons::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Rows of `x` to rows, plus `residual`."""
    y = _rows_of(x, weight, residual)
    _launch(x, weight, bias, residual, y, count_rows(x), ROWS, 1, 1, 0, 0, 1, 1, 1)
    return y


def _rows_of(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    dtype = x.dtype if residual is None else residual.dtype
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)


@_linear.register_fake
def _(x, weight, bias, residual):
    return _rows_of(x, weight, residual)


@torch.library.custom_op("swin_lessons::linear_to_map", mutates_args=())
def _linear_to_map(
    windows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, layout: Sequence[int]
) -> Tensor:
    """Windows `(n, N, K)` to the map, plus the map `residual`."""
    y = residual.new_empty(residual.shape)
    _launch(windows, weight, bias, residual, y, count_rows(windows), MAP, *layout, 1)
    return y


@_linear_to_map.register_fake
def _(windows, weight, bias, residual, layout):
    return residual.new_empty(residual.shape)


@torch.library.custom_op("swin_lessons::qkv_linear", mutates_args=())
def _qkv_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, layout: Sequence[int]
) -> Tensor:
    """The map `x` to queries, keys and values."""
    y = _heads_of(x, weight, num_heads, layout)
    _launch(x, weight, bias, None, y, y.shape[1] * y.shape[3], HEADS, *layout, y.shape[-1])
    return y


def _heads_of(x: Tensor, weight: Tensor, num_heads: int, layout: Sequence[int]) -> Tensor:
    windows, tokens, _ = window_shape(x.shape, layout[-2:])
    return x.new_empty(3, windows, num_heads, tokens, weight.shape[0] // (3 * num_heads))


@_qkv_linear.register_fake
def _(x, weight, bias, num_heads, layout):
    return _heads_of(x, weight, num_heads, layout)


# --- the operations


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """A linear layer, `(..., K)` -> `(..., N)`; sums in fp32. Triton's has no gradient.

    Under autocast the operands are cast first, as those of `F.linear` are. Products of fp32 are exact unless
    `torch.backends.cuda.matmul` allows TF32.

    Args:
        weight: `(N, K)`, as in `nn.Linear`.
        bias: `(N,)`.
        impl: "auto", "torch" or "triton". "auto" takes PyTorch where a gradient is asked for. Triton tries a few tiles
            at its first launch for a `(K, N)` on a GPU.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; with impl="triton", a dtype other than fp32, fp16 and
            bf16, or a gradient asked for.
    """
    x, weight, bias = _cast(x, weight, bias)
    _check(x, weight, bias)
    if use_triton(impl, x, no_gradient("linear", x, weight, bias)):
        return _linear(x, weight, bias, None)
    return F.linear(x, weight, bias)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    window_size: Size | None = None,
    shift_size: Size = (0, 0),
    impl: str = "auto",
) -> Tensor:
    """`residual + linear(x)` in one pass, in the dtype of `residual`; sums in fp32. Triton's has no gradient.

    Without `window_size`: `(..., K)` and `(..., N)` -> `(..., N)`. With it, rows of windows go to their places on the
    map: `(B * num_windows, h * w, K)` and `(B, H, W, N)` -> `(B, H, W, N)`. Rows of padding are dropped.

    Args:
        weight, bias: as in `linear`.
        residual: of any floating dtype: fp32 beside halves keeps the sum exact over many blocks.
        window_size, shift_size: how the map was cut, in tokens: as in `reverse_unshift`.
        impl: as in `linear`.

    Raises:
        ValueError: as `linear`; windows that do not cover the map of `residual`.
    """
    x, weight, bias = _cast(x, weight, bias)
    _check(x, weight, bias)
    if window_size is None:
        expected = (*x.shape[:-1], weight.shape[0])
    else:
        check_map(residual, window_size, shift_size)
        windows = (*window_shape(residual.shape, window_size)[:2], x.shape[-1])
        if x.shape != windows:
            raise ValueError(f"x is {tuple(x.shape)}: windows {windows} cover a map {tuple(residual.shape)}")
        expected = (*residual.shape[:-1], weight.shape[0])
    if residual.shape != expected or not residual.is_floating_point() or residual.device != x.device:
        found = f"{tuple(residual.shape)} of {residual.dtype} on {residual.device}"
        raise ValueError(f"residual is {found}: {expected}, floating point, on {x.device} is needed")
    limit = no_gradient("linear_residual", x, weight, bias, residual)
    if use_triton(impl, x, limit) and use_triton(impl, residual):
        if window_size is None:
            return _linear(x, weight, bias, residual)
        return _linear_to_map(x, weight, bias, residual, list(layout_of(residual, window_size, shift_size)))
    y = F.linear(x, weight, bias)
    if window_size is not None:
        y = paste_torch(y, residual.shape[1], residual.shape[2], window_size, shift_size)
    return (residual + y).to(residual.dtype)


def qkv_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_size: Size,
    shift_size: Size = (0, 0),
    *,
    num_heads: int,
    impl: str = "auto",
) -> Tensor:
    """Queries, keys and values of a map, window by window and head by head.

    `(B, H, W, C)` -> `(3, B * num_windows, num_heads, h * w, head_dim)`. The map is padded with zeros, rolled, cut as
    in `shift_partition`, by arithmetic on indices. `y.unbind(0)` is what `F.scaled_dot_product_attention` takes.
    Triton's has no gradient.

    Args:
        weight, bias: `(3C, C)` and `(3C,)`: queries, keys and values, each head by head.
        window_size, shift_size: in tokens.
        impl: as in `linear`.

    Raises:
        ValueError: as `linear`; what is no map, no window, or no number of heads.
    """
    x, weight, bias = _cast(x, weight, bias)
    check_map(x, window_size, shift_size)
    _check(x, weight, bias)
    if num_heads < 1 or weight.shape[0] % (3 * num_heads):
        raise ValueError(f"{weight.shape[0]} outputs are not 3 x {num_heads} heads of one size")
    if use_triton(impl, x, no_gradient("qkv_linear", x, weight, bias)):
        return _qkv_linear(x, weight, bias, num_heads, list(layout_of(x, window_size, shift_size)))
    y = F.linear(cut_torch(x, window_size, shift_size), weight, bias)
    return y.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).contiguous()


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast, the operands in its dtype."""
    if not autocast_on(x.device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if bias is not None:
        shapes += f", bias {tuple(bias.shape)}"
    wrong = x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]
    if wrong or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"{shapes}: they must be (..., K), (N, K) and (N,)")
    operands = [t for t in (x, weight, bias) if t is not None]
    if len({(t.dtype, t.device) for t in operands}) > 1 or not x.is_floating_point():
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in operands)
        raise ValueError(
            f"x, weight and bias are {kinds}: floating point, and alike, is needed; cast them, or use torch.autocast"
        )


# --- what to expect


def linear_cost(M: int, K: int, N: int, itemsize: int) -> Cost:
    """`(M, K)` to `(M, N)`: a library adds the bias in its epilogue, too."""
    moved = (M * K + N * K + N + M * N) * itemsize
    return Cost(1, 1, moved, moved, 2 * M * K * N)


def linear_residual_cost(
    M: int, K: int, N: int, itemsize: int, *, window: bool = False, shifted: bool = False
) -> Cost:
    """`(M, K)` to `(M, N)` plus `(M, N)`. Before: the product; windows back to a map; the addition.

    Putting windows back copies once, and where they are shifted `torch.roll` copies twice more.
    """
    operands, one = (M * K + N * K + N) * itemsize, M * N * itemsize
    copies = window + 2 * shifted
    return Cost(2 + copies, 1, operands + (4 + 2 * copies) * one, operands + 2 * one, 2 * M * K * N)


def qkv_linear_cost(tokens: int, C: int, itemsize: int, *, shifted: bool = False) -> Cost:
    """A map of C channels to windows of queries, keys and values. Before: (two rolls,) cut, product, transposition."""
    one, weights = tokens * C * itemsize, (3 * C * C + 3 * C) * itemsize
    copies = 1 + 2 * shifted
    return Cost(2 + copies, 1, (2 * copies + 4 + 6) * one + weights, 4 * one + weights, 6 * tokens * C * C)


def specs() -> list[Spec]:
    """The launches to compile for a report: Swin-T at batch 32, stage 1, and the widest tile in stage 3."""
    found = []
    for name, write, K, N, side in (
        ("qkv_linear[C=96, w=7 shifted]", HEADS, 96, 288, 56),
        ("linear_residual[96, 96, to map]", MAP, 96, 96, 56),
        ("qkv_linear[C=384, w=7 shifted]", HEADS, 384, 1152, 14),
        ("linear_residual[1536, 384]", ROWS, 1536, 384, 14),
    ):
        tile = float_tiles(K, 2)[0 if side == 56 else 2]
        sizes = {"M": 32 * side * side, "K": K, "N": N, "H": side, "W": side, "shift_y": 3, "shift_x": 3}
        found.append(_spec(name, sizes, write, tile, HALVES))
    return found


def _spec(name: str, sizes: dict[str, int], write: int, tile: Tile, dtypes: tuple[str, ...]) -> Spec:
    fixed = {
        "WINDOW_H": 7,
        "WINDOW_W": 7,
        "DIM": 32,
        "WRITE": write,
        "BIAS": True,
        "RESIDUAL": write != HEADS,
        "WIDE": False,
        "PRECISION": "ieee",
        "GROUP": GROUP,
    }
    constants = fixed | tile.sides
    return Spec(name, _forward_kernel, {}, sizes, constants, tile.num_warps, tile.num_stages, dtypes)
