"""Every fused kernel against its maths, then against PyTorch with and without its compiler.

Forward and backward of each operation at sizes of Swin-T's first and third stage, of V2 and of large windows; those of
inference forward alone. First the numbers: Triton's results and gradients against PyTorch in fp64. Then, on a GPU, the
times: eager PyTorch, torch.compile and Triton in turns, on operands that come from memory; beside them the bytes that
an operation has to move, and the time that these take at the measured bandwidth. PyTorch's INT8 is `torch._int_mm`
among separate operations; for attention it has none, so floats are the peer. Without a GPU, small sizes go through the
interpreter, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from swin_lessons.profiling.roof import roofline
from swin_lessons.profiling.suites import BenchOptions, Show, check_kernels_run
from swin_lessons.profiling.timing import Comparison, compare, rotating

__all__ = ["Case", "cases", "check", "run"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}  # of the largest number, forward and backward
CODES = 0.01  # the same where results are int8: one of 127 steps, next to a half
WEIGHTS = 0.03  # where attention's weights take 256 values, relative to the largest that was met first
MODES = ("forward", "forward and backward")
BARS = {"window_attention": 3.0}  # over eager, forward and backward


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: of the operation, and its size in words.
        shapes: of the tensors that it takes; all need gradients, unless the operation has none.
        call: the operation: tensors, then `impl`.
        bytes: that a kernel moves, for an item size: forward, and forward with backward if there are gradients.
        whole: which tensors are int8.
        scales: which tensors are scales.
        allowed: of the largest number, how far results may be off; None for `TOLERANCE`.
        peer: what PyTorch does instead where it cannot do the same.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    bytes: Callable[[int], tuple[int, ...]]
    whole: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    allowed: float | None = None
    peer: Callable[..., Any] | None = None

    @property
    def gradients(self) -> bool:
        """Has the operation a backward pass?"""
        return len(self.bytes(4)) == 2

    def limit(self, dtype: str) -> float:
        """How far results may be off, of the largest number."""
        return TOLERANCE[dtype] if self.allowed is None else self.allowed

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Random operands, the same each time; tables and norm parameters in fp32 but for a linear layer's."""
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randn(shape, generator=generator) for shape in self.shapes]
        alike = "linear" in self.name or "int8" in self.name
        wide = len(numbers) if alike else 1 + ("add" in self.name or "reverse" in self.name)  # two maps
        found = []
        for i, t in enumerate(numbers):
            if i in self.whole:
                t = (40 * t).round().clamp(-128, 127).to(torch.int8)
            elif i in self.scales:
                t = 0.01 * (1 + t.abs())
            else:
                t = t.to(dtype if i < wide else torch.float32)
            found.append(t.to(device).requires_grad_(self.gradients))
        return found


def cases(small: bool = False) -> list[Case]:
    """All operations; `small` for the interpreter."""
    found = []
    for B, side, C in ((1, 9, 32),) if small else ((64, 56, 96), (64, 14, 384)):
        window, shift, heads = (7, 7), (3, 3), C // 32
        found += norms(B, side, C) + moves(B, side, C, window, shift)
        found.append(attention(B, side, C, window, shift, heads, cosine=False))
        found.append(mlp(B, side, C))
        found += linears(B, side, C, window, shift, heads) + int8(B, side, C)
        found.append(int8_attention(B, side, C, window, shift, heads, cosine=False))
    for B, side, C, w in ((1, 8, 32, 8),) if small else ((64, 64, 96, 8), (64, 64, 96, 16), (64, 48, 96, 24)):
        for make in (attention, int8_attention):
            found.append(make(B, side, C, (w, w), (w // 2, w // 2), C // 32, cosine=True))
    return found


def norms(B: int, side: int, C: int) -> list[Case]:
    """LayerNorm alone, and with the addition before or after it."""
    from swin_lessons.kernels import add_layer_norm, layer_norm
    from swin_lessons.kernels.layer_norm import add_layer_norm_cost, layer_norm_cost

    rows, x, size = B * side * side, (B, side, side, C), f"{B} x {side} x {side} x {C}"

    def plain(itemsize: int) -> tuple[int, int]:
        forward, backward = (layer_norm_cost(rows, C, itemsize, b).bytes_after for b in (False, True))
        return forward, forward + backward

    def adding(itemsize: int) -> tuple[int, int]:
        forward = add_layer_norm_cost(rows, C, itemsize).bytes_after
        backward = layer_norm_cost(rows, C, itemsize, True).bytes_after + rows * C * itemsize
        return forward, forward + backward

    def order(which: str) -> Callable[..., Any]:
        return lambda x, y, w, b, impl: add_layer_norm(x, y, w, b, order=which, impl=impl)  # type: ignore[call-overload]

    return [
        Case(
            f"layer_norm {size}",
            (x, (C,), (C,)),
            lambda x, w, b, impl: layer_norm(x, w, b, impl=impl),
            plain,
        ),
        *(Case(f"add_layer_norm {o} {size}", (x, x, (C,), (C,)), order(o), adding) for o in ("pre", "post")),
    ]


def moves(B: int, side: int, C: int, window: tuple[int, int], shift: tuple[int, int]) -> list[Case]:
    """To windows and back, with the norms of V1."""
    from swin_lessons.kernels import reverse_unshift, shift_partition
    from swin_lessons.kernels.reverse_unshift import reverse_unshift_cost
    from swin_lessons.kernels.shift_partition import shift_partition_cost
    from swin_lessons.kernels.window_rows import window_shape

    x, size = (B, side, side, C), f"{B} x {side} x {side} x {C}"

    def both(cost: Callable[..., Any], **more: Any) -> Callable[[int], tuple[int, int]]:
        def moved(itemsize: int) -> tuple[int, int]:
            one, two = (
                cost(x, window, shift, itemsize, backward=b, **more).bytes_after for b in (False, True)
            )
            return one, one + two

        return moved

    return [
        Case(
            f"shift_partition {size}",
            (x, (C,), (C,)),
            lambda x, w, b, impl: shift_partition(x, window, shift, w, b, impl=impl),
            both(shift_partition_cost),
        ),
        Case(
            f"reverse_unshift {size}",
            (window_shape(x, window), x, (C,), (C,)),
            lambda v, x, w, b, impl: reverse_unshift(v, x, window, shift, w, b, order="pre", impl=impl),
            both(reverse_unshift_cost, order="pre"),
        ),
    ]


def attention(
    B: int, side: int, C: int, window: tuple[int, int], shift: tuple[int, int], heads: int, cosine: bool
) -> Case:
    """Between the two linear layers of attention; V2 with `cosine`."""
    from swin_lessons.kernels import window_attention
    from swin_lessons.kernels.window_attention import window_attention_cost
    from swin_lessons.kernels.window_rows import padded

    sides = padded(side, side, window)
    N = window[0] * window[1]
    shapes = ((B, *sides, 3 * C), (heads, N, N), *(((heads, 1, 1),) if cosine else ()))

    def call(qkv: Tensor, bias: Tensor, *factor: Tensor, impl: str) -> Tensor:
        logit_factor = 10 + factor[0] if factor else None
        return window_attention(
            qkv, bias, window, shift, num_heads=heads, logit_factor=logit_factor, impl=impl
        )

    def moved(itemsize: int) -> tuple[int, int]:
        tokens = B * sides[0] * sides[1]
        one, two = (
            window_attention_cost(tokens, C, heads, N, itemsize, shifted=True, cosine=cosine, backward=b)
            for b in (False, True)
        )
        return one.bytes_after, one.bytes_after + two.bytes_after

    version = "V2" if cosine else "V1"
    name = f"window_attention {version} {B} x {sides[0]} x {sides[1]} x {C}, window {window[0]}"
    return Case(name, shapes, call, moved)


def mlp(B: int, side: int, C: int) -> Case:
    """The first layer of the MLP."""
    from swin_lessons.kernels import linear_gelu
    from swin_lessons.kernels.linear_gelu import linear_gelu_cost

    rows = B * side * side

    def moved(itemsize: int) -> tuple[int, int]:
        forward = linear_gelu_cost(rows, C, 4 * C, itemsize).bytes_after
        training = linear_gelu_cost(rows, C, 4 * C, itemsize, training=True).bytes_after
        return forward, training + linear_gelu_cost(rows, C, 4 * C, itemsize, backward=True).bytes_after

    def call(x: Tensor, weight: Tensor, bias: Tensor, impl: str) -> Tensor:
        return linear_gelu(x, weight * C**-0.5, bias, impl=impl)

    return Case(f"linear_gelu {rows} x {C} to {4 * C}", ((rows, C), (4 * C, C), (4 * C,)), call, moved)


def linears(
    B: int, side: int, C: int, window: tuple[int, int], shift: tuple[int, int], heads: int
) -> list[Case]:
    """Linear layers of inference around attention: QKV, projection with shortcut to the map, and plain ones."""
    from swin_lessons.kernels import linear, linear_residual, qkv_linear
    from swin_lessons.kernels.linear import linear_cost, linear_residual_cost, qkv_linear_cost
    from swin_lessons.kernels.window_rows import window_shape

    x, size, M = (B, side, side, C), f"{B} x {side} x {side} x {C}", B * side * side
    windows = window_shape(x, window)
    square = ((C, C), (C,))
    return [
        Case(
            f"linear {size}",
            (x, *square),
            lambda x, w, b, impl: linear(x, w * C**-0.5, b, impl=impl),
            lambda itemsize: (linear_cost(M, C, C, itemsize).bytes_after,),
        ),
        Case(
            f"linear_residual {M} x {4 * C} to {C}",
            ((M, 4 * C), (C, 4 * C), (C,), (M, C)),
            lambda x, w, b, r, impl: linear_residual(x, w * (4 * C) ** -0.5, b, r, impl=impl),
            lambda itemsize: (linear_residual_cost(M, 4 * C, C, itemsize).bytes_after,),
        ),
        Case(
            f"linear_residual to map {size}",
            (windows, *square, x),
            lambda v, w, b, r, impl: linear_residual(
                v, w * C**-0.5, b, r, window_size=window, shift_size=shift, impl=impl
            ),
            lambda itemsize: (linear_residual_cost(M, C, C, itemsize).bytes_after,),
        ),
        Case(
            f"qkv_linear {size}",
            (x, (3 * C, C), (3 * C,)),
            lambda x, w, b, impl: qkv_linear(x, w * C**-0.5, b, window, shift, num_heads=heads, impl=impl),
            lambda itemsize: (qkv_linear_cost(M, C, itemsize).bytes_after,),
        ),
    ]


def int8(B: int, side: int, C: int) -> list[Case]:
    """To int8 and back, LayerNorm to int8, and both layers of the MLP in int8."""
    from swin_lessons.kernels import dequantize, int8_linear, layer_norm_quantize, quantize
    from swin_lessons.kernels.int8 import quantize_cost
    from swin_lessons.kernels.int8_linear import int8_linear_cost
    from swin_lessons.kernels.layer_norm_quantize import layer_norm_quantize_cost

    x, size, M = (B, side, side, C), f"{B} x {side} x {side} x {C}", B * side * side

    def first(x, w, xs, ws, b, out, impl):
        return int8_linear(x, w, xs, ws, b, gelu=True, out_scale=out, impl=impl)

    def last(x, w, xs, ws, b, r, impl):
        return int8_linear(x, w, xs, ws, b, residual=r, impl=impl)

    return [
        Case(
            f"quantize {size}",
            (x, (1,)),
            lambda x, s, impl: quantize(x, s, impl=impl),
            lambda itemsize: (quantize_cost(M * C, itemsize).bytes_after,),
            scales=(1,),
            allowed=CODES,
        ),
        Case(
            f"dequantize {size}",
            (x, (1,)),
            lambda q, s, impl: dequantize(q, s, impl=impl),
            lambda itemsize: (5 * M * C,),
            whole=(0,),
            scales=(1,),
        ),
        Case(
            f"layer_norm_quantize {size}",
            (x, (C,), (C,), (1,)),
            lambda x, w, b, s, impl: layer_norm_quantize(x, w, b, 1e-5, s, impl=impl),
            lambda itemsize: (layer_norm_quantize_cost(M, C, itemsize).bytes_after,),
            scales=(3,),
            allowed=CODES,
        ),
        Case(
            f"int8_linear {M} x {C} to {4 * C}, GELU, int8",
            ((M, C), (4 * C, C), (1,), (4 * C,), (4 * C,), (1,)),
            first,
            lambda itemsize: (
                int8_linear_cost(M, C, 4 * C, itemsize, gelu=True, requantize=True).bytes_after,
            ),
            whole=(0, 1),
            scales=(2, 3, 5),
            allowed=CODES,
        ),
        Case(
            f"int8_linear {M} x {4 * C} to {C}, residual",
            ((M, 4 * C), (C, 4 * C), (1,), (C,), (C,), (M, C)),
            last,
            lambda itemsize: (int8_linear_cost(M, 4 * C, C, itemsize, residual=True).bytes_after,),
            whole=(0, 1),
            scales=(2, 3),
        ),
    ]


def int8_attention(
    B: int, side: int, C: int, window: tuple[int, int], shift: tuple[int, int], heads: int, cosine: bool
) -> Case:
    """Between two INT8 linear layers. PyTorch has no INT8 product of many small matrices: floats are its peer."""
    from swin_lessons.kernels import dequantize, int8_window_attention, window_attention
    from swin_lessons.kernels.int8_window_attention import int8_window_attention_cost
    from swin_lessons.kernels.window_rows import padded

    sides, N = padded(side, side, window), window[0] * window[1]
    factors = ((heads, 1, 1),) if cosine else ()

    def call(qkv: Tensor, bias: Tensor, scale: Tensor, *factor: Tensor, impl: str) -> Tensor:
        logit_factor = 10 + factor[0].float() if factor else None
        sizes: dict[str, Any] = {"num_heads": heads, "qkv_scale": scale, "out_scale": scale}
        return int8_window_attention(qkv, bias, window, shift, logit_factor=logit_factor, impl=impl, **sizes)

    def in_floats(qkv: Tensor, bias: Tensor, scale: Tensor, *factor: Tensor) -> Tensor:
        logit_factor = 10 + factor[0].float() if factor else None
        wide = dequantize(qkv, scale, dtype=bias.dtype, impl="torch")
        return window_attention(
            wide, bias, window, shift, num_heads=heads, logit_factor=logit_factor, impl="torch"
        )

    def moved(itemsize: int) -> tuple[int, ...]:
        tokens = B * sides[0] * sides[1]
        return (int8_window_attention_cost(tokens, C, heads, N, shifted=True, cosine=cosine).bytes_after,)

    version = "V2" if cosine else "V1"
    name = f"int8_window_attention {version} {B} x {sides[0]} x {sides[1]} x {C}, window {window[0]}"
    shapes = ((B, *sides, 3 * C), (heads, N, N), (1,), *factors)
    return Case(name, shapes, call, moved, whole=(0,), scales=(2,), allowed=WEIGHTS, peer=in_floats)


def run(options: BenchOptions, show: Show) -> dict[str, Any]:
    """Every operation in every dtype: {"options", "rows", "tables": {"times"}}."""
    cuda = torch.cuda.is_available()
    check_kernels_run()
    device = torch.device("cuda" if cuda else "cpu")
    bandwidth = roofline(device).bandwidth if cuda else None
    rows: list[dict[str, Any]] = []
    for case in cases(small=not cuda):
        for name in options.dtypes or tuple(DTYPES):
            rows += measure(case, name, device, bandwidth, options.rounds, show)
    return {
        "options": asdict(options),
        "bandwidth": bandwidth,
        "rows": rows,
        "tables": {"times": table(rows)},
    }


def measure(
    case: Case, dtype: str, device: torch.device, bandwidth: float | None, rounds: int, show: Show
) -> list[dict[str, Any]]:
    """Check, then time: a row each for forward, and forward with backward."""
    tensors = case.tensors(DTYPES[dtype], device)
    difference = check(case, tensors, dtype)
    known = {"op": case.name, "dtype": dtype, "difference": difference}
    found = []
    for mode, moved in zip(MODES, case.bytes(DTYPES[dtype].itemsize), strict=False):
        row = known | {"mode": mode, "bytes": moved}
        if bandwidth is not None:
            with show.section(f"{case.name} {dtype} {mode}", 3 * rounds) as progress:
                result = compare(_contestants(case, tensors, mode), rounds=rounds, warmup=3, device=device)
                progress(mode)
            row |= _times(result, moved / bandwidth)
        found.append(row | _verdict(case, row))
    return found


def check(case: Case, tensors: Sequence[Tensor], dtype: str) -> float:
    """Largest difference of Triton's results and gradients from PyTorch's in fp64, relative to the largest number.

    Raises:
        ArithmeticError: it is more than the dtype explains.
    """
    exact = [
        t.detach().double().requires_grad_(case.gradients) if t.is_floating_point() else t for t in tensors
    ]
    expected, found = _values(case, exact, "torch"), _values(case, tensors, "triton")
    worst = 0.0
    for theirs, ours in zip(expected, found, strict=True):
        worst = max(worst, float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()))
    if not worst <= case.limit(dtype):
        raise ArithmeticError(
            f"{case.name} in {dtype} is off by {worst:.1e} of the largest number ({case.limit(dtype):.0e} is allowed)"
        )
    return worst


def _values(case: Case, tensors: Sequence[Tensor], impl: str) -> list[Tensor]:
    """Results, and the gradients of a sum of them that weighs every element differently."""
    outputs = case.call(*tensors, impl=impl)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if not case.gradients:
        return outputs
    score = sum((y * _eighths(y)).sum() for y in outputs)
    assert isinstance(score, Tensor)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(score, tensors)]


def _eighths(y: Tensor) -> Tensor:
    """From -1 to 1, numbers that every dtype holds: so the gradient that enters is the same in all of them."""
    return ((torch.arange(y.numel(), device=y.device) % 17 - 8) / 8).to(y.dtype).view(y.shape)


def _contestants(case: Case, tensors: Sequence[Tensor], mode: str) -> dict[str, Callable[[], Any]]:
    """Eager PyTorch, its compiler, Triton; each on operands that lie in memory, not in the cache."""

    def step(impl: str) -> Callable[..., Any]:
        return lambda *t: case.call(*t, impl=impl)

    eager = step("torch") if case.peer is None else case.peer
    calls = {
        "eager": eager,
        "compiled": torch.compile(eager, dynamic=False),
        "triton": step("triton"),
    }
    wrap = _forward if mode == "forward" else _both
    return {name: rotating(wrap(call), *tensors) for name, call in calls.items()}


def _forward(call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*tensors: Tensor) -> Any:
        with torch.no_grad():
            return call(*tensors)

    return timed


def _both(call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*tensors: Tensor) -> Any:
        outputs = call(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad(outputs, tensors, grad_outputs=[torch.ones_like(y) for y in outputs])

    return timed


def _times(result: Comparison, bound: float) -> dict[str, Any]:
    seconds = {name: timing.median for name, timing in result.timings.items()}
    return {
        "seconds": seconds,
        "bound": bound,
        "over_eager": seconds["eager"] / seconds["triton"],
        "over_compiled": seconds["compiled"] / seconds["triton"],
        "of_bandwidth": bound / seconds["triton"],
    }


def _verdict(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """The bar of an operation, in half precision, forward with backward."""
    bar = BARS.get(case.name.split()[0])
    if bar is None or "over_eager" not in row or row["mode"] == "forward" or row["dtype"] == "fp32":
        return {}
    return {"bar": bar, "met": row["over_eager"] >= bar}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For pages: a line an operation, dtype and mode; times in microseconds, None where none were taken."""
    keys = ("op", "dtype", "mode", "difference", "over_eager", "over_compiled", "of_bandwidth")
    return [
        {key: row.get(key) for key in keys}
        | {
            name: 1e6 * row["seconds"][name] if "seconds" in row else None
            for name in ("eager", "compiled", "triton")
        }
        for row in rows
    ]


def summary(result: dict[str, Any]) -> str:
    """A line an operation, dtype and mode."""
    lines = [f"{'':58s}{'dtype':6s}{'off by':>9s}{'us':>10s}{'eager':>8s}{'compile':>9s}{'of roof':>9s}"]
    for r in result["tables"]["times"]:
        times = f"{'not timed':>10s}"
        if r["triton"] is not None:
            times = f"{r['triton']:10.1f}{r['over_eager']:7.2f}x{r['over_compiled']:8.2f}x{r['of_bandwidth']:9.0%}"
        lines.append(f"{r['op'] + ', ' + r['mode']:58s}{r['dtype']:6s}{r['difference']:9.1e}{times}")
    return "\n".join(lines)
