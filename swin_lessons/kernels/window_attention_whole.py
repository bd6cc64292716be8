"""Attention in windows of up to 64 tokens: all scores of a window and head fit one tile, so softmax is just softmax.

A program belongs to one head and walks through windows, with the head's bias in registers. The gradient of that bias
adds up in registers, too.
"""

from .launch import tl, triton
from .window_attention_parts import (
    directions,
    dropped,
    load_bias,
    load_tokens,
    logits,
    rows_of,
    seams_of,
    sides_of,
    through_unit,
    tile_at,
    unit_rows,
)


@triton.jit
def forward_kernel(
    qkv_ptr,  # (B * H * W, 3C)
    bias_ptr,  # (HEADS, N, N)
    factor_ptr,  # (HEADS,) fp32 where COSINE
    out_ptr,  # (B * H * W, C)
    lse_ptr,  # (windows, HEADS, N) fp32: log of the sum of exponentials of each row
    windows,
    H,
    W,
    dy,
    dx,
    scale,
    seed,
    HEADS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    RATE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    head, walker, walkers = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.num_programs(0) // HEADS
    token, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    query, key = token[:, None], token[None, :]
    there = (query < N) & (channel < DIM)[None, :]
    bias = load_bias(bias_ptr, head, query, key, N)
    factor = scale
    if COSINE:
        factor = tl.load(factor_ptr + head)
    for window in range(walker, windows, walkers):
        row = rows_of(window, token, H, W, dy, dx, HEIGHT, WIDTH)
        side = sides_of(token, dy, dx, HEIGHT, WIDTH) & seams_of(window, H, W, HEIGHT, WIDTH)
        pair = window * HEADS + head
        at = tile_at(row, channel, head, 3 * C, DIM)
        q = directions(load_tokens(qkv_ptr, at, there, WIDE), COSINE)
        k = directions(load_tokens(qkv_ptr + C, at, there, WIDE), COSINE)
        v = load_tokens(qkv_ptr + 2 * C, at, there, WIDE)
        scores = logits(q, k, factor, bias, side, side, SHIFTED, PRECISION)
        top = tl.max(scores, 1)
        weight = tl.exp(scores - top[:, None])
        total = tl.sum(weight, 1)
        if RATE > 0:
            weight = dropped(weight, seed, pair, query, key, N, RATE)
        out = tl.dot(weight.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
        tl.store(out_ptr + tile_at(row, channel, head, C, DIM), out, mask=there)
        tl.store(lse_ptr + pair * N + token, top + tl.log(total), mask=token < N)


@triton.jit
def backward_kernel(
    d_out_ptr,  # (B * H * W, C)
    qkv_ptr,  # (B * H * W, 3C)
    bias_ptr,  # (HEADS, N, N)
    factor_ptr,  # (HEADS,) fp32 where COSINE
    lse_ptr,  # (windows, HEADS, N) fp32
    dqkv_ptr,  # (B * H * W, 3C)
    dbias_ptr,  # (walkers, HEADS, N, N) fp32: partial sums
    dfactor_ptr,  # (walkers, HEADS) fp32 where COSINE: partial sums
    windows,
    H,
    W,
    dy,
    dx,
    scale,
    seed,
    HEADS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    RATE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    head, walker, walkers = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.num_programs(0) // HEADS
    token, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    query, key = token[:, None], token[None, :]
    there = (query < N) & (channel < DIM)[None, :]
    bias = load_bias(bias_ptr, head, query, key, N)
    dbias = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    dfactor = tl.zeros((BLOCK_N,), tl.float32)
    factor = scale
    if COSINE:
        factor = tl.load(factor_ptr + head)
    for window in range(walker, windows, walkers):
        row = rows_of(window, token, H, W, dy, dx, HEIGHT, WIDTH)
        side = sides_of(token, dy, dx, HEIGHT, WIDTH) & seams_of(window, H, W, HEIGHT, WIDTH)
        pair = window * HEADS + head
        at = tile_at(row, channel, head, 3 * C, DIM)
        q = directions(load_tokens(qkv_ptr, at, there, WIDE), COSINE)
        k = directions(load_tokens(qkv_ptr + C, at, there, WIDE), COSINE)
        v = load_tokens(qkv_ptr + 2 * C, at, there, WIDE)
        d_out = load_tokens(d_out_ptr, tile_at(row, channel, head, C, DIM), there, WIDE)
        lse = tl.load(lse_ptr + pair * N + token, mask=token < N, other=float("inf"))
        weight = tl.exp(logits(q, k, factor, bias, side, side, SHIFTED, PRECISION) - lse[:, None])
        dweight = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        used = weight
        if RATE > 0:
            used = dropped(weight, seed, pair, query, key, N, RATE)
            dweight = dropped(dweight, seed, pair, query, key, N, RATE)
        dscores = weight * (dweight - tl.sum(weight * dweight, 1)[:, None])
        dbias += dscores
        dk = tl.dot(tl.trans(dscores.to(q.dtype)), q, input_precision=PRECISION)
        if COSINE:
            raw_k = load_tokens(qkv_ptr + C, at, there, WIDE)
            dk = through_unit(dk, raw_k)
        tl.store(dqkv_ptr + C + at, dk * factor, mask=there)
        dq = tl.dot(dscores.to(k.dtype), k, input_precision=PRECISION)
        if COSINE:
            raw_q = load_tokens(qkv_ptr, at, there, WIDE)  # again, from the cache: registers are short
            dfactor += tl.sum(dq * unit_rows(raw_q), 1)
            dq = through_unit(dq, raw_q)
        tl.store(dqkv_ptr + at, dq * factor, mask=there)
        dv = tl.dot(tl.trans(used.to(v.dtype)), d_out, input_precision=PRECISION)
        tl.store(dqkv_ptr + 2 * C + at, dv, mask=there)
    share = walker * HEADS + head
    mask = (query < N) & (key < N)
    tl.store(dbias_ptr + (share * N + query) * N + key, dbias, mask=mask)
    if COSINE:
        tl.store(dfactor_ptr + share, tl.sum(dfactor, 0))
