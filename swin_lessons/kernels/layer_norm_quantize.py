"""LayerNorm that writes int8: what the next INT8 linear layer reads, in one pass and at half the bytes of halves.

Rows are normalised in registers, as in `layer_norm`, and quantised there with the one scale of that layer's input.
Nothing is kept for a backward pass, so there is no gradient.
"""

import torch
from torch import Tensor

from .cost import Cost
from .int8 import quantize_torch, scale_tensor, to_int8
from .launch import ceil_div, no_gradient, tl, triton, use_triton
from .layer_norm import check_parameters, layer_norm_torch, limit, normalise, tile
from .spec import Spec

# --- the maths, in PyTorch


def layer_norm_quantize_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: Tensor) -> Tensor:
    """LayerNorm over the last axis in fp32, quantised."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return quantize_torch(layer_norm_torch(x, weight, bias, eps, wide), scale)


# --- the kernel


@triton.jit
def _forward_kernel(
    x_ptr,  # (rows, C)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    scale_ptr,  # (1,) fp32
    q_ptr,  # (rows, C) int8
    rows,
    C,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    there = (row < rows)[:, None] & (column < C)[None, :]
    at = row[:, None] * C + column[None, :]
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    y, _, _ = normalise(x, there, weight, bias, C, eps)
    scale = tl.zeros((BLOCK_R, BLOCK_C), tl.float32) + tl.load(scale_ptr)
    tl.store(q_ptr + at, to_int8(y, scale), mask=there)


# --- launching it


@torch.library.custom_op("swin_lessons::layer_norm_quantize", mutates_args=())
def _layer_norm_quantize(x: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: Tensor) -> Tensor:
    """`layer_norm_quantize` by Triton."""
    x, C = x.contiguous(), x.shape[-1]
    q = x.new_empty(x.shape, dtype=torch.int8)
    if x.numel():
        rows, (BLOCK_R, BLOCK_C, warps) = x.numel() // C, tile(C)
        args = (x, weight.contiguous(), bias.contiguous(), scale, q, rows, C, eps, BLOCK_R, BLOCK_C)
        _forward_kernel[(ceil_div(rows, BLOCK_R),)](*args, num_warps=warps)
    return q


@_layer_norm_quantize.register_fake
def _(x, weight, bias, eps, scale):
    return x.new_empty(x.shape, dtype=torch.int8)


# --- the operation


def layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: Tensor | float, *, impl: str = "auto"
) -> Tensor:
    """LayerNorm over the last axis as int8: `(..., C)` -> `(..., C)`, `LN(x) / scale` rounded as `quantize` does.

    Statistics are fp32. There is no gradient with Triton.

    Args:
        weight, bias: `(C,)`, of any floating dtype.
        scale: of the result, one positive number; as a tensor on the device of `x` it costs no copy.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: shapes or a scale that do not fit; with impl="triton", more than 8,192 channels, a dtype other
            than fp32, fp16 and bf16, or a gradient asked for.
    """
    check_parameters(x, weight, bias, eps, None)
    scale = scale_tensor(scale, x, "scale")
    obstacle = limit(x) or no_gradient("layer_norm_quantize", x, weight, bias)
    run = _layer_norm_quantize if use_triton(impl, x, obstacle) else layer_norm_quantize_torch
    return run(x, weight, bias, eps, scale)


# --- what to expect


def layer_norm_quantize_cost(rows: int, C: int, itemsize: int) -> Cost:
    """`(rows, C)` to int8. Before: LayerNorm (and its statistics), then a kernel that quantises."""
    one = rows * C * itemsize
    return Cost(2, 1, 3 * one + 8 * rows + rows * C, one + rows * C, 11 * rows * C)


def specs() -> list[Spec]:
    """The launches to compile for a report: stages 1 and 4 of Swin-T at batch 32."""
    found = []
    pointers = dict.fromkeys(("weight_ptr", "bias_ptr", "scale_ptr"), "fp32") | {"q_ptr": "i8"}
    for C, rows in ((96, 32 * 56 * 56), (768, 32 * 7 * 7)):
        BLOCK_R, BLOCK_C, warps = tile(C)
        sizes, tiles = {"rows": rows, "C": C, "eps": 1e-5}, {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C}
        name = f"layer_norm_quantize[C={C}]"
        found.append(Spec(name, _forward_kernel, pointers, sizes, tiles, warps, dtypes=("fp16",)))
    return found
