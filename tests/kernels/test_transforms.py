"""What PyTorch does around a kernel: checkpointing works; forward mode, torch.func, second derivatives are refused."""

import pytest
import torch
from compare import random
from torch import func
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from swin_lessons.kernels import layer_norm, linear_gelu, reverse_unshift, shift_partition, window_attention

pytest.importorskip("triton")


def norm(x, impl="triton"):
    one = torch.ones(3, device=x.device, dtype=x.dtype)
    return layer_norm(x, one, one, eps=0.0, impl=impl)


def with_duals(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent


WAYS = {
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "grad": lambda f, x: func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: func.vmap(f)(x[None]),
    "forward mode": with_duals,
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_need_pytorch(way):
    """Forward mode through a kernel would be zero everywhere, and nobody would notice."""
    with pytest.raises(ValueError, match=r"torch\.func.*choose impl='torch' or 'auto'"):
        WAYS[way](norm, random(2, 3).detach())


def test_a_compiler_is_told_of_forward_mode(monkeypatch):
    """It differentiates the graph that it captured, where a kernel would be a constant."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="forward-mode differentiation"):
        with_duals(norm, random(2, 3).detach())


OPERATIONS = [
    (norm, (2, 3)),
    (lambda x: linear_gelu(x, x, x[:, 0], impl="triton"), (2, 3)),
    (lambda x: shift_partition(x, (2, 2), (1, 1), x[0, 0, 0], x[0, 0, 0], impl="triton"), (1, 2, 2, 3)),
    (
        lambda x: reverse_unshift(
            x.reshape(1, 4, 3), x, (2, 2), (1, 1), x[0, 0, 0], x[0, 0, 0], order="post", impl="triton"
        ),
        (1, 2, 2, 3),
    ),
    (
        lambda x: window_attention(
            x, torch.zeros(1, 4, 4, device=x.device), (2, 2), num_heads=1, impl="triton"
        ),
        (1, 2, 2, 3),
    ),
]


@pytest.mark.parametrize(("op", "shape"), OPERATIONS)
def test_second_derivatives_name_the_remedy(op, shape):
    x = random(*shape)
    (first,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only: choose impl='torch'"):
        first.sum().backward()


@pytest.mark.parametrize(("op", "shape"), OPERATIONS)
def test_activation_checkpointing_changes_no_gradient(op, shape):
    """It hands out what a kernel saved once, so that a backward pass may read it once."""
    x = random(*shape)
    (expected,) = torch.autograd.grad(op(x).square().sum(), x)
    (found,) = torch.autograd.grad(checkpoint(op, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(found, expected)
