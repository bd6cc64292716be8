"""Window attention: from what the linear layer of queries, keys and values wrote to what the projection reads.

The shift, the cut into windows and the mask are arithmetic on indices, scores never leave the chip, and the result
lies where its tokens came from. V1 scales dot products, V2 compares directions (arXiv:2103.14030, equation 4;
arXiv:2111.09883, equation 2). The kernels: `window_attention_whole` for windows of up to 64 tokens,
`window_attention_blocks` for all others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.fast import unit_vectors
from ..models.windows import Size, cyclic_shift, shift_mask, window_partition, window_reverse
from . import window_attention_blocks as blocks
from . import window_attention_whole as whole
from .checks import WHOLE, check_number, check_pair, check_tensors
from .cost import Cost
from .launch import ceil_div, interpreting, multiprocessors, once_only, use_triton
from .philox import uniform
from .spec import Spec
from .window_attention_tiles import Job, Tiles, arithmetic, job_specs, launch, walkers, whole_tiles

MAX_HEAD_DIM = 64


# --- the maths, in PyTorch


def window_attention_torch(
    qkv: Tensor,
    bias: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    *,
    num_heads: int,
    scale: float | None = None,
    logit_factor: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """`window_attention` step by step: roll, cut, score, mask, softmax, drop, sum up, put back, roll back."""
    B, H, W, _ = qkv.shape
    windows = window_partition(cyclic_shift(qkv, shift_size), window_size)  # (n, N, 3C)
    heads = windows.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)  # each (n, num_heads, N, head_dim)
    if logit_factor is None:
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = (unit_vectors(t.to(wide)) for t in (q, k))
        q, k = (q * logit_factor.reshape(-1, 1, 1)).to(v.dtype), k.to(v.dtype)
    scores = q @ k.transpose(-2, -1) + bias.to(q.dtype)  # (n, num_heads, N, N)
    if any(shift_size):
        mask = shift_mask(H, W, window_size, shift_size, qkv.device).repeat(B, 1, 1)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    weights = scores.softmax(-1)
    if dropout:
        dice = uniform(seed, torch.arange(weights.numel(), device=qkv.device)).view(weights.shape)
        weights = torch.where(dice >= dropout, weights / (1 - dropout), 0.0)
    out = (weights @ v).transpose(1, 2).flatten(2)  # (n, N, C)
    return cyclic_shift(window_reverse(out, window_size, H, W), (-shift_size[0], -shift_size[1]))


# --- launching, and what autograd has to know


def _job(qkv, factor, window, shift, num_heads, scale, dropout, seed) -> Job:
    B, H, W, channels = qkv.shape
    windows = B * (H // window[0]) * (W // window[1])
    wide = qkv.dtype == torch.bfloat16 and interpreting()  # the interpreter computes wrongly in bf16
    sizes = (windows, channels // 3, H, W, tuple(window), tuple(shift), num_heads, scale, dropout, seed)
    return Job(*sizes, factor is not None, arithmetic(qkv), wide)


@torch.library.custom_op("swin_lessons::window_attention", mutates_args=())
def _attention(
    qkv: Tensor,
    bias: Tensor,
    factor: Tensor | None,
    window: Sequence[int],
    shift: Sequence[int],
    num_heads: int,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of every row of scores: `(windows, num_heads, N)` fp32."""
    job = _job(qkv, factor, window, shift, num_heads, scale, dropout, seed)
    qkv, bias = qkv.contiguous(), bias.contiguous()
    out = qkv.new_empty(*qkv.shape[:3], job.C)
    lse = qkv.new_empty(job.windows, num_heads, job.N, dtype=torch.float32)
    tensors = (qkv, bias, bias if factor is None else factor, out, lse)
    tiles = whole_tiles(job.kind, job.N, job.head_dim)
    if tiles is not None:
        programs = num_heads * walkers(job.windows, 8 * multiprocessors(qkv) // num_heads)
        launch(whole.forward_kernel, programs, tensors, job, tiles[0])
    else:
        tile = job.tiles("forward")
        programs = job.windows * num_heads * ceil_div(job.N, tile.query)
        launch(blocks.forward_kernel, programs, tensors, job, tile)
    return out, lse


@_attention.register_fake
def _(qkv, bias, factor, window, shift, num_heads, scale, dropout, seed):
    B, H, W, channels = qkv.shape
    windows = B * (H // window[0]) * (W // window[1])
    lse = qkv.new_empty(windows, num_heads, window[0] * window[1], dtype=torch.float32)
    return qkv.new_empty(B, H, W, channels // 3), lse


@torch.library.custom_op("swin_lessons::window_attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor,
    qkv: Tensor,
    bias: Tensor,
    factor: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: Sequence[int],
    shift: Sequence[int],
    num_heads: int,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `qkv`, `bias` and `factor`; the last is empty without a factor."""
    job = _job(qkv, factor, window, shift, num_heads, scale, dropout, seed)
    d_out, qkv, bias = d_out.contiguous(), qkv.contiguous(), bias.contiguous()
    inputs = (qkv, bias, bias if factor is None else factor, lse)
    tiles = whole_tiles(job.kind, job.N, job.head_dim)
    if tiles is None:
        dqkv, dbias, dfactor = _in_blocks(d_out, out, *inputs, job)
    else:
        dqkv, dbias, dfactor = _whole(d_out, *inputs, job, tiles[1])
    dfactor = qkv.new_empty(0) if factor is None else dfactor.sum(0)
    return dqkv, dbias.sum(0).to(bias.dtype), dfactor


def _whole(
    d_out: Tensor, qkv: Tensor, bias: Tensor, factor: Tensor, lse: Tensor, job: Job, tile: Tiles
) -> tuple:
    """`dqkv`, and partial sums of the other gradients: one program for each head and share of the windows."""
    shares = walkers(job.windows, 2 * multiprocessors(qkv) // job.num_heads)
    dqkv = torch.empty_like(qkv)
    dbias = lse.new_empty(shares, job.num_heads, job.N, job.N)
    dfactor = lse.new_empty(shares, job.num_heads)
    tensors = (d_out, qkv, bias, factor, lse, dqkv, dbias, dfactor)
    launch(whole.backward_kernel, shares * job.num_heads, tensors, job, tile)
    return dqkv, dbias, dfactor


def _in_blocks(
    d_out: Tensor, out: Tensor, qkv: Tensor, bias: Tensor, factor: Tensor, lse: Tensor, job: Job
) -> tuple:
    """`dqkv`, and partial sums of the other gradients: along rows, down columns, through windows."""
    pairs, dqkv, mean = job.windows * job.num_heads, torch.empty_like(qkv), torch.empty_like(lse)
    tile = job.tiles("query")
    rows = ceil_div(job.N, tile.query)
    dfactor = lse.new_empty(job.windows, job.num_heads, rows)
    tensors = (d_out, out, qkv, bias, factor, lse, dqkv, mean, dfactor)
    launch(blocks.query_kernel, pairs * rows, tensors, job, tile)
    tile, inputs = job.tiles("key"), (d_out, qkv, bias, factor, lse, mean)
    launch(blocks.key_kernel, pairs * ceil_div(job.N, tile.key), (*inputs, dqkv), job, tile)
    tile = job.tiles("bias")
    of_a_window = job.num_heads * ceil_div(job.N, tile.query) * ceil_div(job.N, tile.key)
    shares = walkers(job.windows, 4 * multiprocessors(qkv) // of_a_window)
    dbias = lse.new_empty(shares, job.num_heads, job.N, job.N)
    launch(blocks.bias_kernel, shares * of_a_window, (*inputs, dbias), job, tile)
    return dqkv, dbias, dfactor.sum(2)


@_attention_backward.register_fake
def _(d_out, qkv, bias, factor, out, lse, window, shift, num_heads, scale, dropout, seed):
    dfactor = qkv.new_empty(0) if factor is None else torch.empty_like(factor)
    return qkv.new_empty(qkv.shape), bias.new_empty(bias.shape), dfactor


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    qkv, bias, factor, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(qkv, bias, factor, out, lse)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple:
    saved = ctx.saved_tensors  # read once: activation checkpointing gives them away
    dqkv, dbias, dfactor = _attention_backward(d_out, *saved, *ctx.options)
    return dqkv, dbias, None if saved[2] is None else dfactor, *[None] * len(ctx.options)


_attention.register_autograd(_gradients, setup_context=_keep)
once_only(_attention_backward)


# --- the operation


def window_attention(
    qkv: Tensor,
    bias: Tensor,
    window_size: Size,
    shift_size: Size = (0, 0),
    *,
    num_heads: int,
    scale: float | None = None,
    logit_factor: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    impl: str = "auto",
) -> Tensor:
    """Attention in shifted windows of a map: `(B, H, W, 3C)` -> `(B, H, W, C)`, in the dtype of `qkv`.

    Args:
        qkv: queries, keys and values, each head by head, as one linear layer writes them for the map as it lies in
            memory. H and W are multiples of the window: pad with zeros before that layer.
        bias: `(num_heads, N, N)` for the N tokens of a window, of any floating dtype.
        window_size: (h, w) in tokens.
        shift_size: how far windows are rolled, in tokens; tokens that meet only by the roll do not see each other.
        scale: of the dot products of V1; None for head_dim ** -0.5.
        logit_factor: `num_heads` numbers, which multiply the cosines of V2: `logit_scale.clamp(max=ln 100).exp()`.
            None for V1.
        dropout: the share of attention weights to drop.
        seed: of dropout; the same seed drops the same weights with either `impl`.
        impl: "auto", "torch" or "triton".

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together; values out of range; with impl="triton", a
            head_dim above 64 or a dtype other than fp32, fp16 and bf16.
    """
    _check(qkv, bias, window_size, shift_size, num_heads, scale, logit_factor, dropout, seed)
    head_dim = qkv.shape[-1] // (3 * num_heads)
    scale = head_dim**-0.5 if scale is None else scale
    window, shift = (window_size[0], window_size[1]), (shift_size[0], shift_size[1])
    limit = "" if head_dim <= MAX_HEAD_DIM else f"head_dim {head_dim} is more than {MAX_HEAD_DIM}"
    if use_triton(impl, qkv, limit):
        factor = None if logit_factor is None else logit_factor.reshape(-1).float().contiguous()
        return _attention(qkv, bias, factor, window, shift, num_heads, scale, dropout, seed)[0]
    return window_attention_torch(
        qkv,
        bias,
        window,
        shift,
        num_heads=num_heads,
        scale=scale,
        logit_factor=logit_factor,
        dropout=dropout,
        seed=seed,
    )


def _check(qkv, bias, window_size, shift_size, num_heads, scale, logit_factor, dropout, seed) -> None:
    check_tensors(qkv=qkv, bias=bias, **({} if logit_factor is None else {"logit_factor": logit_factor}))
    if qkv.ndim != 4 or 0 in qkv.shape[1:]:
        raise ValueError(f"qkv is {tuple(qkv.shape)}: it must be (B, H, W, 3C), with at least one token")
    for name, value in (("num_heads", num_heads), ("seed", seed)):
        if not isinstance(value, WHOLE):
            raise ValueError(f"{name}={value!r}: a whole number is needed")
    check_sizes(qkv, bias, window_size, shift_size, num_heads, scale, logit_factor)
    if not torch.compiler.is_compiling() and not -(2**63) <= seed < 2**63:  # a compiler does not know it
        raise ValueError(f"seed={seed}: a number that 64 bits hold is needed")
    check_number("dropout", dropout, 0, 1, words="a share of weights")


def check_sizes(
    qkv: Tensor,
    bias: Tensor,
    window_size: Size,
    shift_size: Size,
    num_heads: int,
    scale: float | None,
    logit_factor: Tensor | None,
) -> None:
    """Refuse sizes that do not fit `qkv` `(B, H, W, 3C)`. Raises ValueError, which names them."""
    check_pair("window_size", window_size, 1)
    check_pair("shift_size", shift_size)
    (_, H, W, channels), (h, w), (dy, dx) = qkv.shape, window_size, shift_size
    if num_heads < 1 or channels % (3 * num_heads):
        raise ValueError(f"{channels} channels are not 3 x {num_heads} heads of one size")
    if H % h or W % w:
        raise ValueError(
            f"windows of {h} x {w} do not tile a map of {H} x {W}: pad it before the linear layer"
        )
    if not (0 <= dy < h and 0 <= dx < w):
        raise ValueError(f"shift_size={(dy, dx)} must be at least 0 and less than the window, {(h, w)}")
    if bias.shape != (num_heads, h * w, h * w):
        raise ValueError(f"bias is {tuple(bias.shape)}: it must be {(num_heads, h * w, h * w)}")
    if scale is not None and logit_factor is not None:
        raise ValueError("scale is V1's and logit_factor V2's: give one of them")
    if logit_factor is not None and logit_factor.numel() != num_heads:
        raise ValueError(
            f"logit_factor has {logit_factor.numel()} numbers: it needs one for {num_heads} heads"
        )
    if scale is not None:
        check_number("scale", scale, 0)


# --- what to expect


def window_attention_cost(
    tokens: int,
    C: int,
    num_heads: int,
    N: int,
    itemsize: int,
    *,
    shifted: bool = False,
    cosine: bool = False,
    backward: bool = False,
    cuts: bool = True,
) -> Cost:
    """Between the linear layers, for maps of `tokens` in all in windows of N, with scores and mask in memory or not.

    Before: the operations of `models.attention.WindowAttention` with attention="reference". A kernel is taken to
    read each tensor once, since what its programs share stays in the second-level cache.

    Args:
        cuts: whether cutting into windows and putting them back copies the map. Where one window is as wide as the
            map, both are views.
    """
    x, scores = tokens * C * itemsize, tokens * N * num_heads * itemsize
    mask = tokens * N * shifted
    launches, moved = (_backward_before if backward else _forward_before)(x, scores, mask)
    if not cuts:
        launches, moved = launches - 2, moved - 4 * x
    if cosine:
        extra, wide = (28, 48) if backward else (12, 12)  # passes over C numbers a token, in fp32
        casts = 4 if itemsize < 4 else 0
        launches += extra + casts
        moved += wide * tokens * C * 4 - 2 * x + casts * (x + tokens * C * 4)
    bias, one_tile = num_heads * N * N * 4, whole_tiles("half", N, C // num_heads) is not None
    launches_after, moved_after = _after(x, bias, 4 * tokens * num_heads, one_tile, cosine, backward)
    flops = (10 if backward else 4) * tokens * N * C + (12 if backward else 6) * tokens * C * cosine
    return Cost(launches, launches_after, moved + bias, moved_after, flops)


def _forward_before(x: int, scores: int, mask: int) -> tuple[int, int]:
    """Cut, scale, copy q and k, QK', add bias, (mask,) softmax, copy v, PV, join heads, put back: launches, bytes."""
    if mask:  # it is inverted and read; and two rolls, each over one axis and then the other: see `move_cost`
        return 17, 26 * x + 8 * scores + 3 * mask
    return 11, 18 * x + 6 * scores


def _backward_before(x: int, scores: int, mask: int) -> tuple[int, int]:
    """The same operations backwards: four products, softmax, the sum for the bias, and joining dq, dk and dv."""
    if mask:
        return 17, 36 * x + 10 * scores + mask
    return 12, 28 * x + 8 * scores


def _after(
    x: int, bias: int, statistic: int, one_tile: bool, cosine: bool, backward: bool
) -> tuple[int, int]:
    """The kernels: launches and bytes, but for partial sums, whose number is the device's."""
    if not backward:
        return 1, 4 * x + bias + statistic
    if one_tile:
        return 2 + cosine, 7 * x + 2 * bias + statistic  # one kernel, and sums of the parts
    return 4 + 2 * cosine, 16 * x + 4 * bias + 6 * statistic  # three kernels that read q, k, v and d_out


def specs() -> list[Spec]:
    """The launches to compile for a report: stage 1 of Swin-T, shifted, and of V2 with windows of 8, 16 and 24."""
    found = []
    for name, window, map_side, cosine in (
        ("w=7 d=32 shifted", 7, 56, False),
        ("V2 w=8 d=32", 8, 64, True),
        ("V2 w=16 d=32", 16, 64, True),
        ("V2 w=24 d=32", 24, 96, True),
    ):
        for kind, dtypes in (("half", ("fp16", "bf16")), ("fp32", ("fp32",))):
            windows, shift = 32 * (map_side // window) ** 2, 0 if cosine else 3
            sizes = (windows, 96, map_side, map_side, (window, window), (shift, shift), 3, 32**-0.5, 0.0, 0)
            job = Job(*sizes, cosine, kind, False)
            found += job_specs(f"window_attention[{name}]", job, dtypes)
    return found
