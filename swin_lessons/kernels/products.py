"""Tiles of a matrix product: what all kernels around one share, with floats and with whole numbers.

Programs take the tiles of the product in groups of rows, so that those that run side by side share rows of `x` and of
the weight in the L2 cache. Both operands lie along K in memory, as `nn.Linear` keeps its weight: this is what matrix
instructions for INT8 read without a transposition.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import ceil_div, interpreting, tl, triton

GROUP = 8  # rows of tiles that are taken together
EXACT_K = 1024  # 128 * 128 * 1024 = 2^24: up to here fp32 adds up products of int8 without rounding


class Tile(NamedTuple):
    """A way to cut the product: the sides of a program's tile, its step along K, its warps, loads under way."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int

    @property
    def sides(self) -> dict[str, int]:
        """The `tl.constexpr` arguments of the kernel."""
        return {"BLOCK_M": self.BLOCK_M, "BLOCK_N": self.BLOCK_N, "BLOCK_K": self.BLOCK_K}

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.BLOCK_M}x{self.BLOCK_N}x{self.BLOCK_K}"


# Those that spill no register on sm_80, 86, 89 and 90; 128 x 128 by 4 warps and 128 x 256 by 8, usual elsewhere, do.
HALF_32 = [Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 4), Tile(64, 128, 32, 8, 4), Tile(128, 128, 32, 8, 4)]
HALF_64 = [
    Tile(128, 64, 64, 8, 3),
    Tile(64, 64, 64, 4, 3),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 32, 8, 4),
]
FULL = [Tile(64, 64, 16, 4, 3), Tile(128, 64, 16, 8, 3), Tile(128, 128, 16, 8, 3)]


# --- in a kernel


@triton.jit
def tile_origin(M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and first column of this program's tile of an `(M, N)` product."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP  # row of tiles
    height = min(tiles_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def add_products(
    total,  # (BLOCK_M, BLOCK_N), fp32 or int32: what to add to
    x_ptr,
    x_at,  # (BLOCK_M, 1): where each row of x begins
    x_there,  # (BLOCK_M,): rows that count as zeros where not
    weight_ptr,
    weight_at,  # (1, BLOCK_N): where each row of the weight begins
    weight_there,  # (BLOCK_N,)
    K,
    WIDE: tl.constexpr,  # operands to fp32 first: the interpreter cannot multiply bf16
    PRECISION: tl.constexpr,  # of fp32 operands: "ieee" or "tf32"
    BLOCK_K: tl.constexpr,
):
    """`total` plus products of rows of `x` and of the weight, K numbers long."""
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + (x_at + k[None, :]), mask=x_there[:, None] & (k < K)[None, :], other=0)
        weight = tl.load(
            weight_ptr + (weight_at + k[:, None]),
            mask=weight_there[None, :] & (k < K)[:, None],
            other=0,
        )
        if WIDE:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def gelu(x):
    """GELU (exact, by erf) in fp32."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)


# --- launching


def float_tiles(K: int, itemsize: int) -> list[Tile]:
    """What is worth trying for rows of `K` numbers: steps along K that waste nothing where K is 96, as in stage 1."""
    if itemsize == 4:
        return FULL
    return HALF_64 if K % 64 == 0 else HALF_32


def best_of(kernel: Any, choices: Sequence[Tile], key: Sequence[str]) -> tuple[Any, dict[str, int]]:
    """What to launch, and the sides that it has to be told: a GPU finds the best, the interpreter takes the first."""
    return (kernel, choices[0].sides) if interpreting() else (tuned(kernel, tuple(choices), tuple(key)), {})


@cache
def tuned(kernel: Any, choices: tuple[Tile, ...], key: tuple[str, ...]) -> Any:
    """The kernel, which takes the fastest of the choices at its first launch for values of `key`."""
    configs = [triton.Config(t.sides, num_warps=t.num_warps, num_stages=t.num_stages) for t in choices]
    return triton.autotune(configs, key=list(key))(kernel)


def over_tiles(M: int, N: int) -> Callable[[dict[str, int]], tuple[int]]:
    """The grid of an `(M, N)` product."""
    return lambda tile: (ceil_div(M, tile["BLOCK_M"]) * ceil_div(N, tile["BLOCK_N"]),)


def precision() -> str:
    """Of products of fp32, as PyTorch's own: 19 bits only where they were asked for."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def count_rows(x: Tensor) -> int:
    """Rows of `(..., K)`."""
    return math.prod(x.shape[:-1])


# --- whole numbers, in PyTorch


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """`(M, K)` times the rows of `(N, K)`, both int8: every sum exact, `(M, N)` int32, on any device.

    A GPU has INT8 units behind `torch._int_mm`, which wants more than 16 rows and multiples of 8: padded with zeros.
    Elsewhere fp32 does it, 1,024 products at a time, and adds up no more than it can hold.
    """
    (M, K), N = x.shape, weight.shape[0]
    if x.is_cuda:
        rows, more, outputs = max(0, 17 - M), -K % 8, -N % 8
        padded = torch.nn.functional.pad(x, (0, more, 0, rows))
        wide = torch.nn.functional.pad(weight, (0, more, 0, outputs))
        return torch._int_mm(padded, wide.t())[:M, :N]
    total = torch.zeros(M, N, dtype=torch.int32, device=x.device)
    for start in range(0, K, EXACT_K):
        part = slice(start, start + EXACT_K)
        total += (x[:, part].float() @ weight[:, part].float().t()).int()
    return total
