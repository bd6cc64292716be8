"""What eager PyTorch runs instead of the textbook operations: the same maths, less copied, less kept.

Each function here equals a readable one (`F.linear`, `Mlp.forward`, `attend`) to rounding, forward and backward.
Three ideas carry the file:

* Rows. LayerNorm, linear layers and residuals do not care where a token lies, so a stage keeps its tokens as
  `(M, C)` rows in window order and moves them with one gather.
* Recompute what is cheap. The backward pass rebuilds GELU outputs and attention probabilities from what must be
  kept anyway.
* With AVX-512, oneDNN multiplies fp32 matrices faster than the BLAS behind `F.linear`, and applies a GELU on the way.
  With AVX2 alone neither is faster throughout, and its GELU is the slower one.

Compilers, tracers and function transforms never see this file: `is_eager` sends them down the readable path.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
ONEDNN_MACS = 2 << 20  # below, setting up oneDNN's primitive costs more than its speed brings

CHUNK_BYTES = 8 << 20  # on a CPU, work is cut so that what lies between two operations stays in cache
SCORE_BYTES = 1 << 20  # the same for attention scores at inference
SMALL_WINDOW = 64  # tokens; up to here the fused attention of a CPU gains little from a second thread
GPU_CHUNK_BYTES = 1 << 30  # a GPU wants large pieces; this only bounds its memory

ORDINARY = (Tensor, nn.Parameter)  # not a subclass with operations of its own
Group = tuple[int, int]  # first and last-plus-one window of one kind


def chunk_length(like: Tensor, numbers: int, at_least: int = 1) -> int:
    """How many things make a chunk, if each has so many numbers of the type and device of `like`."""
    chunk = CHUNK_BYTES if like.device.type == "cpu" else GPU_CHUNK_BYTES
    return max(at_least, chunk // (numbers * like.element_size()))


def is_eager(x: Tensor) -> bool:
    """True when `x` is an ordinary tensor in ordinary eager execution, outside every tracer and transform."""
    return (
        type(x) in ORDINARY
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not in_transform()
    )


def in_transform() -> bool:
    """True within `torch.func`'s transforms (vmap, grad, jvp) and forward-mode differentiation."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autocast_on(device: torch.device) -> bool:
    """Is mixed precision switched on for this device? The meta device has none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager:
    """A block in which the dtypes written in the code are the ones used."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def is_symbolic(x: Any) -> bool:
    """True while `torch.fx` traces symbolically: `x` then stands for a tensor and has no sizes to compute with."""
    return isinstance(x, torch.fx.Proxy)


def is_plain(*modules: nn.Module) -> bool:
    """True when nobody watches or replaced these layers: no hooks, no other `forward`, no special parameters."""
    if (
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    ):
        return False
    return all(_is_untouched(m) for m in modules)


def _is_untouched(m: nn.Module) -> bool:
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return not hooks and "forward" not in m.__dict__ and all(map(_is_ordinary, m._parameters.values()))


def _is_ordinary(parameter: Tensor | None) -> bool:
    """Quantised and sharded parameters are subclasses with operations of their own."""
    return parameter is None or type(parameter) in ORDINARY


# --- matrix products ---------------------------------------------------------------------------------------------


def _onednn(x: Tensor, weight: Tensor) -> bool:
    """Does oneDNN's own linear layer pay here? fp32 with AVX-512, unless its set-up outweighs a small product."""
    return bool(
        HAS_AVX512
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.shape[0] * weight.numel() >= ONEDNN_MACS
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not autocast_on(x.device)
    )


def _matmul_t(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """`x @ weight.T + bias`, then GELU if asked, without autograd: `(M, K)`, `(O, K)` -> `(M, O)`."""
    if _onednn(x, weight):
        post: tuple = ("gelu", [], "none") if gelu else ("none", [], "")
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, *post)
    y = F.linear(x, weight, bias)
    return torch.ops.aten.gelu_(y) if gelu else y


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _by_autograd(grad: Tensor) -> bool:
    """Hand-written backward passes have no second derivative and know no vmap: then plain autograd must do."""
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad)


def _through_reference(function, inputs: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients by plain autograd, differentiable again where that is wanted."""
    wanted = [isinstance(t, Tensor) and t.requires_grad for t in inputs]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        alias = [t.view_as(t) if w else t for t, w in zip(inputs, wanted, strict=True)]
        out = function(*alias)
    ours = [t for t, w in zip(alias, wanted, strict=True) if w]
    grads = iter(torch.autograd.grad(out, ours, grad, create_graph=again))
    return tuple(next(grads) if w else None for w in wanted)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return _matmul_t(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        if _by_autograd(grad):
            return _through_reference(F.linear, (x, weight, bias), grad)
        grad = grad.contiguous()
        return (
            _matmul_t(grad, weight.t()) if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
            grad.sum(0) if ctx.needs_input_grad[2] else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for `(M, K)` rows."""
    if not _onednn(x, weight):
        return F.linear(x, weight, bias)
    if _needs_grad(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return _matmul_t(x, weight, bias)


# --- MLP -----------------------------------------------------------------------------------------------------------


def _mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def row_chunks(x: Tensor, width: int) -> list[slice]:
    """Cut the rows of `x` into chunks whose hidden layer, `width` wide, stays in cache."""
    step = chunk_length(x, width, at_least=64)
    return [slice(i, min(i + step, len(x))) for i in range(0, len(x), step)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total + a.T @ b`, in place where there is a total: weight gradients summed over chunks."""
    return a.t() @ b if total is None else total.addmm_(a.t(), b)


class _Mlp(torch.autograd.Function):
    """Keeps the rows and the hidden layer before its GELU; the GELU's output, four times the rows, is rebuilt.

    Rows go through in chunks, so that what lies between the two layers never leaves the cache. On a CPU, a layer of
    one chunk is small, and keeps the GELU's output too.
    """

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        chunks = row_chunks(x, w1.shape[0])
        hidden, out = [], []
        for rows in chunks:
            hidden.append(_matmul_t(x[rows], w1, b1))
            active = F.gelu(hidden[-1])
            out.append(_matmul_t(active, w2, b2))
        small = len(chunks) == 1 and x.device.type == "cpu"
        ctx.save_for_backward(x, w1, b1, w2, b2, active if small else None, *hidden)
        return _joined(out)

    @staticmethod
    def backward(ctx, grad):
        x, w1, b1, w2, b2, active, *hidden = ctx.saved_tensors
        if _by_autograd(grad):
            return _through_reference(_mlp, (x, w1, b1, w2, b2), grad)
        need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad
        grad = grad.contiguous()
        d_w1 = d_w2 = None
        d_b1: Any = 0.0 if need_b1 else None
        d_x = []
        for rows, h in zip(row_chunks(x, w1.shape[0]), hidden, strict=True):
            if need_w2:
                d_w2 = _plus_product(d_w2, grad[rows], F.gelu(h) if active is None else active)
            d_h = torch.ops.aten.gelu_backward(_matmul_t(grad[rows], w2.t()), h)
            if need_w1:
                d_w1 = _plus_product(d_w1, d_h, x[rows])
            if need_b1:
                d_b1 = d_b1 + d_h.sum(0)
            if need_x:
                d_x.append(_matmul_t(d_h, w1.t()))
        return _joined(d_x) if need_x else None, d_w1, d_b1, d_w2, grad.sum(0) if need_b2 else None


def fast_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """linear, GELU, linear on `(M, C)` rows."""
    if autocast_on(x.device):
        return _mlp(x, w1, b1, w2, b2)
    if _needs_grad(x, w1, b1, w2, b2):
        return _Mlp.apply(x, w1, b1, w2, b2)
    return _matmul_t(_matmul_t(x, w1, b1, gelu=True), w2, b2)


# --- row order -----------------------------------------------------------------------------------------------------


class _PermuteRows(torch.autograd.Function):
    """A gather whose backward pass is a gather too; autograd's own would add into a zeroed tensor, row by row."""

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.index, ctx.inverse = index, inverse
        return F.embedding(index, rows)

    @staticmethod
    def backward(ctx, grad):
        return permute_rows(grad.contiguous(), ctx.inverse, ctx.index), None, None


def permute_rows(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`rows[index]` for a permutation of `(M, C)` rows; `inverse` is the permutation that undoes it."""
    if _needs_grad(rows):
        return _PermuteRows.apply(rows, index, inverse)
    return F.embedding(index, rows)


# --- attention -------------------------------------------------------------------------------------------------


def _heads(qkv: Tensor, windows: Group, N: int, num_heads: int) -> Tensor:
    """The queries, keys and values of some windows, as a view: `(3, n, num_heads, N, head_dim)`."""
    start, stop = windows
    rows = qkv[start * N : stop * N].view(stop - start, N, 3, num_heads, -1)
    return rows.permute(2, 0, 3, 1, 4)


def unit_vectors(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis. A zero vector stays zero and gets no gradient.

    Padding makes zero keys in V2; `F.normalize` gives them gradients of 1e12, which overflow in fp16.
    """
    square = x.square().sum(-1, keepdim=True)
    return x / square.masked_fill(square == 0, torch.inf).sqrt()


def _unit(x: Tensor, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """`unit_vectors` times `scale`, in fp32 at least and faster, without autograd; and what divided them."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = x.square().sum(-1, keepdim=True).sqrt_()
    length = length.masked_fill_(length == 0, torch.inf) / scale
    return x / length, length


def _attend_group(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor | float) -> Tensor:
    """Attention of one kind of window by PyTorch's fused operation; `scale` is a tensor for cosine attention."""
    if isinstance(scale, Tensor):
        q, k = _unit(q, scale)[0].to(v.dtype), _unit(k)[0].to(v.dtype)
        scale = 1.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None], scale=scale)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)  # (n * N, C)


def _attend(
    qkv: Tensor, bias: Tensor, scale: Tensor | float, groups: Sequence[Group], num_heads: int
) -> Tensor:
    """Attention group by group by PyTorch's fused operation, or by batched products where these are faster."""
    N, parts = bias.shape[-1], []
    if N <= SMALL_WINDOW and qkv.device.type == "cpu" and torch.get_num_threads() > 1:
        step = max(1, SCORE_BYTES // (num_heads * N * N * bias.element_size()))
        for (start, stop), inside in window_runs(groups, step):
            parts.append(_attend_and_keep(qkv[start * N : stop * N], bias, scale, inside, num_heads)[0])
        return _joined(parts)
    for group, kind in zip(groups, bias, strict=True):
        if group[1] > group[0]:
            q, k, v = _heads(qkv, group, N, num_heads)
            parts.append(_attend_group(q, k, v, kind, scale))
    return _joined(parts)


def _attend_explicitly(qkv, bias, scale, groups, num_heads):
    """`_attend` of operations that can all be differentiated twice."""
    N = bias.shape[-1]
    q, k, v = _heads(qkv, (0, groups[-1][1]), N, num_heads)
    if isinstance(scale, Tensor):
        high = torch.promote_types(qkv.dtype, torch.float32)
        q, k = unit_vectors(q.to(high)).to(v.dtype), unit_vectors(k.to(high)).to(v.dtype)
    scores = (q * scale).to(v.dtype) @ k.transpose(-2, -1)
    parts = [scores[slice(*group)] + kind for group, kind in zip(groups, bias, strict=True)]
    probs = _joined(parts).softmax(-1).to(v.dtype)
    return (probs @ v).transpose(1, 2).reshape(qkv.shape[0], -1)


def window_runs(groups: Sequence[Group], step: int) -> list[tuple[Group, tuple[Group, ...]]]:
    """Cut all windows into runs of `step`: first and last-plus-one window, and the groups among them."""
    total = groups[-1][1]
    runs = [(i, min(i + step, total)) for i in range(0, total, step)]
    return [(run, tuple(_within(group, run) for group in groups)) for run in runs]


def _within(group: Group, run: Group) -> Group:
    """The part of a group that lies in a run, counted from the run's start; may be empty."""
    start, stop = run
    return min(max(group[0], start), stop) - start, min(max(group[1], start), stop) - start


def _probabilities(q: Tensor, k: Tensor, bias: Tensor, groups: Sequence[Group]) -> Tensor:
    """Softmax of `q @ k.T + bias` for a run of windows: `(n, num_heads, N, N)`, in the precision of the bias."""
    scores = (q @ k.transpose(-2, -1)).to(bias.dtype)
    for (start, stop), kind in zip(groups, bias, strict=True):
        if stop > start:
            scores[start:stop] += kind
    return scores.softmax(-1)


class _WindowAttention(torch.autograd.Function):
    """Keeps q, k, v and the bias; the probabilities only where these are few (N <= 2 head_dim).

    Elsewhere the backward pass rebuilds the probabilities, run by run, and no N x N tensor of a whole stage exists.
    """

    @staticmethod
    def forward(ctx, qkv, bias, scale, groups, num_heads):
        cosine, N = isinstance(scale, Tensor), bias.shape[-1]
        ctx.dot_scale, ctx.groups, ctx.num_heads = None if cosine else scale, groups, num_heads
        constant = scale.detach() if cosine else scale  # with gradients on, SDPA would keep what we rebuild
        args = qkv.detach(), bias.detach(), constant, groups, num_heads
        out, probs = (
            _attend_and_keep_runs(*args) if 2 * _head_dim(qkv, num_heads) >= N else (_attend(*args), [])
        )
        ctx.save_for_backward(qkv, bias, scale if cosine else None, *probs)
        return out

    @staticmethod
    def backward(ctx, grad):
        qkv, bias, logit_scale, *probs = ctx.saved_tensors
        scale = ctx.dot_scale if logit_scale is None else logit_scale
        if _by_autograd(grad):
            return _through_reference(_attend_explicitly, (qkv, bias, scale, ctx.groups, ctx.num_heads), grad)
        N, num_heads = bias.shape[-1], ctx.num_heads
        d_qkv, d_bias = torch.empty_like(qkv), torch.zeros_like(bias)
        d_scale: Any = None if logit_scale is None else 0.0
        for i, ((start, stop), groups) in enumerate(training_runs(qkv, bias, ctx.groups, num_heads)):
            d_out = (
                grad[start * N : stop * N]
                .reshape(stop - start, N, num_heads, -1)
                .transpose(1, 2)
                .contiguous()
            )
            q, k, v = _heads(qkv, (start, stop), N, num_heads).clone(memory_format=torch.contiguous_format)
            kept = probs[i] if probs else None
            if logit_scale is None:
                d_q, d_k, d_v, d_scores = _backward_dot(q, k, v, bias, groups, scale, d_out, kept)
            else:
                d_q, d_k, d_v, d_scores, d_s = _backward_cosine(q, k, v, bias, groups, scale, d_out, kept)
                d_scale = d_scale + d_s
            for into, d in zip(_heads(d_qkv, (start, stop), N, num_heads), (d_q, d_k, d_v), strict=True):
                into.copy_(d)
            for (first, last), into in zip(groups, d_bias, strict=True):
                if last > first:
                    into += d_scores[first:last].sum(0)
        return d_qkv, d_bias, d_scale, None, None


def _head_dim(qkv: Tensor, num_heads: int) -> int:
    return qkv.shape[1] // (3 * num_heads)


def training_runs(qkv: Tensor, bias: Tensor, groups: Sequence[Group], num_heads: int) -> list:
    """The runs of windows that training handles at a time: their scores make a chunk."""
    N = bias.shape[-1]
    return window_runs(groups, chunk_length(qkv, num_heads * N * N))


def _attend_and_keep_runs(qkv, bias, scale, groups, num_heads) -> tuple[Tensor, list[Tensor]]:
    """Attention run by run, and the probabilities of each run."""
    N, parts, probs = bias.shape[-1], [], []
    for (start, stop), inside in training_runs(qkv, bias, groups, num_heads):
        out, kept = _attend_and_keep(qkv[start * N : stop * N], bias, scale, inside, num_heads)
        parts.append(out)
        probs.append(kept)
    return _joined(parts), probs


def _attend_and_keep(qkv, bias, scale, groups, num_heads) -> tuple[Tensor, Tensor]:
    """Attention that also returns its probabilities `(num_windows, num_heads, N, N)`."""
    N = bias.shape[-1]
    q, k, v = _heads(qkv, (0, groups[-1][1]), N, num_heads).clone(memory_format=torch.contiguous_format)
    if isinstance(scale, Tensor):
        q, k = _unit(q, scale)[0].to(v.dtype), _unit(k)[0].to(v.dtype)
    else:
        q *= scale
    probs = _probabilities(q, k, bias, groups)
    return (probs.to(v.dtype) @ v).transpose(1, 2).reshape(qkv.shape[0], -1), probs


def _backward_scores(probs: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the scores and of the values."""
    d_probs = (d_out @ v.transpose(-2, -1)).to(probs.dtype)
    d_scores = torch.ops.aten._softmax_backward_data(d_probs, probs, -1, probs.dtype)
    return d_scores, probs.to(v.dtype).transpose(-2, -1) @ d_out


def _backward_dot(q, k, v, bias, groups, scale: float, d_out, probs) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the scores, for dot-product attention."""
    q *= scale
    probs = _probabilities(q, k, bias, groups) if probs is None else probs
    d_scores, d_v = _backward_scores(probs, v, d_out)
    low = d_scores.to(q.dtype)
    return (low @ k).mul_(scale), low.transpose(-2, -1) @ q, d_v, d_scores


def _backward_cosine(q, k, v, bias, groups, scale: Tensor, d_out, probs) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the scores and the scale, for cosine attention."""
    (q, q_length), (k, k_length) = _unit(q), _unit(k)
    scaled, unit_k = (q * scale).to(v.dtype), k.to(v.dtype)
    probs = _probabilities(scaled, unit_k, bias, groups) if probs is None else probs
    d_scores, d_v = _backward_scores(probs, v, d_out)
    low = d_scores.to(v.dtype)
    d_scaled, d_k = low @ unit_k, low.transpose(-2, -1) @ scaled
    d_scale = (d_scaled * q).sum(dim=(0, 2, 3))[:, None, None].to(scale.dtype)
    d_q = _backward_unit(d_scaled * scale, q, q_length)
    return d_q, _backward_unit(d_k, k, k_length), d_v, d_scores, d_scale


def _backward_unit(grad: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """Gradient through x -> x / |x|: what is left of `grad` beside the direction itself, over the length."""
    return (grad - unit * (grad * unit).sum(-1, keepdim=True)) / length


def window_attention(
    qkv: Tensor, bias: Tensor, scale: Tensor | float, groups: Sequence[Group], num_heads: int
) -> Tensor:
    """Attention in every window of a stage: rows `(M, 3C)` as the qkv layer wrote them -> rows `(M, C)`.

    Args:
        qkv: rows in window order, each q, k, v by heads; M = windows * N.
        bias: `(kinds, num_heads, N, N)`, the relative position bias with the shift mask of each kind in it.
        scale: 1/sqrt(head_dim), or the tensor `(num_heads, 1, 1)` that multiplies cosines (V2).
        groups: the run of windows that each kind's bias is for; together they are all windows.
    """
    with no_autocast(qkv.device):
        if _needs_grad(qkv, bias, scale if isinstance(scale, Tensor) else None):
            return _WindowAttention.apply(qkv, bias, scale, tuple(groups), num_heads)
        return _attend(qkv, bias, scale, groups, num_heads)
