"""The AdamW kernel and its optimiser against torch.optim.AdamW in fp64: values, state, scaling, odd tensors."""

import copy

import pytest
import torch
from compare import DEVICE, close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from swin_lessons.kernels import FusedAdamW, adamw_
from swin_lessons.kernels.adamw import BLOCK, _pieces, adamw_cost

pytest.importorskip("triton")

NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
SHAPES = [
    (3, 5),
    (1,),
    (BLOCK,),
    (BLOCK + 1,),
    (2, BLOCK + 3),
    (),
    (0, 4),
]  # one piece, two, one more number, none
IMPLS = ["torch", "triton"]


def tensors(shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def zeros(params):
    return [torch.zeros_like(p) for p in params]


def parameters(shapes, dtype=torch.float32):
    """Leaves with the same numbers in every dtype."""
    return [torch.nn.Parameter(t.to(dtype)) for t in tensors(shapes)]


def give_gradients(params, seed, scale=1.0):
    for param, grad in zip(params, tensors([p.shape for p in params], seed), strict=True):
        param.grad = (scale * grad).to(param.dtype)


def same(ours, theirs, limit=1e-6):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        close(a, b, limit, f"tensor {i}")


# --- the function


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_many_steps_equal_pytorchs_in_fp64(impl, dtype):
    params, exact = tensors(SHAPES), parameters(SHAPES, torch.float64)
    moments, reference = (zeros(params), zeros(params)), torch.optim.AdamW(exact, foreach=True, **OPTIONS)
    for step in range(1, 13):
        grads = tensors(SHAPES, seed=step, dtype=dtype)
        adamw_(params, grads, *moments, step=step, impl=impl, **NUMBERS)
        for param, grad in zip(exact, grads, strict=True):
            param.grad = grad.double()
        reference.step()
    same(params, exact, 2e-6)
    for ours, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        for moment, param in zip(ours, exact, strict=True):
            torch.testing.assert_close(moment.double(), reference.state[param][name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_number_by_hand(impl):
    """The first step moves by lr whatever the gradient, after the decay: 2 * (1 - 0.01 * 0.1) - 0.01."""
    param, moments = torch.tensor([2.0], device=DEVICE), [torch.zeros(1, device=DEVICE) for _ in range(2)]
    adamw_(
        [param], [torch.tensor([3.0], device=DEVICE)], moments[:1], moments[1:], step=1, impl=impl, **NUMBERS
    )
    found = torch.stack([param, *moments]).flatten().tolist()
    assert found == pytest.approx([1.988, 0.3, 0.009], rel=1e-6)


@pytest.mark.parametrize("step", [1, 7, 350, 100_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.9999), (0.0, 0.5)])
def test_bias_correction_keeps_its_digits(betas, step):
    """1 - beta2 ** step is 1e-4 at the first step: the difference of two fp32 numbers would know 3 digits of it."""
    numbers = NUMBERS | dict(zip(("beta1", "beta2"), betas, strict=True)) | {"weight_decay": 0.0, "lr": 1.0}
    param, grad = torch.zeros(1, device=DEVICE), torch.full((1,), 0.5, device=DEVICE)
    adamw_(
        [param],
        [grad],
        [torch.zeros_like(param)],
        [torch.zeros_like(param)],
        step=step,
        impl="triton",
        **numbers,
    )
    mean = (1 - betas[0]) * 0.5 / (1 - betas[0] ** step)
    root = ((1 - betas[1]) * 0.25 / (1 - betas[1] ** step)) ** 0.5
    assert param.item() == pytest.approx(-mean / (root + 1e-8), rel=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_average_in_the_same_pass(impl):
    params, grads = tensors(SHAPES), tensors(SHAPES, seed=1)
    before = tensors(SHAPES, seed=2)
    average = [t.clone() for t in before]
    adamw_(
        params, grads, zeros(params), zeros(params), step=1, ema=average, ema_decay=0.75, impl=impl, **NUMBERS
    )
    same(average, [0.75 * a.double() + 0.25 * p.double() for a, p in zip(before, params, strict=True)])


@pytest.mark.parametrize("impl", IMPLS)
def test_each_parameter_has_its_own_count(impl):
    params, grads = tensors([(4,), (4,)]), tensors([(4,), (4,)], seed=1)
    alone = [p.clone() for p in params]
    moments = [torch.full_like(p, 0.1) for p in params], [torch.full_like(p, 0.2) for p in params]
    kept = copy.deepcopy(moments)
    counts = [torch.tensor(3.0, device=DEVICE), torch.tensor(40.0, device=DEVICE)]
    adamw_(params, grads, *moments, step=counts, impl=impl, **NUMBERS)
    for i, count in enumerate((3, 40)):
        one = [[tensors_[i]] for tensors_ in (alone, grads, *kept)]
        adamw_(*one, step=count, impl="torch", **NUMBERS)
    same(params, [a.double() for a in alone])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(), (1,)])  # as GradScaler has them, and as PyTorch's tests do
def test_scaled_gradients(impl, shape):
    params, grads = tensors(SHAPES), tensors(SHAPES, seed=1)
    expected = [p.clone() for p in params]
    adamw_(expected, grads, zeros(params), zeros(params), step=1, impl="torch", **NUMBERS)
    scaled = [(1024 * g).half().float() for g in grads]
    kept = [g.clone() for g in scaled]
    scaling = {
        "grad_scale": torch.full(shape, 1024.0, device=DEVICE),
        "found_inf": torch.zeros(shape, device=DEVICE),
    }
    adamw_(params, scaled, zeros(params), zeros(params), step=1, impl=impl, **NUMBERS, **scaling)
    same(params, [e.double() for e in expected], 1e-4)
    assert all(torch.equal(a, b) for a, b in zip(scaled, kept, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_changes_on_overflow(impl):
    state = [tensors(SHAPES, seed=i) for i in range(4)]
    kept = copy.deepcopy(state)
    grads = [torch.full_like(p, torch.inf) for p in state[0]]
    adamw_(
        state[0], grads, *state[1:3], step=1, ema=state[3], ema_decay=0.5,
        found_inf=torch.ones(1, device=DEVICE), impl=impl, **NUMBERS,
    )  # fmt: skip
    assert all(
        torch.equal(a, b)
        for ours, old in zip(state, kept, strict=True)
        for a, b in zip(ours, old, strict=True)
    )


def test_tensors_that_are_not_contiguous():
    """A transposed parameter, a slice, a gradient with stride 0, addresses that are no multiple of 16."""
    base = tensors([(6, 40), (50, 30), (7,), (33,)])
    params = [base[0].t(), base[1][3:, 1::2], base[2], base[3][1:]]
    grads = [
        tensors([(40, 6)], 1)[0],
        tensors([(15, 47)], 2)[0].t(),
        torch.full((1,), 0.5).expand(7),
        base[3][1:] / 2,
    ]
    grads = [g.to(DEVICE) for g in grads]
    expected, average = (
        [p.double() for p in params],
        [torch.zeros_like(p).t().contiguous().t() for p in params],
    )
    untouched = base[1][:3].clone()
    adamw_(expected, grads, zeros(expected), zeros(expected), step=1, impl="torch", **NUMBERS)
    adamw_(params, grads, zeros(params), zeros(params), step=1, ema=average, impl="triton", **NUMBERS)
    same(params, expected)
    same(average, expected)
    same(base[:1], [expected[0].t()])  # written in place
    assert torch.equal(base[1][:3], untouched)
    adamw_(params, grads, zeros(params), zeros(params), step=1, impl="triton", **NUMBERS)
    adamw_(expected, grads, zeros(expected), zeros(expected), step=1, impl="torch", **NUMBERS)
    same(params, expected)


@given(st.lists(st.integers(0, 3 * BLOCK), min_size=1, max_size=6), st.integers(0, 99), st.booleans())
@settings(max_examples=15, deadline=None)
def test_any_sizes(sizes, seed, half):
    shapes = [(n,) for n in sizes]
    params, grads = tensors(shapes, seed), tensors(shapes, seed + 1, torch.float16 if half else torch.float32)
    expected, moments = [p.double() for p in params], (zeros(params), zeros(params))
    adamw_(expected, grads, zeros(expected), zeros(expected), step=2, impl="torch", **NUMBERS)
    adamw_(params, grads, *moments, step=2, impl="triton", **NUMBERS)
    same(params, expected)


def test_pieces_cover_billions_of_numbers():
    """Far more programs than axes y and z of a grid hold, and offsets that 32 bits do not."""
    sizes = (1, 3_000_000_000, 0, BLOCK + 1)
    tensor, piece = _pieces(sizes, torch.device("cpu")).long()
    assert len(tensor) == 1 + 2_929_688 + 2
    assert piece[tensor == 1].tolist()[-1] * BLOCK < sizes[1] <= (piece[tensor == 1][-1] + 1) * BLOCK
    assert tensor[-2:].tolist() == [3, 3]
    assert piece[[0, 1, -2, -1]].tolist() == [0, 0, 0, 1]


def test_compilers_see_through():
    params, grads = tensors([(5, 7), (3,)]), tensors([(5, 7), (3,)], seed=1)
    moments, steps = (zeros(params), zeros(params)), [torch.ones((), device=DEVICE)] * 2
    numbers = (0.01, 0.9, 0.999, 1e-8, 0.1, 0.5)
    op = torch.ops.swin_lessons.adamw.default
    torch.library.opcheck(op, (params, grads, *moments, [], steps, None, None, *numbers))
    torch.library.opcheck(
        op, (params, grads, *moments, zeros(params), steps, steps[0], steps[0] * 0, *numbers)
    )
    expected = [p.double() for p in params]
    adamw_(expected, grads, zeros(expected), zeros(expected), step=1, impl="torch", **NUMBERS)
    step = torch.compile(
        lambda *lists: adamw_(*lists, step=1, impl="triton", **NUMBERS), fullgraph=True, backend="aot_eager"
    )
    step(params, grads, zeros(params), zeros(params))
    same(params, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"grads": a["grads"][:1]}, "1 grads for 2 params"),
        (lambda a: a | {"exp_avgs": a["exp_avgs"][::-1]}, r"exp_avgs\[0\] has the shape \(3,\).*\(2, 2\)"),
        (lambda a: a | {"ema": [a["params"][0]] * 2}, r"ema\[1\]"),
        (lambda a: a | {"params": [p.half() for p in a["params"]]}, "float16.*float32"),
        (lambda a: a | {"params": [p.double() for p in a["params"]]}, "float64 is not among.*impl='torch'"),
        (lambda a: a | {"exp_avgs": [p.double() for p in a["params"]]}, "must be float32.*impl='torch'"),
        (lambda a: a | {"grads": [a["grads"][0].half(), a["grads"][1]]}, "must all be"),
        (lambda a: a | {"impl": "foreach"}, "impl='foreach'"),
        (lambda a: a | {"grads": [a["grads"][0], None]}, r"grads\[1\] is None: .* without a gradient"),
        (lambda a: a | {"step": 0}, "step=0: a number, at least 1"),
        (lambda a: a | {"step": [torch.ones(())]}, r"step=\[tensor\(1.\)\]: .* for each parameter"),
        (lambda a: a | {"step": [torch.ones(())] * 3}, "step=.* for each parameter"),
        (lambda a: a | {"step": [1, 1]}, r"step=\[1, 1\]"),
        (lambda a: a | {"lr": -1.0}, "lr=-1.0: a number, at least 0"),
        (lambda a: a | {"lr": float("nan")}, "lr=nan"),
        (lambda a: a | {"beta1": 1.0}, "beta1=1.0.*less than 1"),
        (lambda a: a | {"beta2": -0.5}, "beta2=-0.5"),
        (lambda a: a | {"ema_decay": 1.5}, "ema_decay=1.5"),
        (lambda a: a | {"grad_scale": 2.0}, "grad_scale=2.0: a tensor of one number"),
        (lambda a: a | {"impl": "torch", "grads": [g + 1j for g in a["grads"]]}, "grads is torch.complex64"),
        (lambda a: a | {"impl": "torch", "exp_avgs": [p.half() for p in a["params"]]}, "must be alike"),
    ],
)
def test_bad_input_is_named(change, message):
    shapes = [(2, 2), (3,)]
    args = {name: tensors(shapes) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    with pytest.raises(ValueError, match=message):
        adamw_(**change(NUMBERS | args | {"impl": "triton", "step": 1}))


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor([3.0]), [torch.tensor(3.0)]])
def test_a_step_is_a_number_or_tensors(step):
    params, grads = tensors([(5,)]), tensors([(5,)], seed=1)
    expected = [p.double() for p in params]
    adamw_(expected, grads, zeros(expected), zeros(expected), step=3, impl="torch", **NUMBERS)
    adamw_(params, grads, zeros(params), zeros(params), step=step, impl="triton", **NUMBERS)
    same(params, expected)


def test_a_beta2_of_zero_forgets_all():
    """The old square is 10^10 times the new one, whose digits a difference of the two would lose."""
    param, grad, mean, square = (torch.full((3,), x, device=DEVICE) for x in (1.0, 1e-5, 0.0, 1.0))
    numbers = {"lr": 0.1, "beta1": 0.0, "beta2": 0.0, "eps": 1e-8, "weight_decay": 0.0}
    adamw_([param], [grad], [mean], [square], step=5, impl="triton", **numbers)
    torch.testing.assert_close(square.cpu(), torch.full((3,), 1e-10))
    torch.testing.assert_close(param.cpu(), torch.full((3,), 0.9001))  # 1 - 0.1 * 1e-5 / (1e-5 + 1e-8)


@pytest.mark.parametrize(
    ("param", "grad", "message"),
    [
        (torch.zeros(3), torch.ones(3).to_sparse(), "sparse.*SparseAdam"),
        (torch.zeros(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64), "complex.*real"),
    ],
)
def test_what_pytorchs_fused_adamw_cannot_update_is_named(param, grad, message):
    param = torch.nn.Parameter(param)
    param.grad = grad
    with pytest.raises(ValueError, match=message):
        FusedAdamW([param]).step()


def test_no_parameters():
    adamw_([], [], [], [], step=1, impl="triton", **NUMBERS)


# --- the optimiser


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_groups_and_missing_gradients(impl):
    """Two groups with rates of their own; one parameter has a gradient every second step only."""
    shapes, runs = [(4, 3), (5,), (BLOCK + 5,)], []
    for kind, dtype in ((FusedAdamW, torch.float32), (torch.optim.AdamW, torch.float64)):
        params = parameters(shapes, dtype)
        groups = [
            {"params": params[:2], "weight_decay": 0.2},
            {"params": params[2:], "lr": 0.1, "betas": (0.5, 0.9)},
        ]
        optimizer = kind(groups, lr=0.01, **({"impl": impl} if kind is FusedAdamW else {"foreach": False}))
        for step in range(8):
            give_gradients(params, step)
            if step % 2:
                params[1].grad = None
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        runs.append((params, optimizer))
    (ours, mine), (theirs, reference) = runs
    same(ours, theirs, 2e-6)
    assert [mine.state[p]["step"].item() for p in ours] == [8, 4, 8]
    for a, b in zip(ours, theirs, strict=True):
        same([mine.state[a]["exp_avg"]], [reference.state[b]["exp_avg"]], 2e-6)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_state_goes_to_and_from_pytorchs(options):
    """Train by turns: ours, PyTorch's, ours; as if by PyTorch's in fp64 alone."""
    shapes = [(4, 3), (BLOCK + 5,)]
    params, exact = parameters(shapes), parameters(shapes, torch.float64)
    ours, theirs = (
        FusedAdamW(params, impl="triton", **OPTIONS),
        torch.optim.AdamW(params, **options, **OPTIONS),
    )
    reference = torch.optim.AdamW(exact, **OPTIONS)
    for step, (optimizer, following) in enumerate(((ours, theirs), (theirs, ours), (ours, theirs))):
        for pair in ((params, optimizer), (exact, reference)):
            give_gradients(pair[0], step)
            pair[1].step()
        state = copy.deepcopy(optimizer.state_dict())
        assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        following.load_state_dict(state)
    same(params, exact)
    assert ours.state[params[0]]["step"].item() == 3


def test_a_state_it_cannot_continue():
    other = torch.optim.AdamW(parameters([(2,)]), amsgrad=True)
    with pytest.raises(ValueError, match=r"amsgrad=True.*torch\.optim\.AdamW"):
        FusedAdamW(parameters([(2,)])).load_state_dict(other.state_dict())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_hands_over(impl, unscaled):
    """Scaled gradients, then an overflow that skips the step and halves the scale, then a step again."""
    runs = []
    for kind, options in ((FusedAdamW, {"impl": impl}), (torch.optim.AdamW, {"fused": True})):
        params = parameters([(4, 3), (BLOCK + 5,)])
        optimizer = kind(params, **OPTIONS, **options)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=10)
        for step in range(3):
            scale = scaler.scale(torch.ones((), device=DEVICE)).item()
            give_gradients(params, step, scale)
            if step == 1:
                params[0].grad[0, 0] = torch.inf
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4
        assert not hasattr(optimizer, "found_inf")
        runs.append((params, [optimizer.state[p]["step"].item() for p in params]))
    (ours, counts), (theirs, expected) = runs
    same(ours, [p.double() for p in theirs])
    assert counts == expected == [2, 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_averages_follow(impl):
    params = parameters([(4, 3), (5,)])
    averages = {p: torch.zeros_like(p) for p in params}
    optimizer = FusedAdamW(params, impl=impl, **OPTIONS)
    optimizer.track(averages, 0.5)
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for step in range(3):
        give_gradients(params, step)
        optimizer.found_inf = torch.tensor(float(step == 1), device=DEVICE)  # skipped: the averages stay
        optimizer.step()
        if step != 1:
            expected = [0.5 * e + 0.5 * p.detach().double() for e, p in zip(expected, params, strict=True)]
    same(averages.values(), expected)
    with pytest.raises(ValueError, match=r"1 parameters have no average, the first of shape \(5,\)"):
        optimizer.track({params[0]: averages[params[0]]}, 0.5)


def test_closure_and_unknown_impl():
    params = parameters([(3,)])
    optimizer = FusedAdamW(params, impl="triton", **OPTIONS)

    def loss():
        optimizer.zero_grad()
        value = (params[0] ** 2).sum()
        value.backward()
        return value

    losses = [optimizer.step(loss).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    with pytest.raises(ValueError, match="impl='cuda'"):
        FusedAdamW(params, impl="cuda")


def test_half_parameters_go_to_pytorch_or_are_refused():
    params = parameters([(8,)], torch.bfloat16)
    give_gradients(params, 1)
    before = params[0].detach().clone()
    FusedAdamW(params, **OPTIONS).step()
    assert not torch.equal(params[0], before)
    with pytest.raises(ValueError, match="must be float32"):
        FusedAdamW(params, impl="triton", **OPTIONS).step()


# --- the prediction


class Moved(TorchDispatchMode):
    """Counts operations, and the numbers that each reads and writes."""

    def __init__(self):
        super().__init__()
        self.launches = self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        read = {id(a): a.numel() for a in args if isinstance(a, torch.Tensor) and a.numel() > 1}
        if read:
            self.launches += 1
            self.numbers += sum(read.values()) + result.numel()
        return result


def test_what_is_moved():
    """PyTorch's loop, counted as it runs; the kernel moves 28 bytes a parameter."""
    params = parameters([(100,)])
    optimizer = torch.optim.AdamW(params, foreach=False)
    for step in range(2):
        give_gradients(params, step)
        with Moved() as moved:
            optimizer.step()
    cost = adamw_cost(100, 1)
    assert (moved.launches, 4 * moved.numbers) == (cost.launches_before, cost.bytes_before)
    assert (cost.launches_after, cost.bytes_after) == (1, 2800)
    assert adamw_cost(100, 1, grad_itemsize=2, ema=True).bytes_after == 3400
