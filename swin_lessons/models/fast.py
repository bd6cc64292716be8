"""What eager PyTorch runs instead of the textbook operations: the same maths, less copied, less kept.

Each function here equals a readable one (`F.linear`, `Mlp.forward`, `attend`) to rounding, forward and backward.
Three ideas carry the file:

* Rows. LayerNorm, linear layers and residuals do not care where a token lies, so a stage keeps its tokens as
  `(M, C)` rows in window order and moves them with one gather.
* Recompute what is cheap. The backward pass rebuilds GELU outputs and attention probabilities from what must be
  kept anyway.
* On x86 CPUs, oneDNN multiplies fp32 matrices faster than the BLAS behind `F.linear`, and applies a GELU on the way.

Compilers, tracers and function transforms never see this file: `is_eager` sends them down the readable path.
"""

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _module

CHUNK_BYTES = 8 << 20  # attention probabilities held at once in a backward pass: they should stay in cache

Group = tuple[int, int]  # first and last-plus-one window of one kind


def is_eager(x: Tensor) -> bool:
    """True when `x` is an ordinary tensor in ordinary eager execution, outside every tracer and transform."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def is_symbolic(x: Any) -> bool:
    """True while `torch.fx` traces symbolically: `x` then stands for a tensor and has no sizes to compute with."""
    return isinstance(x, torch.fx.Proxy)


def is_plain(*modules: nn.Module) -> bool:
    """True when nobody watches or replaced these layers: standard classes, no hooks, no parametrizations."""
    if _module._global_forward_hooks or _module._global_forward_pre_hooks or _module._global_backward_hooks:
        return False
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in modules
    )


# --- matrix products ---------------------------------------------------------------------------------------------


def _onednn(x: Tensor) -> bool:
    """Does oneDNN's own linear layer pay here? fp32 on an x86 CPU; elsewhere `F.linear` is already the best."""
    return bool(
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and x.numel() > 0
    )


def _matmul_t(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """`x @ weight.T + bias`, then GELU if asked, without autograd: `(M, K)`, `(O, K)` -> `(M, O)`."""
    if _onednn(x):
        post: tuple = ("gelu", [], "none") if gelu else ("none", [], "")
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, *post)
    y = F.linear(x, weight, bias)
    return F.gelu(y) if gelu else y


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _through_reference(function, inputs: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients by plain autograd: for a second derivative, which the hand-written backward passes lack."""
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    grads = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return tuple(next(grads) if isinstance(t, Tensor) and t.requires_grad else None for t in inputs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return _matmul_t(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _through_reference(F.linear, (x, weight, bias), grad)
        grad = grad.contiguous()
        return (
            _matmul_t(grad, weight.t()) if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
            grad.sum(0) if ctx.needs_input_grad[2] else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for `(M, K)` rows."""
    if not _onednn(x):
        return F.linear(x, weight, bias)
    if _needs_grad(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return _matmul_t(x, weight, bias)


# --- MLP -----------------------------------------------------------------------------------------------------------


def _mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


class _Mlp(torch.autograd.Function):
    """Keeps the rows and the hidden layer before its GELU; the GELU's output is four times the rows, and rebuilt."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        hidden = _matmul_t(x, w1, b1)
        ctx.save_for_backward(x, w1, b1, w2, b2, hidden)
        return _matmul_t(F.gelu(hidden), w2, b2)

    @staticmethod
    def backward(ctx, grad):
        x, w1, b1, w2, b2, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _through_reference(_mlp, (x, w1, b1, w2, b2), grad)
        need = ctx.needs_input_grad
        grad = grad.contiguous()
        d_w2 = grad.t() @ F.gelu(hidden) if need[3] else None
        d_b2 = grad.sum(0) if need[4] else None
        d_hidden = torch.ops.aten.gelu_backward(_matmul_t(grad, w2.t()), hidden)
        d_w1 = d_hidden.t() @ x if need[1] else None
        d_b1 = d_hidden.sum(0) if need[2] else None
        d_x = _matmul_t(d_hidden, w1.t()) if need[0] else None
        return d_x, d_w1, d_b1, d_w2, d_b2


def fast_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """linear, GELU, linear on `(M, C)` rows."""
    if torch.is_autocast_enabled(x.device.type):
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


# --- attention -----------------------------------------------------------------------------------------------------


def _heads(qkv: Tensor, windows: Group, N: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of some windows, read in place: three `(n, num_heads, N, head_dim)` views."""
    start, stop = windows
    rows = qkv[start * N : stop * N].view(stop - start, N, 3, num_heads, -1)
    q, k, v = rows.permute(2, 0, 3, 1, 4)
    return q, k, v


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors along the last axis, and the lengths they had; in fp32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
    return x / length, length


def _attend_group(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor | float) -> Tensor:
    """Attention of one kind of window by PyTorch's fused operation; `scale` is a tensor for cosine attention."""
    if isinstance(scale, Tensor):
        q, k = (_unit(q)[0] * scale).to(v.dtype), _unit(k)[0].to(v.dtype)
        scale = 1.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None], scale=scale)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)  # (n * N, C)


def _attend(
    qkv: Tensor, bias: Tensor, scale: Tensor | float, groups: Sequence[Group], num_heads: int
) -> Tensor:
    N = bias.shape[-1]
    parts = [
        _attend_group(*_heads(qkv, group, N, num_heads), kind, scale)
        for group, kind in zip(groups, bias, strict=True)
        if group[1] > group[0]
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pieces(groups: Sequence[Group], bytes_per_window: int) -> list[tuple[int, Group]]:
    """Cut each group into runs of windows whose probabilities fit `CHUNK_BYTES`: `(kind, (start, stop))`."""
    step = max(1, CHUNK_BYTES // bytes_per_window)
    return [
        (kind, (i, min(i + step, stop)))
        for kind, (start, stop) in enumerate(groups)
        for i in range(start, stop, step)
    ]


class _WindowAttention(torch.autograd.Function):
    """Keeps q, k, v and the bias alone. The probabilities, N/head_dim times the rows, are rebuilt chunk by chunk."""

    @staticmethod
    def forward(ctx, qkv, bias, scale, groups, num_heads):
        ctx.save_for_backward(qkv, bias, scale if isinstance(scale, Tensor) else None)
        ctx.scale, ctx.groups, ctx.num_heads = scale, groups, num_heads
        if isinstance(scale, Tensor):
            ctx.scale = None
        return _attend(qkv, bias, scale, groups, num_heads)

    @staticmethod
    def backward(ctx, grad):
        qkv, bias, logit_scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = (qkv, bias, ctx.scale if logit_scale is None else logit_scale, ctx.groups, ctx.num_heads)
            return _through_reference(_attend, inputs, grad)
        d_qkv, d_bias = torch.empty_like(qkv), torch.zeros_like(bias)
        d_scale: Any = 0.0 if logit_scale is not None else None
        N, num_heads = bias.shape[-1], ctx.num_heads
        grad = grad.contiguous()
        for kind, (start, stop) in _pieces(ctx.groups, num_heads * N * N * grad.element_size()):
            windows = (start, stop)
            d_out = grad[start * N : stop * N].view(stop - start, N, num_heads, -1).transpose(1, 2)
            q, k, v = _heads(qkv, windows, N, num_heads)
            into = _heads(d_qkv, windows, N, num_heads)
            if logit_scale is None:
                d_kind = _backward_dot(q, k, v, bias[kind], ctx.scale, d_out, into)
            else:
                d_kind, d_s = _backward_cosine(q, k, v, bias[kind], logit_scale, d_out, into)
                d_scale = d_scale + d_s
            d_bias[kind] += d_kind
        return d_qkv, d_bias, d_scale, None, None


def _backward_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """From queries that carry their scale: the gradients of the scores and of the values."""
    scores = (q @ k.transpose(-2, -1)).add_(bias)
    high = scores.dtype if scores.dtype == torch.float64 else torch.float32
    probs = scores.softmax(-1, dtype=high)
    d_v = probs.to(v.dtype).transpose(-2, -1) @ d_out
    d_probs = (d_out @ v.transpose(-2, -1)).to(high)
    return torch.ops.aten._softmax_backward_data(d_probs, probs, -1, high), d_v


def _backward_dot(q, k, v, bias, scale: float, d_out, into) -> Tensor:
    """Write the gradients of q, k, v into the views `into`; return the bias gradient `(num_heads, N, N)`."""
    q = q * scale
    d_scores, d_v = _backward_scores(q, k, v, bias, d_out)
    d_bias = d_scores.sum(0)
    d_scores = d_scores.to(q.dtype)
    into[0].copy_((d_scores @ k).mul_(scale))
    into[1].copy_(d_scores.transpose(-2, -1) @ q)
    into[2].copy_(d_v)
    return d_bias


def _backward_cosine(q, k, v, bias, scale: Tensor, d_out, into) -> tuple[Tensor, Tensor]:
    """As `_backward_dot` for cosine attention; returns the gradients of the bias and of the scale."""
    (q, q_length), (k, k_length) = _unit(q), _unit(k)
    d_scores, d_v = _backward_scores((q * scale).to(v.dtype), k.to(v.dtype), v, bias, d_out)
    d_q = d_scores @ k  # with respect to scale * unit query
    d_k = d_scores.transpose(-2, -1) @ (q * scale)
    d_scale = (d_q * q).sum(dim=(0, 2, 3))[:, None, None]
    into[0].copy_(_backward_unit(d_q * scale, q, q_length))
    into[1].copy_(_backward_unit(d_k, k, k_length))
    into[2].copy_(d_v)
    return d_scores.sum(0), d_scale.to(scale.dtype)


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
    with torch.autocast(qkv.device.type, enabled=False):
        if _needs_grad(qkv, bias, scale if isinstance(scale, Tensor) else None):
            return _WindowAttention.apply(qkv, bias, scale, tuple(groups), num_heads)
        return _attend(qkv, bias, scale, groups, num_heads)
