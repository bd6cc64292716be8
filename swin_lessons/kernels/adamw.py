"""AdamW over all parameters in one launch, with the moving average of the weights in the same pass.

A loop over tensors starts some eight kernels for each, and most tensors are small. Here a table holds the addresses of
all tensors, a second table cuts them into pieces of `BLOCK` numbers, and each program takes one piece through the whole
update: four numbers read, three written, a parameter. Decoupled weight decay: Loshchilov and Hutter, arXiv:1711.05101,
algorithm 2, as `torch.optim.AdamW` has it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as pytorch_adamw

from .checks import check_number, check_tensors
from .cost import Cost
from .launch import DTYPES, IMPLEMENTATIONS, ceil_div, tl, triton, use_triton
from .spec import Spec

BLOCK = 1024  # numbers in a piece
WARPS = 8
MOMENTS = ("exp_avg", "exp_avg_sq")
PLAIN = (Tensor, nn.Parameter)  # what has one address


# --- the maths, in PyTorch


def adamw_torch(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    average: Tensor | None,
    step: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    ema_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One update of one parameter, in place, as `adamw_` does it to many."""
    grad = grad.to(param.dtype)
    if grad_scale is not None:
        grad = grad / grad_scale.reshape(())
    mean = exp_avg.lerp(grad, 1 - beta1)
    square = exp_avg_sq.lerp(grad * grad, 1 - beta2)
    t = step.to(param).reshape(())
    correction1, correction2 = -torch.expm1(t * _log(beta1)), -torch.expm1(t * _log(beta2))
    direction = mean / correction1 / ((square / correction2).sqrt() + eps)
    new = (1 - lr * weight_decay) * param - lr * direction
    pairs = [(param, new), (exp_avg, mean), (exp_avg_sq, square)]
    if average is not None:
        pairs.append((average, average.lerp(new, 1 - ema_decay)))
    for old, value in pairs:
        old.copy_(value if found_inf is None else torch.where(found_inf.reshape(()) == 0, value, old))


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


# --- the kernel


@triton.jit
def _one_minus_exp(y):
    """1 - exp(y) for y < 0. Near 0 the difference would lose its digits: there the series has them."""
    series = -y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7))))))
    return tl.where(y > -0.25, series, 1 - tl.exp(y))


@triton.jit
def _pointer(address_ptr, like_ptr, ALIGNMENT: tl.constexpr):
    """The address that stands at `address_ptr`, as a pointer to numbers of the dtype of `like_ptr`."""
    return tl.multiple_of(tl.load(address_ptr).to(like_ptr.dtype), ALIGNMENT)


@triton.jit
def _update(pointers, at, there, numbers, EMA: tl.constexpr):
    """A piece of one parameter and of all that belongs to it."""
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, average_ptr = pointers
    unscale, alpha1, alpha2, rate, root, eps, shrink, ema_alpha = numbers
    param = tl.load(param_ptr + at, mask=there, other=0.0)
    grad = tl.load(grad_ptr + at, mask=there, other=0.0).to(tl.float32) * unscale
    mean = tl.load(exp_avg_ptr + at, mask=there, other=0.0)
    square = tl.load(exp_avg_sq_ptr + at, mask=there, other=0.0)
    mean += alpha1 * (grad - mean)
    square = (square - alpha2 * square) + alpha2 * (grad * grad)  # exact if beta2 is 0
    param = shrink * param - rate * (mean / (tl.sqrt(square) * root + eps))
    tl.store(param_ptr + at, param, mask=there)
    tl.store(exp_avg_ptr + at, mean, mask=there)
    tl.store(exp_avg_sq_ptr + at, square, mask=there)
    if EMA:
        average = tl.load(average_ptr + at, mask=there, other=0.0)
        tl.store(average_ptr + at, average + ema_alpha * (param - average), mask=there)


@triton.jit
def _adamw_kernel(
    table_ptr,  # (7, tensors) int64: addresses of parameter, gradient, moments, average, step; then the size
    pieces_ptr,  # (2, pieces) int32: whose piece it is, and which of its pieces
    float_ptr,  # fp32; nothing is read here, it lends its type
    grad_ptr,  # fp32, fp16 or bf16; it lends its type too
    grad_scale_ptr,  # one fp32, or None
    found_inf_ptr,  # one fp32, or None
    tensors,
    pieces,
    alpha1,  # 1 - beta1, subtracted before rounding to fp32
    alpha2,
    log_beta1,
    log_beta2,
    lr,
    eps,
    shrink,  # 1 - lr * weight_decay
    ema_alpha,  # 1 - ema_decay
    EMA: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of all addresses
    BLOCK: tl.constexpr,
):
    own_ptr = table_ptr + tl.load(pieces_ptr + tl.program_id(0))
    start = tl.load(pieces_ptr + pieces + tl.program_id(0)).to(tl.int64) * BLOCK
    pointers = (
        _pointer(own_ptr, float_ptr, ALIGNMENT) + start,
        _pointer(own_ptr + tensors, grad_ptr, ALIGNMENT) + start,
        _pointer(own_ptr + 2 * tensors, float_ptr, ALIGNMENT) + start,
        _pointer(own_ptr + 3 * tensors, float_ptr, ALIGNMENT) + start,
        _pointer(own_ptr + 4 * tensors, float_ptr, ALIGNMENT) + start,
    )
    step = tl.load(_pointer(own_ptr + 5 * tensors, float_ptr, 1))
    left = tl.load(own_ptr + 6 * tensors) - start
    if found_inf_ptr is not None:
        left = tl.where(tl.load(found_inf_ptr) == 0, left, 0)  # a skipped step: nothing is left to do
    unscale = 1.0
    if grad_scale_ptr is not None:
        unscale = 1 / tl.load(grad_scale_ptr)
    rate = lr / _one_minus_exp(step * log_beta1)
    root = 1 / tl.sqrt(_one_minus_exp(step * log_beta2))
    numbers = (unscale, alpha1, alpha2, rate, root, eps, shrink, ema_alpha)
    at = tl.arange(0, BLOCK)
    if left >= BLOCK:  # no mask to look at: a thread loads 16 bytes at once
        _update(pointers, at, tl.full((BLOCK,), 1, tl.int1), numbers, EMA)
    else:
        _update(pointers, at, at < left, numbers, EMA)


# --- launching it


@lru_cache(maxsize=8)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Pieces of `BLOCK` numbers that cover tensors of these sizes: (2, pieces), the tensor and the piece of it."""
    counts = torch.tensor([ceil_div(size, BLOCK) for size in sizes])
    tensor = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return _send(torch.stack([tensor, torch.arange(len(tensor)) - first[tensor]]).int(), device)


@lru_cache(maxsize=8)
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses and sizes on the device; gradients move between steps, but come back to the same few places."""
    return _send(torch.tensor(numbers, dtype=torch.int64), device)


def _send(table: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@torch.library.custom_op(
    "swin_lessons::adamw", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "averages")
)
def _adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    averages: Sequence[Tensor],
    steps: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    ema_decay: float,
) -> None:
    """The update of `adamw_`; `averages` is empty where none are kept."""
    device, sizes = params[0].device, tuple(p.numel() for p in params)
    lists = (params, exp_avgs, exp_avg_sqs, averages)
    flat = [[t.contiguous() for t in tensors] for tensors in lists]  # itself, or a copy to be copied back
    grads = [g.contiguous() for g in grads]
    steps = [s.to(device, torch.float32) for s in steps]
    scaling = [None if t is None else t.to(device, torch.float32) for t in (grad_scale, found_inf)]
    rows = (flat[0], grads, flat[1], flat[2], flat[3] or flat[0])
    addresses = [t.data_ptr() for t in chain(*rows)]
    aligned = 16 if all(address % 16 == 0 for address in addresses) else 1
    table = _table((*addresses, *(s.data_ptr() for s in steps), *sizes), device)
    pieces = _pieces(sizes, device)
    counts = len(params), pieces.shape[1]
    numbers = (1 - beta1, 1 - beta2, _log(beta1), _log(beta2), lr, eps, 1 - lr * weight_decay, 1 - ema_decay)
    if pieces.numel():
        args = (table, pieces, flat[0][0], grads[0], *scaling, *counts, *numbers)
        _adamw_kernel[counts[1:]](*args, bool(averages), aligned, BLOCK, num_warps=WARPS)
    for old, new in zip(chain(*lists), chain(*flat), strict=True):
        if new is not old:
            old.copy_(new)


@_adamw.register_fake
def _(*_args: Any) -> None:
    return None


# --- the operation


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | Tensor | Sequence[Tensor],
    ema: Sequence[Tensor] | None = None,
    ema_decay: float = 0.0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """One step of AdamW over many parameters, in place, with the semantics of `torch.optim.AdamW`.

    Args:
        params, exp_avgs, exp_avg_sqs: fp32 tensors, the second and third of the shapes of the first. Those that are
            not contiguous take a copy there and back.
        grads: fp32, fp16 or bf16, all in one dtype. They are read only: unlike PyTorch's fused AdamW, which leaves
            them unscaled, this leaves them as they were.
        step: of this update, from 1: a number; a tensor of one number; or one such tensor for each parameter.
        ema: moving averages of the parameters; each moves towards its updated parameter by `1 - ema_decay`.
        grad_scale: one number on the device, by which the gradients are divided (from a `GradScaler`).
        found_inf: one number on the device; unless it is 0, nothing changes at all. Nobody waits for it.
        impl: "auto", "torch" (one parameter after the other, fp64 too) or "triton".

    Raises:
        ValueError: lists, shapes, dtypes or devices that do not fit; a number out of range; parameters narrower than
            fp32; with impl="triton", tensors on several devices, or of dtypes that the kernel does not take.
    """
    if not params:
        return
    _check(params, {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "ema": ema or params})
    steps = _steps(step, params)
    for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if value is not None and not _is_one_number(value):
            raise ValueError(f"{name}={value!r}: a tensor of one number is needed, or None")
    numbers: dict[str, Any] = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    _check_numbers(ema_decay=ema_decay, **numbers)
    numbers |= {"ema_decay": ema_decay, "grad_scale": grad_scale, "found_inf": found_inf}
    if use_triton(impl, params[0], limit([*params, *exp_avgs, *exp_avg_sqs, *(ema or [])], grads)):
        _adamw(params, grads, exp_avgs, exp_avg_sqs, ema or [], steps, **numbers)
        return
    averages: Sequence[Tensor | None] = ema or [None] * len(params)
    for one in zip(params, grads, exp_avgs, exp_avg_sqs, averages, steps, strict=True):
        _check_one(*one[:5])
        adamw_torch(*one, **numbers)


def limit(written: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Why the kernel cannot take these tensors; empty when it can."""
    kinds = {(t.dtype, t.device, t.layout, type(t)) for t in written}  # a few, of hundreds of tensors
    grad_kinds = {(g.dtype, g.device, g.layout, type(g)) for g in grads}
    dtypes, devices, layouts, types = (set(of) for of in zip(*kinds, *grad_kinds, strict=True))
    if len(devices) > 1:
        return "tensors on several devices need a call for each"
    if {kind[0] for kind in kinds} != {torch.float32}:
        return "parameters, moments and averages must be float32"
    if len({kind[0] for kind in grad_kinds}) > 1 or not dtypes <= set(DTYPES):
        return "gradients must all be float32, all float16 or all bfloat16"
    if layouts != {torch.strided} or not types <= set(PLAIN):
        return "sparse tensors and tensor subclasses, as DTensor, have no single address"
    return ""


def _check(params: Sequence[Tensor], others: Mapping[str, Sequence[Tensor]]) -> None:
    for name, tensors in others.items():
        if len(tensors) != len(params):
            raise ValueError(f"{len(tensors)} {name} for {len(params)} params: give one for each")
        for i, (param, tensor) in enumerate(zip(params, tensors, strict=True)):
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{name}[{i}] is {tensor!r:.40}: a tensor is needed; leave out parameters without a gradient"
                )
            if tensor.shape != param.shape:
                shapes = f"{tuple(tensor.shape)}, params[{i}] {tuple(param.shape)}"
                raise ValueError(f"{name}[{i}] has the shape {shapes}: they must be alike")
    narrow = next((p.dtype for p in params if p.dtype not in (torch.float32, torch.float64)), None)
    if narrow:
        raise ValueError(f"a parameter is {narrow}, too narrow for small steps: keep parameters in float32")


def _check_one(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, average: Tensor | None
) -> None:
    """One parameter and what belongs to it, before PyTorch updates it: the kernel's `limit` looks at all at once."""
    own = {"exp_avgs": exp_avg, "exp_avg_sqs": exp_avg_sq} | ({} if average is None else {"ema": average})
    check_tensors(params=param, grads=grad, **own)
    for name, tensor in own.items():
        if tensor.dtype != param.dtype:
            raise ValueError(f"{name} of a {param.dtype} parameter is {tensor.dtype}: they must be alike")


def _check_numbers(*, beta1: float, beta2: float, ema_decay: float, **others: float | Tensor) -> None:
    """Refuse what would make weights infinite, or send them uphill."""
    check_number("beta1", beta1, 0, 1)
    check_number("beta2", beta2, 0, 1)
    check_number("ema_decay", ema_decay, 0, math.nextafter(1, 2))
    for name, value in others.items():
        if not isinstance(value, Tensor):  # a learning rate on a device: reading it would wait for the device
            check_number(name, value, 0)


def _is_one_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _steps(step: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """A tensor for each parameter: the kernel takes their addresses, so that one too few would be read as another."""
    if isinstance(step, Tensor):
        step = [step] * len(params)
    elif not isinstance(step, Sequence):
        check_number("step", step, 1)
        step = [torch.full((), float(step), device=params[0].device)] * len(params)
    if len(step) != len(params) or not all(map(_is_one_number, step)):
        raise ValueError(f"step={step!r:.80}: a number from 1, or a tensor of one number for each parameter")
    return list(step)


# --- the optimiser


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with one launch of `adamw_` for each parameter group.

    Where the kernel cannot go (no GPU, parameters that are not fp32) PyTorch's own fused AdamW does the work, so it
    needs no condition around it. Groups, `state_dict` and the hand-over of scale and overflow from a `GradScaler` are
    those of PyTorch's; a `state_dict` of either loads into the other. Parameters without a gradient are left alone.

    Args:
        params: parameters, or groups with their own `lr`, `betas`, `eps` and `weight_decay`.
        impl: "auto", "torch" (PyTorch's fused AdamW) or "triton".

    Raises:
        ValueError: `impl="triton"`, at a step, for what `adamw_` does not take.
    """

    impl = "auto"  # of an optimiser that was copied or unpickled
    averages: Mapping[Tensor, Tensor] | None = None
    ema_decay = 0.0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        impl: str = "auto",
    ) -> None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={impl!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self.impl = impl

    def track(self, averages: Mapping[Tensor, Tensor], decay: float) -> None:
        """From now on a step also moves `averages[param]` towards the updated `param` by `1 - decay`.

        Call it again to change the decay. A skipped step, and a parameter without a gradient, move nothing.

        Raises:
            ValueError: a parameter has no average.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        missing = [tuple(p.shape) for p in params if p not in averages]
        if missing:
            raise ValueError(f"{len(missing)} parameters have no average, the first of shape {missing[0]}")
        self.averages, self.ema_decay = averages, decay

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; returns the loss of `closure`, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's; the state of any AdamW, unless it has `amsgrad` or `maximize`."""
        groups = state_dict["param_groups"]
        for option in ("amsgrad", "maximize"):
            if any(group.get(option) for group in groups):
                raise ValueError(f"the state has {option}=True: load it into torch.optim.AdamW")
        # fused: PyTorch then keeps the steps on the device of the parameters
        fused = [{**group, "fused": True, "foreach": None} for group in groups]
        super().load_state_dict({**state_dict, "param_groups": fused})

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        states = [self._state(p) for p in params]
        steps = [state["step"] for state in states]
        moments = [[state[name] for state in states] for name in MOMENTS]
        averages = None if self.averages is None else [self.averages[p] for p in params]
        numbers: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay")}
        numbers["beta1"], numbers["beta2"] = group["betas"]
        for name in ("grad_scale", "found_inf"):  # a GradScaler sets them for the time of a step
            numbers[name] = getattr(self, name, None)
        if use_triton(self.impl, params[0], limit([*params, *(averages or [])], grads)):
            self._with_triton(params, grads, moments, steps, averages, **numbers)
        else:
            self._with_pytorch(params, grads, moments, steps, averages, **numbers)

    def _with_triton(self, params, grads, moments, steps, averages, *, found_inf, **numbers: Any) -> None:
        torch._foreach_add_(steps, 1)
        numbers |= {"step": steps, "ema": averages, "ema_decay": self.ema_decay, "found_inf": found_inf}
        adamw_(params, grads, moments[0], moments[1], **numbers, impl="triton")
        if found_inf is not None:  # a skipped step does not count
            torch._foreach_sub_(steps, (found_inf != 0).to(steps[0]).reshape(()))

    def _with_pytorch(self, params, grads, moments, steps, averages, *, found_inf, **numbers: Any) -> None:
        if any(g.layout != torch.strided for g in grads):
            raise ValueError("a gradient is sparse: use torch.optim.SparseAdam for such parameters")
        if any(p.is_complex() for p in params):
            raise ValueError("a parameter is complex: use torch.optim.AdamW, or real parameters")
        numbers |= {"fused": True, "amsgrad": False, "maximize": False, "found_inf": found_inf}
        pytorch_adamw(params, grads, moments[0], moments[1], [], steps, **numbers)
        if averages:
            kept = 1.0 if found_inf is None else (found_inf == 0).float()
            for average, param in zip(averages, params, strict=True):
                average.lerp_(param, (1 - self.ema_decay) * kept)

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state |= {name: torch.zeros_like(param) for name in MOMENTS}
        return state


# --- what to expect


def adamw_cost(parameters: int, tensors: int, grad_itemsize: int = 4, ema: bool = False) -> Cost:
    """A step over fp32 parameters: PyTorch's loop (`foreach=False`), then the kernel.

    The loop, for each tensor: decay 2 passes, first moment 3, second moment 2 and 3, its root, division and eps 2 each,
    update 4; two of these read the gradient. The average is one more operation of 3 passes.
    """
    loop = (18 + 3 * ema) * 4 + 2 * grad_itemsize
    kernel = (6 + 2 * ema) * 4 + grad_itemsize
    flops = 12 + 3 * ema
    return Cost((8 + ema) * tensors, 1, loop * parameters, kernel * parameters, flops * parameters)


def specs() -> list[Spec]:
    """The launches to compile for a report: Swin-T's parameters, alone and with a `GradScaler` and averages."""
    numbers = dict.fromkeys(
        ("alpha1", "alpha2", "log_beta1", "log_beta2", "lr", "eps", "shrink", "ema_alpha"), 0.5
    )
    sizes = {"tensors": 173, "pieces": 27693}
    pointers = {"table_ptr": "i64", "pieces_ptr": "i32"}
    pointers |= dict.fromkeys(("float_ptr", "grad_scale_ptr", "found_inf_ptr"), "fp32")
    tile = {"ALIGNMENT": 16, "BLOCK": BLOCK}
    alone = {"EMA": False, "grad_scale_ptr": None, "found_inf_ptr": None}
    return [
        Spec("adamw", _adamw_kernel, pointers, sizes | numbers, tile | alone, WARPS),
        Spec("adamw[scaled, EMA]", _adamw_kernel, pointers, sizes | numbers, tile | {"EMA": True}, WARPS),
    ]
