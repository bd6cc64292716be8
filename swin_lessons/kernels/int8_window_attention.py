"""Window attention in whole numbers, from what an INT8 linear layer wrote to what the next one reads.

Both products are int8 by int8 in int32: scores of a head of 32 channels are one step of a matrix instruction. Softmax
between them is fp32. As in `window_attention`, shift and mask are arithmetic on indices, and scores stay on the chip.

Weights are quantised before they are divided by their sum, in 255 steps of the largest of their row. Divided first,
they would be 1 / N on average: of 127 steps a window of 16 x 16 leaves half of one. Their sum is that of the quantised
weights, so the result stays a mean of values. Matrix instructions want int8: 128 is taken off each weight, and 128
times the sum of values added.

V2's cosines come from whole numbers too: the dot product of two int8 vectors, over the lengths of these vectors. So
queries and keys are rounded once, and their scales cancel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.windows import Size, cyclic_shift, shift_mask, window_partition, window_reverse
from .cost import Cost
from .int8 import check_int8, check_result, quantize_torch, scale_tensor, to_int8, use_triton_int8
from .launch import ceil_div, multiprocessors, tl, triton
from .spec import Spec
from .window_attention import check_sizes, window_attention_cost
from .window_attention_parts import (
    inverse_lengths,
    load_bias,
    load_tokens,
    rows_of,
    seams_of,
    sides_of,
    tile_at,
)
from .window_attention_tiles import Tiles, side, walkers

MAX_HEAD_DIM = 64
K_STEP = 32  # what one INT8 matrix instruction takes along the summed axis


# --- the maths, in PyTorch


def int8_window_attention_torch(
    qkv: Tensor,
    bias: Tensor,
    factor: Tensor | None,
    scales: Tensor,
    out_scale: Tensor | None,
    window: Sequence[int],
    shift: Sequence[int],
    num_heads: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_window_attention` step by step. Products are exact: whole numbers in fp64."""
    B, H, W, _ = qkv.shape
    window, shift = (window[0], window[1]), (shift[0], shift[1])
    windows = window_partition(cyclic_shift(qkv, shift), window)  # (n, N, 3C)
    q, k, v = windows.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).double().unbind(0)
    scores = (q @ k.transpose(-2, -1)).float()  # (n, num_heads, N, N)
    if factor is None:
        scores = scores * (scale * scales[0] * scales[1])
    else:
        lengths = [t.square().sum(-1).float().sqrt() for t in (q, k)]
        inverse = [torch.where(length == 0, 0.0, 1 / length) for length in lengths]
        scores = scores * inverse[0].unsqueeze(-1) * inverse[1].unsqueeze(-2) * factor.view(-1, 1, 1)
    scores = scores + bias.float()
    if any(shift):
        mask = shift_mask(H, W, window, shift, qkv.device).repeat(B, 1, 1)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    weights = (255 * (scores - scores.amax(-1, keepdim=True)).exp()).round()
    sums = (weights.double() @ v).float()
    out = sums / weights.sum(-1, keepdim=True) * scales[2]
    out = cyclic_shift(window_reverse(out.transpose(1, 2).flatten(2), window, H, W), (-shift[0], -shift[1]))
    return out.to(dtype) if out_scale is None else quantize_torch(out, out_scale)


# --- the kernel


@triton.jit
def _forward_kernel(
    qkv_ptr,  # (B * H * W, 3C) int8
    bias_ptr,  # (HEADS, N, N)
    factor_ptr,  # (HEADS,) fp32 where COSINE
    scales_ptr,  # (3,) fp32: of queries, keys and values
    out_scale_ptr,  # (1,) fp32 where REQUANTIZE
    out_ptr,  # (B * H * W, C): int8 where REQUANTIZE
    windows,
    H,
    W,
    dy,
    dx,
    scale,
    HEADS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    REQUANTIZE: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    BLOCKS: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    ONE: tl.constexpr = BLOCK_K >= N  # all keys in one block: its bias serves every window
    part, walker, walkers = (
        tl.program_id(0) % (HEADS * BLOCKS),
        tl.program_id(0) // (HEADS * BLOCKS),
        tl.num_programs(0) // (HEADS * BLOCKS),
    )
    head, block = part // BLOCKS, part % BLOCKS
    query, channel = block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    there = (query < N)[:, None] & (channel < DIM)[None, :]
    value_scale = tl.load(scales_ptr + 2)
    factor = tl.load(factor_ptr + head) if COSINE else scale * tl.load(scales_ptr) * tl.load(scales_ptr + 1)
    if ONE:
        bias = load_bias(bias_ptr, head, query[:, None], tl.arange(0, BLOCK_K)[None, :], N)
    for window in range(walker, windows, walkers):
        seams = seams_of(window, H, W, HEIGHT, WIDTH)
        row = rows_of(window, query, H, W, dy, dx, HEIGHT, WIDTH)
        query_side = seams & sides_of(query, dy, dx, HEIGHT, WIDTH)
        q = load_tokens(qkv_ptr, tile_at(row, channel, head, 3 * C, DIM), there, False)
        top = tl.full((BLOCK_Q,), -1e30, tl.float32)  # finite: a row may see none of the first keys
        total = tl.zeros((BLOCK_Q,), tl.float32)
        out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for start in range(0, N, BLOCK_K):
            key = start + tl.arange(0, BLOCK_K)
            key_there = (key < N)[:, None] & (channel < DIM)[None, :]
            at = tile_at(rows_of(window, key, H, W, dy, dx, HEIGHT, WIDTH), channel, head, 3 * C, DIM)
            k = load_tokens(qkv_ptr + C, at, key_there, False)
            v = load_tokens(qkv_ptr + 2 * C, at, key_there, False)
            if not ONE:
                bias = load_bias(bias_ptr, head, query[:, None], key[None, :], N)
            scores = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
            if COSINE:
                scores *= inverse_lengths(q)[:, None] * inverse_lengths(k)[None, :]
            scores = scores * factor + bias
            if SHIFTED:
                key_side = seams & sides_of(key, dy, dx, HEIGHT, WIDTH)
                scores = tl.where(query_side[:, None] == key_side[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weight = 255 * tl.exp(scores - higher[:, None])
            weight = (weight + 12582912.0) - 12582912.0  # rounded, halves to even: see int8.to_int8
            rescale = tl.exp(top - higher)
            total = total * rescale + tl.sum(weight, 1)
            sums = tl.dot((weight - 128).to(tl.int8), v, out_dtype=tl.int32)
            sums += 128 * tl.sum(v.to(tl.int32), 0)[None, :]
            out = out * rescale[:, None] + sums.to(tl.float32)
            top = higher
        out = out / total[:, None] * value_scale
        if REQUANTIZE:
            out = to_int8(out, tl.zeros((BLOCK_Q, BLOCK_D), tl.float32) + tl.load(out_scale_ptr))
        tl.store(out_ptr + tile_at(row, channel, head, C, DIM), out, mask=there)


# --- launching it


def int8_attention_tiles(N: int) -> Tiles:
    """Tiles for a window of N tokens: all of up to 64 in one; else block by block.

    One load under way at a time: more cost registers, which leaves room for fewer warps, or spill (sm_86, sm_89).
    """
    if N > 64:
        return Tiles(64, 32, 4)
    query = side(N)
    return Tiles(query, max(K_STEP, query), 4 if query == 64 else 2 if query == 32 else 1)


def _constants(
    num_heads: int, window: Sequence[int], head_dim: int, cosine: bool, shifted: bool, requantize: bool
) -> dict[str, int]:
    tile = int8_attention_tiles(window[0] * window[1])
    return {
        "HEADS": num_heads,
        "HEIGHT": window[0],
        "WIDTH": window[1],
        "DIM": head_dim,
        "BLOCK_Q": tile.query,
        "BLOCK_K": tile.key,
        "BLOCK_D": max(K_STEP, side(head_dim)),
        "COSINE": cosine,
        "SHIFTED": shifted,
        "REQUANTIZE": requantize,
    }


@torch.library.custom_op("swin_lessons::int8_window_attention", mutates_args=())
def _int8_window_attention(
    qkv: Tensor,
    bias: Tensor,
    factor: Tensor | None,
    scales: Tensor,
    out_scale: Tensor | None,
    window: Sequence[int],
    shift: Sequence[int],
    num_heads: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_window_attention` by Triton."""
    B, H, W, channels = qkv.shape
    out = qkv.new_empty(B, H, W, channels // 3, dtype=torch.int8 if out_scale is not None else dtype)
    N, windows = window[0] * window[1], B * (H // window[0]) * (W // window[1])
    tile = int8_attention_tiles(N)
    of_a_window = num_heads * ceil_div(N, tile.query)
    shares = windows if tile.key < N else walkers(windows, 8 * multiprocessors(qkv) // of_a_window)
    if shares:
        # an absent tensor is never read: any other stands for it
        tensors = (
            *(qkv.contiguous(), bias.contiguous()),
            *(scales if factor is None else factor, scales, scales if out_scale is None else out_scale, out),
        )
        flags = (factor is not None, any(shift), out_scale is not None)
        constants = _constants(num_heads, window, channels // 3 // num_heads, *flags)
        sizes = (windows, H, W, shift[0], shift[1], scale)
        launch = {"num_warps": tile.warps, "num_stages": tile.stages}
        _forward_kernel[(of_a_window * shares,)](*tensors, *sizes, **constants, **launch)
    return out


@_int8_window_attention.register_fake
def _(qkv, bias, factor, scales, out_scale, window, shift, num_heads, scale, dtype):
    dtype = torch.int8 if out_scale is not None else dtype
    return qkv.new_empty(*qkv.shape[:3], qkv.shape[3] // 3, dtype=dtype)


# --- the operation


def int8_window_attention(
    qkv: Tensor,
    bias: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    *,
    num_heads: int,
    qkv_scale: Tensor | float,
    scale: float | None = None,
    logit_factor: Tensor | None = None,
    out_scale: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> Tensor:
    """Attention in shifted windows of an int8 map: `(B, H, W, 3C)` -> `(B, H, W, C)`, in `dtype` or int8.

    Weights take 256 values; the products of attention are exact sums of whole numbers. There is no gradient.

    Args:
        qkv: int8, as `int8_linear` writes it for the map as it lies in memory: queries, keys, values, head by head.
        bias: `(num_heads, N, N)` for the N tokens of a window, of any floating dtype.
        window_size, shift_size: as in `window_attention`.
        qkv_scale: of queries, keys and values, `(3,)`, or one for all; V2 uses that of values alone.
        scale: of the dot products of V1; None for head_dim ** -0.5.
        logit_factor: `num_heads` numbers, which multiply the cosines of V2; None for V1.
        out_scale: of the result, which is int8 then.
        dtype: fp32, fp16 or bf16, without `out_scale`.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: sizes, dtypes or scales that do not fit; with impl="triton", a head_dim above 64 ("auto" takes
            PyTorch then).
    """
    check_int8(qkv=qkv)
    if qkv.ndim != 4 or not bias.is_floating_point():
        raise ValueError(
            f"qkv is {tuple(qkv.shape)} and bias {bias.dtype}: (B, H, W, 3C) and floating point are needed"
        )
    check_sizes(qkv, bias, window_size, shift_size, num_heads, scale, logit_factor)
    check_result(dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (bias, logit_factor)):
        raise ValueError("int8_window_attention has no gradient: use torch.no_grad()")
    head_dim = qkv.shape[-1] // (3 * num_heads)
    limit = "" if head_dim <= MAX_HEAD_DIM else f"head_dim {head_dim} is more than {MAX_HEAD_DIM}"
    run = _int8_window_attention if use_triton_int8(impl, qkv, limit) else int8_window_attention_torch
    return run(
        qkv,
        bias,
        None if logit_factor is None else logit_factor.reshape(-1).float().contiguous(),
        scale_tensor(qkv_scale, qkv, "qkv_scale", 3).expand(3).contiguous(),
        None if out_scale is None else scale_tensor(out_scale, qkv, "out_scale"),
        list(window_size),
        list(shift_size),
        num_heads,
        head_dim**-0.5 if scale is None else scale,
        dtype,
    )


# --- what to expect


def int8_window_attention_cost(
    tokens: int, C: int, num_heads: int, N: int, *, shifted: bool = False, cosine: bool = False
) -> Cost:
    """As `window_attention_cost`: before, with halves and scores in memory; after, int8 in and out."""
    half = window_attention_cost(tokens, C, num_heads, N, 2, shifted=shifted, cosine=cosine)
    after = 4 * tokens * C + num_heads * N * N * 4
    return Cost(half.launches_before, 1, half.bytes_before, after, half.flops)


def specs() -> list[Spec]:
    """The launches to compile for a report: stage 1 of Swin-T, shifted, and of V2 with windows of 8 and 16."""
    found = []
    pointers = {"qkv_ptr": "i8", "out_ptr": "i8"}
    pointers |= dict.fromkeys(("bias_ptr", "factor_ptr", "scales_ptr", "out_scale_ptr"), "fp32")
    for name, w, map_side, cosine in (
        ("w=7 d=32 shifted", 7, 56, False),
        ("V2 w=8 d=32", 8, 64, True),
        ("V2 w=16 d=32", 16, 64, True),
    ):
        shift = 0 if cosine else 3
        sizes = {"H": map_side, "W": map_side, "dy": shift, "dx": shift, "scale": 32**-0.5}
        sizes["windows"] = 32 * (map_side // w) ** 2
        constants = _constants(3, (w, w), 32, cosine, not cosine, True)
        tile, label = int8_attention_tiles(w * w), f"int8_window_attention[{name}]"
        found.append(
            Spec(label, _forward_kernel, pointers, sizes, constants, tile.warps, tile.stages, ("fp16",))
        )
    return found
