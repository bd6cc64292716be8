"""Numbers as int8 and a scale: `x` is about `scale * q`, with whole q from -128 to 127 and no zero point.

Rounding goes to the nearest whole number, halves to the even one; what is too large saturates. ONNX's QuantizeLinear
and `torch.quantize_per_tensor` do the same. The two operations here are passes over memory of their own: the other
kernels quantise what they hold in registers, with the same function.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .cost import Cost
from .launch import DTYPES, ceil_div, no_gradient, tl, triton, use_triton
from .spec import Spec

LOW, HIGH = -128, 127
BLOCK, WARPS = 4096, 8  # numbers of a program


# --- the maths, in PyTorch


def quantize_torch(x: Tensor, scale: Tensor) -> Tensor:
    """`x` as int8; `scale` broadcasts against it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) / scale.to(wide)).round().clamp(LOW, HIGH).to(torch.int8)


# --- the arithmetic of numbers that lie in registers, for all kernels that quantise


@triton.jit
def to_int8(x, scale):
    """fp32 as int8: `x / scale`, rounded to the nearest whole number, halves to the even one, saturated.

    Adding 1.5 * 2^23 leaves no bits for fractions, so the addition itself rounds, as fp32 always does.
    """
    steps = tl.minimum(tl.maximum(tl.math.div_rn(x, scale), -128.0), 127.0)
    return ((steps + 12582912.0) - 12582912.0).to(tl.int8)


# --- the kernels


@triton.jit
def _quantize_kernel(
    x_ptr,  # (n,)
    scale_ptr,  # (1,) fp32
    q_ptr,  # (n,) int8
    n,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    scale = tl.zeros((BLOCK,), tl.float32) + tl.load(scale_ptr)
    tl.store(q_ptr + at, to_int8(x, scale), mask=at < n)


@triton.jit
def _dequantize_kernel(
    q_ptr,  # (n,) int8
    scale_ptr,  # (1,) fp32
    x_ptr,  # (n,)
    n,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + at, mask=at < n, other=0)
    tl.store(x_ptr + at, q.to(tl.float32) * tl.load(scale_ptr), mask=at < n)


# --- launching them


@torch.library.custom_op("swin_lessons::quantize", mutates_args=())
def _quantize(x: Tensor, scale: Tensor) -> Tensor:
    """`quantize` by Triton."""
    x, q = x.contiguous(), x.new_empty(x.shape, dtype=torch.int8)
    if n := x.numel():
        _quantize_kernel[(ceil_div(n, BLOCK),)](x, scale, q, n, BLOCK, num_warps=WARPS)
    return q


@_quantize.register_fake
def _(x, scale):
    return x.new_empty(x.shape, dtype=torch.int8)


@torch.library.custom_op("swin_lessons::dequantize", mutates_args=())
def _dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` by Triton."""
    q, x = q.contiguous(), q.new_empty(q.shape, dtype=dtype)
    if n := q.numel():
        _dequantize_kernel[(ceil_div(n, BLOCK),)](q, scale, x, n, BLOCK, num_warps=WARPS)
    return x


@_dequantize.register_fake
def _(q, scale, dtype):
    return q.new_empty(q.shape, dtype=dtype)


# --- the operations


def quantize(x: Tensor, scale: Tensor | float, *, impl: str = "auto") -> Tensor:
    """`x` as int8, `(...)` -> `(...)`: `x / scale` rounded, halves to even, saturated at -128 and 127.

    Args:
        scale: one positive number. As a tensor on the device of `x` it costs no copy.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: `x` is not floating point, or the scale is not one positive number; with impl="triton", a dtype
            other than fp32, fp16 and bf16, or a gradient asked for.
    """
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}: quantisation starts from floating point")
    scale = scale_tensor(scale, x, "scale")
    return (
        _quantize(x, scale) if use_triton(impl, x, no_gradient("quantize", x)) else quantize_torch(x, scale)
    )


def dequantize(
    q: Tensor, scale: Tensor | float, *, dtype: torch.dtype = torch.float32, impl: str = "auto"
) -> Tensor:
    """`scale * q` in `dtype`, `(...)` -> `(...)`.

    Args:
        q: int8.
        scale: one positive number.
        dtype: fp32, fp16 or bf16.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: `q` is not int8, the scale is not one positive number, or another `dtype`.
    """
    check_int8(q=q)
    check_result(dtype)
    scale = scale_tensor(scale, q, "scale")
    if use_triton_int8(impl, q):
        return _dequantize(q, scale, dtype)
    return (q.float() * scale).to(dtype)


# --- what callers may ask for


def scale_tensor(scale: Tensor | float, like: Tensor, name: str, n: int = 1) -> Tensor:
    """A scale as `(1,)`, or `(n,)` if it has so many numbers; fp32, contiguous, on the device of `like`.

    Raises:
        ValueError: another shape or device; a number that is not finite and positive. Tensors on a GPU are not looked
            into, which would wait for it.
    """
    found = torch.as_tensor(scale, dtype=torch.float32)
    if not isinstance(scale, Tensor):
        found = found.to(like.device)
    if found.device != like.device:
        raise ValueError(f"{name} is on {found.device} and the numbers on {like.device}")
    if found.numel() not in (1, n) or found.ndim > 1:
        wanted = "one number" if n == 1 else f"one number, or {n}"
        raise ValueError(f"{name} is {tuple(found.shape)}: {wanted} is needed")
    if isinstance(scale, (int, float)) and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name}={scale}: a scale is finite and positive")
    readable = type(found) is Tensor and found.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and not bool((found.isfinite() & (found > 0)).all()):
        raise ValueError(f"{name} holds {found.min():g} to {found.max():g}: scales are finite and positive")
    return found.reshape(-1).contiguous()


def check_int8(**tensors: Tensor) -> None:
    """Refuse what is not int8. Raises ValueError with its name."""
    for name, t in tensors.items():
        if t.dtype != torch.int8:
            raise ValueError(f"{name} is {t.dtype}: int8 is needed; kernels.quantize makes it")


def check_result(dtype: torch.dtype) -> None:
    """Refuse a dtype that results cannot have. Raises ValueError."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: choose torch.float32, torch.float16 or torch.bfloat16")


def use_triton_int8(impl: str, x: Tensor, limit: str = "") -> bool:
    """`use_triton` for an operation on int8: the device decides, not the dtype."""
    return use_triton(impl, torch.empty(0, device=x.device), limit)


# --- what to expect


def quantize_cost(n: int, itemsize: int) -> Cost:
    """n numbers of `itemsize` bytes to int8. PyTorch: divide, round, clamp, cast, each reads and writes."""
    return Cost(4, 1, 7 * n * itemsize + n, n * itemsize + n, 3 * n)


def specs() -> list[Spec]:
    """The launches to compile for a report: the map of Swin-T's stage 1 at batch 32."""
    n, pointers = 32 * 56 * 56 * 96, {"scale_ptr": "fp32", "q_ptr": "i8"}
    kernels: tuple[tuple[str, Any], ...] = (
        ("quantize", _quantize_kernel),
        ("dequantize", _dequantize_kernel),
    )
    return [
        Spec(name, kernel, pointers, {"n": n}, {"BLOCK": BLOCK}, WARPS, dtypes=("fp16",))
        for name, kernel in kernels
    ]
