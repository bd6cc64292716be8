"""What the kernels of window attention share: where tokens lie, what they score, which scores dropout keeps.

Windows, shift and mask are arithmetic on indices. Nothing is rolled, cut or copied, and there is no mask to read.
"""

from .launch import tl, triton


@triton.jit
def rows_of(window, token, H, W, dy, dx, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where the tokens of a shifted window lie: their rows in the `(B * H * W, C)` map.

    Windows are numbered image by image, in the order of `window_partition` after `cyclic_shift`.
    """
    across = W // WIDTH  # windows in a row of windows
    image = window // ((H // HEIGHT) * across)
    place = window % ((H // HEIGHT) * across)
    y = place // across * HEIGHT + dy + token // WIDTH
    x = place % across * WIDTH + dx + token % WIDTH
    y = tl.where(y >= H, y - H, y)  # round to the opposite edge
    x = tl.where(x >= W, x - W, x)
    return ((image * H + y) * W + x).to(tl.int64)


@triton.jit
def sides_of(token, dy, dx, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """On which side of a horizontal seam (2) and of a vertical one (1) a token of a window would lie."""
    token = tl.minimum(token, HEIGHT * WIDTH - 1)  # what is past the end must see some key, too
    below, beyond = token // WIDTH >= HEIGHT - dy, token % WIDTH >= WIDTH - dx
    return tl.where(below, 2, 0) + tl.where(beyond, 1, 0)


@triton.jit
def seams_of(window, H, W, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Which seams run through a window: the horizontal one (2) in the lowest row, the vertical one (1) at the right."""
    across = W // WIDTH
    place = window % ((H // HEIGHT) * across)
    lowest, last = place // across == H // HEIGHT - 1, place % across == across - 1
    return tl.where(lowest, 2, 0) + tl.where(last, 1, 0)


@triton.jit
def tile_at(row, channel, head, stride, DIM: tl.constexpr):
    """Offsets of one head's channels in rows of `stride` numbers: a tile (tokens, channels)."""
    return row[:, None] * stride + head * DIM + channel[None, :]


@triton.jit
def load_tokens(ptr, at, there, WIDE: tl.constexpr):
    """A tile of tokens, zeros where there is none; WIDE makes it fp32, as the interpreter needs for bf16."""
    x = tl.load(ptr + at, mask=there, other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def inverse_lengths(x):
    """1 / length of each row, fp32; 0 for a row of zeros, which so stays zero and gets no gradient."""
    x = x.to(tl.float32)
    square = tl.sum(x * x, 1)
    return 1 / tl.sqrt(tl.where(square == 0, float("inf"), square))


@triton.jit
def unit_rows(x):
    """Rows of length 1, fp32, as `models.fast.unit_vectors` makes them."""
    return x.to(tl.float32) * inverse_lengths(x)[:, None]


@triton.jit
def directions(x, COSINE: tl.constexpr):
    """What scores compare, in the dtype of `x`: the vectors themselves (V1) or vectors of length 1 (V2)."""
    if COSINE:
        x = unit_rows(x).to(x.dtype)
    return x


@triton.jit
def through_unit(gradient, x):
    """The gradient of `x` from that of its unit rows: what points along a row does not change it."""
    unit = unit_rows(x)
    along = tl.sum(gradient * unit, 1)
    return (gradient - unit * along[:, None]) * inverse_lengths(x)[:, None]


@triton.jit
def load_bias(bias_ptr, head, query, key, N: tl.constexpr):
    """Bias of pairs, fp32: -inf for keys past the end of the window, which nobody sees.

    `query` and `key` are token numbers, one along the rows of the tile and one along its columns.
    """
    query = tl.minimum(query, N - 1)  # the last row again, instead of what is behind it
    at = (head * N + query) * N + key
    return tl.load(bias_ptr + at, mask=key < N, other=float("-inf")).to(tl.float32)


@triton.jit
def logits(a, b, factor, bias, a_side, b_side, SHIFTED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a tile of pairs, fp32: queries and keys, or keys and queries; -inf where a seam lies between."""
    scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * factor + bias
    if SHIFTED:
        scores = tl.where(a_side[:, None] == b_side[None, :], scores, float("-inf"))
    return scores


@triton.jit
def dropped(x, seed, pair, query, key, N: tl.constexpr, RATE: tl.constexpr):
    """`x` after dropout: in each pair of window and head, each query and key throw dice of their own."""
    dice = tl.rand(seed, (pair.to(tl.int64) * N + query) * N + key)
    return tl.where(dice >= RATE, x / (1 - RATE), 0.0)
