"""Attention in windows of more than 64 tokens, block by block: no program ever holds all scores of a window.

The forward kernel meets the keys of a query a block at a time. It keeps the largest score so far and rescales what it
has added up whenever a larger one comes (online softmax: Milakov and Gimelshein, arXiv:1805.02867). The backward
kernels work scores out again from the saved log-sum-exp (FlashAttention, arXiv:2205.14135): one goes along the rows
(gradients of queries), one down the columns (of keys and values), one through the windows (of the bias). No two
programs write the same number.
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    RATE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    BLOCKS: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    block, pair = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    head, window = pair % HEADS, pair // HEADS
    seams = seams_of(window, H, W, HEIGHT, WIDTH)
    query, channel = block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    there = (query < N)[:, None] & (channel < DIM)[None, :]
    row = rows_of(window, query, H, W, dy, dx, HEIGHT, WIDTH)
    side = seams & sides_of(query, dy, dx, HEIGHT, WIDTH)
    q = load_tokens(qkv_ptr, tile_at(row, channel, head, 3 * C, DIM), there, WIDE)
    q = directions(q, COSINE)
    factor = scale
    if COSINE:
        factor = tl.load(factor_ptr + head)
    top = tl.full((BLOCK_Q,), -1e30, tl.float32)  # finite: a row may see none of the first keys
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        key_there = (key < N)[:, None] & (channel < DIM)[None, :]
        key_side = seams & sides_of(key, dy, dx, HEIGHT, WIDTH)
        at = tile_at(rows_of(window, key, H, W, dy, dx, HEIGHT, WIDTH), channel, head, 3 * C, DIM)
        k = directions(load_tokens(qkv_ptr + C, at, key_there, WIDE), COSINE)
        v = load_tokens(qkv_ptr + 2 * C, at, key_there, WIDE)
        bias = load_bias(bias_ptr, head, query[:, None], key[None, :], N)
        scores = logits(q, k, factor, bias, side, key_side, SHIFTED, PRECISION)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp(scores - higher[:, None])
        rescale = tl.exp(top - higher)
        total = total * rescale + tl.sum(weight, 1)
        if RATE > 0:
            weight = dropped(weight, seed, pair, query[:, None], key[None, :], N, RATE)
        out = out * rescale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    out /= total[:, None]
    tl.store(out_ptr + tile_at(row, channel, head, C, DIM), out, mask=there)
    tl.store(lse_ptr + pair * N + query, top + tl.log(total), mask=query < N)


@triton.jit
def query_kernel(
    d_out_ptr,  # (B * H * W, C)
    out_ptr,  # (B * H * W, C)
    qkv_ptr,  # (B * H * W, 3C)
    bias_ptr,  # (HEADS, N, N)
    factor_ptr,  # (HEADS,) fp32 where COSINE
    lse_ptr,  # (windows, HEADS, N) fp32
    dqkv_ptr,  # (B * H * W, 3C): queries are written
    mean_ptr,  # (windows, HEADS, N) fp32, written: the mean of each row's weight gradients under its weights
    dfactor_ptr,  # (windows, HEADS, BLOCKS) fp32 where COSINE: partial sums
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    RATE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    BLOCKS: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    block, pair = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    head, window = pair % HEADS, pair // HEADS
    seams = seams_of(window, H, W, HEIGHT, WIDTH)
    query, channel = block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    there = (query < N)[:, None] & (channel < DIM)[None, :]
    row = rows_of(window, query, H, W, dy, dx, HEIGHT, WIDTH)
    side = seams & sides_of(query, dy, dx, HEIGHT, WIDTH)
    at = tile_at(row, channel, head, 3 * C, DIM)
    raw_q = load_tokens(qkv_ptr, at, there, WIDE)
    q = directions(raw_q, COSINE)
    out_at = tile_at(row, channel, head, C, DIM)
    d_out = load_tokens(d_out_ptr, out_at, there, WIDE)
    out = load_tokens(out_ptr, out_at, there, WIDE)
    mean = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(mean_ptr + pair * N + query, mean, mask=query < N)
    lse = tl.load(lse_ptr + pair * N + query, mask=query < N, other=float("inf"))
    factor = scale
    if COSINE:
        factor = tl.load(factor_ptr + head)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        key_there = (key < N)[:, None] & (channel < DIM)[None, :]
        key_side = seams & sides_of(key, dy, dx, HEIGHT, WIDTH)
        key_at = tile_at(rows_of(window, key, H, W, dy, dx, HEIGHT, WIDTH), channel, head, 3 * C, DIM)
        k = directions(load_tokens(qkv_ptr + C, key_at, key_there, WIDE), COSINE)
        v = load_tokens(qkv_ptr + 2 * C, key_at, key_there, WIDE)
        bias = load_bias(bias_ptr, head, query[:, None], key[None, :], N)
        weight = tl.exp(logits(q, k, factor, bias, side, key_side, SHIFTED, PRECISION) - lse[:, None])
        dweight = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        if RATE > 0:
            dweight = dropped(dweight, seed, pair, query[:, None], key[None, :], N, RATE)
        dscores = weight * (dweight - mean[:, None])
        dq += tl.dot(dscores.to(k.dtype), k, input_precision=PRECISION)
    if COSINE:
        tl.store(dfactor_ptr + tl.program_id(0), tl.sum(tl.sum(dq * unit_rows(raw_q), 1), 0))
        dq = through_unit(dq, raw_q)
    tl.store(dqkv_ptr + at, dq * factor, mask=there)


@triton.jit
def key_kernel(
    d_out_ptr,  # (B * H * W, C)
    qkv_ptr,  # (B * H * W, 3C)
    bias_ptr,  # (HEADS, N, N)
    factor_ptr,  # (HEADS,) fp32 where COSINE
    lse_ptr,  # (windows, HEADS, N) fp32
    mean_ptr,  # (windows, HEADS, N) fp32
    dqkv_ptr,  # (B * H * W, 3C): keys and values are written
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    RATE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    BLOCKS: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
    block, pair = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    head, window = pair % HEADS, pair // HEADS
    seams = seams_of(window, H, W, HEIGHT, WIDTH)
    key, channel = block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    there = (key < N)[:, None] & (channel < DIM)[None, :]
    side = seams & sides_of(key, dy, dx, HEIGHT, WIDTH)
    at = tile_at(rows_of(window, key, H, W, dy, dx, HEIGHT, WIDTH), channel, head, 3 * C, DIM)
    raw_k = load_tokens(qkv_ptr + C, at, there, WIDE)
    k = directions(raw_k, COSINE)
    v = load_tokens(qkv_ptr + 2 * C, at, there, WIDE)
    factor = scale
    if COSINE:
        factor = tl.load(factor_ptr + head)
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_Q):  # tiles are (keys, queries): ready for the products below
        query = start + tl.arange(0, BLOCK_Q)
        query_there = (query < N)[:, None] & (channel < DIM)[None, :]
        query_side = seams & sides_of(query, dy, dx, HEIGHT, WIDTH)
        row = rows_of(window, query, H, W, dy, dx, HEIGHT, WIDTH)
        q = load_tokens(qkv_ptr, tile_at(row, channel, head, 3 * C, DIM), query_there, WIDE)
        q = directions(q, COSINE)
        d_out = load_tokens(d_out_ptr, tile_at(row, channel, head, C, DIM), query_there, WIDE)
        lse = tl.load(lse_ptr + pair * N + query, mask=query < N, other=float("inf"))
        mean = tl.load(mean_ptr + pair * N + query, mask=query < N, other=0.0)
        bias = load_bias(bias_ptr, head, query[None, :], key[:, None], N)
        weight = tl.exp(logits(k, q, factor, bias, side, query_side, SHIFTED, PRECISION) - lse[None, :])
        dweight = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
        used = weight
        if RATE > 0:
            used = dropped(weight, seed, pair, query[None, :], key[:, None], N, RATE)
            dweight = dropped(dweight, seed, pair, query[None, :], key[:, None], N, RATE)
        dv += tl.dot(used.to(d_out.dtype), d_out, input_precision=PRECISION)
        dscores = weight * (dweight - mean[None, :])
        dk += tl.dot(dscores.to(q.dtype), q, input_precision=PRECISION)
    dk *= factor
    if COSINE:
        dk = through_unit(dk, raw_k)
    tl.store(dqkv_ptr + C + at, dk, mask=there)
    tl.store(dqkv_ptr + 2 * C + at, dv, mask=there)


@triton.jit
def bias_kernel(
    d_out_ptr,  # (B * H * W, C)
    qkv_ptr,  # (B * H * W, 3C)
    bias_ptr,  # (HEADS, N, N)
    factor_ptr,  # (HEADS,) fp32 where COSINE
    lse_ptr,  # (windows, HEADS, N) fp32
    mean_ptr,  # (windows, HEADS, N) fp32
    dbias_ptr,  # (walkers, HEADS, N, N) fp32: partial sums
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COSINE: tl.constexpr,
    SHIFTED: tl.constexpr,
    RATE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    N: tl.constexpr = HEIGHT * WIDTH
    C: tl.constexpr = HEADS * DIM
    ROWS: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    COLUMNS: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
    tile, share = tl.program_id(0) % (ROWS * COLUMNS), tl.program_id(0) // (ROWS * COLUMNS)
    head, walker = share % HEADS, share // HEADS
    walkers = tl.num_programs(0) // (ROWS * COLUMNS * HEADS)
    query = tile // COLUMNS * BLOCK_Q + tl.arange(0, BLOCK_Q)
    key = tile % COLUMNS * BLOCK_K + tl.arange(0, BLOCK_K)
    channel = tl.arange(0, BLOCK_D)
    query_there = (query < N)[:, None] & (channel < DIM)[None, :]
    key_there = (key < N)[:, None] & (channel < DIM)[None, :]
    bias = load_bias(bias_ptr, head, query[:, None], key[None, :], N)
    dbias = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    factor = scale
    if COSINE:
        factor = tl.load(factor_ptr + head)
    for window in range(walker, windows, walkers):
        seams = seams_of(window, H, W, HEIGHT, WIDTH)
        side = seams & sides_of(query, dy, dx, HEIGHT, WIDTH)
        key_side = seams & sides_of(key, dy, dx, HEIGHT, WIDTH)
        row = rows_of(window, query, H, W, dy, dx, HEIGHT, WIDTH)
        at = tile_at(rows_of(window, key, H, W, dy, dx, HEIGHT, WIDTH), channel, head, 3 * C, DIM)
        q = load_tokens(qkv_ptr, tile_at(row, channel, head, 3 * C, DIM), query_there, WIDE)
        k = load_tokens(qkv_ptr + C, at, key_there, WIDE)
        v = load_tokens(qkv_ptr + 2 * C, at, key_there, WIDE)
        d_out = load_tokens(d_out_ptr, tile_at(row, channel, head, C, DIM), query_there, WIDE)
        q, k = directions(q, COSINE), directions(k, COSINE)
        pair = window * HEADS + head
        lse = tl.load(lse_ptr + pair * N + query, mask=query < N, other=float("inf"))
        mean = tl.load(mean_ptr + pair * N + query, mask=query < N, other=0.0)
        weight = tl.exp(logits(q, k, factor, bias, side, key_side, SHIFTED, PRECISION) - lse[:, None])
        dweight = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        if RATE > 0:
            dweight = dropped(dweight, seed, pair, query[:, None], key[None, :], N, RATE)
        dbias += weight * (dweight - mean[:, None])
    mask = (query < N)[:, None] & (key < N)[None, :]
    tl.store(dbias_ptr + (share * N + query[:, None]) * N + key[None, :], dbias, mask=mask)
