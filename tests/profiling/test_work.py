"""MACs, bytes and launches of a step against hand counts and `count_macs`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_lessons.models import create_model
from swin_lessons.profiling import Work, count_macs, count_work
from swin_lessons.profiling.kinds import REST
from swin_lessons.profiling.steps import Contestant, images_and_labels
from swin_lessons.profiling.work import KindStack

FORWARD, BACKWARD = "forward", "backward"
F32 = 4


def work_of(name, mode, batch=2, **overrides):
    model = create_model(name, **overrides)
    x, y = images_and_labels(batch, 1, 32, 10)
    contestant = Contestant(name, "ours", model, mode)
    return model, count_work(model, contestant.step(x, y), contestant.optimizer)


def total(work, phase):
    return sum(w.macs for (_, p), w in work.items() if p == phase)


@pytest.mark.parametrize("attention", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_macs_equal_count_macs(name, attention):
    model, work = work_of(name, "infer", batch=3, attention=attention)
    assert total(work, FORWARD) == 3 * count_macs(model, (1, 32, 32)).counted
    assert total(work, BACKWARD) == 0


def test_macs_of_deit_equal_count_macs():
    model, work = work_of("deit_micro_fmnist", "train")
    assert total(work, FORWARD) == 2 * count_macs(model, (1, 32, 32)).counted


def test_backward_passes_multiply_twice():
    _, work = work_of("swin_micro_fmnist", "train", attention="reference")
    for kind in ("QKV", "proj", "MLP", "attention", "head"):  # gradients of the input and of the weight
        assert work[kind, BACKWARD].macs == 2 * work[kind, FORWARD].macs > 0
    embed = work["patch embedding", BACKWARD]
    assert embed.macs == work["patch embedding", FORWARD].macs  # images need no gradient


def test_both_paths_multiply_alike():
    _, rows = work_of("swin_micro_fmnist", "train")
    _, readable = work_of("swin_micro_fmnist", "train", attention="reference")
    assert {key: w.macs for key, w in rows.items() if w.macs} == {
        key: w.macs for key, w in readable.items() if w.macs
    }


@pytest.mark.parametrize(
    "fused", [{"kernels": "triton"}, {"kernels": "triton", "attention": "triton"}], ids=str
)
@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_fused_kernels_multiply_alike_and_move_less(name, fused):
    pytest.importorskip("triton")
    model, plain = work_of(name, "train", batch=2, attention="reference")
    _, ours = work_of(name, "train", batch=2, **{"attention": "reference"} | fused)
    for kind in ("QKV", "proj", "MLP", "attention"):
        assert ours[kind, FORWARD].macs == plain[kind, FORWARD].macs > 0, kind
    assert total(ours, FORWARD) == total(plain, FORWARD)  # norms beside window moves are counted there
    scores = count_macs(model, (1, 32, 32)).by_kind["attention"]  # of two images, without the sum over values
    again = ours["attention", BACKWARD].macs - plain["attention", BACKWARD].macs
    assert again == (scores if "attention" in fused else 0)  # scores once more instead of storing them
    for count in ("bytes", "launches"):
        before, after = (sum(getattr(w, count) for w in work.values()) for work in (plain, ours))
        assert after < before, count
    assert REST not in {kind for (kind, _), work in ours.items() if work.macs}


def test_checkpointing_does_the_forward_pass_again():
    _, work = work_of("swin_micro_fmnist", "train", checkpointing=True)
    assert work["MLP", BACKWARD].macs == 3 * work["MLP", FORWARD].macs


def test_fused_attention_of_a_vit_backward():
    _, work = work_of("deit_micro_fmnist", "train")
    assert work["attention", BACKWARD].macs == 2.5 * work["attention", FORWARD].macs  # the scores once more


def test_hand_count_of_a_linear_layer():
    layer, x = nn.Linear(8, 16, bias=False), torch.randn(5, 8)
    work = count_work(layer, lambda: layer(x).backward(torch.ones(5, 16)))
    forward, backward = work[REST, FORWARD], work[REST, BACKWARD]
    assert forward.macs == 5 * 8 * 16
    assert forward.flops == 2 * 5 * 8 * 16
    ones = F32 * 5 * 16  # the gradient that goes in is made in the forward phase
    assert forward.bytes == F32 * (5 * 8 + 8 * 16 + 5 * 16) + ones
    assert backward == Work(5 * 8 * 16, F32 * (5 * 8 + 8 * 16 + 5 * 16), 1)  # x needs no gradient


def test_bytes_of_changes_in_place_views_and_allocations():
    x = torch.ones(10)

    def step():
        x.add_(1)  # read and written
        x.zero_()  # written
        x.view(2, 5).t()
        torch.empty(100)
        x[:1].expand(1000).sum()  # one number is there, one comes out

    work = count_work(nn.Identity(), step)[REST, FORWARD]
    assert work == Work(0, F32 * (20 + 10 + 2), 3)


def test_an_operand_that_is_given_twice_is_read_once():
    x = torch.ones(10)
    work = count_work(nn.Identity(), lambda: x.addcmul_(x * x, x))[REST, FORWARD]
    assert work == Work(0, F32 * (10 + 10 + 20 + 10), 2)  # the product; then two read and one written


def test_looped_adamw_moves_80_bytes_a_parameter():
    layer = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    work = count_work(layer, lambda: optimizer.step(), optimizer)["optimiser", FORWARD]
    steps = 2 * F32  # the count of steps, a ninth operation: read and written
    assert work == Work(0, 80 * 100 * 100 + steps, 9)


def test_adamw_moves_28_bytes_a_parameter():
    layer = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    work = count_work(layer, lambda: optimizer.step(), optimizer)["optimiser", FORWARD]
    steps = 3 * F32  # the count of steps: read and written, then read
    assert work.bytes == 28 * 100 * 100 + steps


def test_loss_and_optimiser_are_apart():
    _, work = work_of("swin_micro_fmnist", "train")
    assert work["loss", FORWARD].launches == 2  # log-softmax, negative log-likelihood
    assert work["loss", BACKWARD].launches == 2
    assert ("optimiser", BACKWARD) not in work
    share = work[REST, FORWARD].bytes / sum(w.bytes for w in work.values())
    assert share < 0.001


def test_the_stack_remembers_who_made_a_node():
    stack, x = KindStack(), torch.ones(3, requires_grad=True)
    with stack("MLP"):
        a = x * 2
        with stack("LayerNorm"):
            b = F.layer_norm(a, (3,))
        c = b * 3
    d = c * 4
    kinds = [stack.at(t.grad_fn._sequence_nr()) for t in (a, b, c, d)]
    assert kinds == ["MLP", "LayerNorm", "MLP", REST]
    assert stack.current is None
