"""Ranges around the kinds of work: all of them, none that is not there, and a model that does not notice."""

import contextlib

import pytest
import torch
from torch import nn

from swin_lessons.models import SwinConfig, SwinTransformer, create_model
from swin_lessons.profiling import kind_ranges, nvtx_ranges
from swin_lessons.profiling.kinds import KINDS, _places, kind_of_module
from swin_lessons.profiling.steps import Contestant, images_and_labels


def one_stage():
    size = {"img_size": (16, 16), "window_size": (2, 2), "num_classes": 5, "embed_dim": 8, "in_chans": 1}
    return SwinTransformer(SwinConfig(**size, depths=(2,), num_heads=(2,), pretrained_window_sizes=(0,)))


def opened(model, mode="train", size=32, classes=5):
    """The kinds of all ranges that one step opens, in order."""
    x, y = images_and_labels(2, 1, size, classes)
    contestant = Contestant("it", "ours", model, mode)
    step = contestant.step(x, y)
    seen = []

    @contextlib.contextmanager
    def note(kind):
        seen.append(kind)
        yield

    with kind_ranges(model, note, contestant.optimizer):
        step()
    return seen


FORWARD = set(KINDS) - {"loss", "optimiser"}


@pytest.mark.parametrize("attention", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_every_kind_of_a_swin_has_ranges(name, attention):
    model = create_model(name, attention=attention)
    assert set(opened(model)) == set(KINDS)
    assert set(opened(model, "infer")) == FORWARD


def test_what_a_model_lacks_has_none():
    assert set(opened(one_stage(), size=16)) == set(KINDS) - {"merging"}
    assert set(opened(create_model("deit_micro_fmnist"))) == set(KINDS) - {"merging", "partition/shift"}
    pyramid = create_model("swin_micro_fmnist", features_only=True)
    seen = []
    with kind_ranges(pyramid, lambda kind: contextlib.nullcontext(seen.append(kind))):
        pyramid(torch.zeros(1, 1, 32, 32))
    assert "head" not in seen
    assert "merging" in seen


def test_the_order_within_a_block_is_the_paper_s():
    seen = opened(one_stage(), "infer", size=16)
    block = seen[seen.index("residual") + 1 :]
    expected = ["attention", "attention", "LayerNorm", "partition/shift", "attention", "QKV", "QKV", "proj"]
    assert block[:8] == expected  # the bias, its masks; then the branch: both QKV ranges are one layer's
    assert block[8:10] == ["LayerNorm", "MLP"]


def test_the_model_stays_on_its_fast_path():
    model = one_stage()
    x = torch.randn(2, 1, 16, 16)
    before = model(x)
    with kind_ranges(model, contextlib.nullcontext):
        out = model(x)
    assert torch.equal(out, before)
    nodes, queue = set(), [out.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            queue.extend(parent for parent, _ in node.next_functions)
    assert "_WindowAttentionBackward" in {node.name() for node in nodes}


def test_everything_is_as_before_afterwards():
    model = one_stage()
    optimizer = torch.optim.SGD(model.parameters())
    places = [(owner, name) for owner, name, _ in _places(model, optimizer)]
    before = [getattr(owner, name) for owner, name in places]
    with kind_ranges(model, contextlib.nullcontext, optimizer):
        assert all(getattr(o, n) is not b for (o, n), b in zip(places, before, strict=True))
    with (
        pytest.raises(ValueError, match="the model takes 1 channels"),
        kind_ranges(model, contextlib.nullcontext),
    ):
        model(torch.zeros(1, 3, 16, 16))
    assert all(getattr(o, n) is b for (o, n), b in zip(places, before, strict=True))
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("layers.0.blocks.1.attn.qkv", nn.Linear(2, 2), "QKV"),
        ("blocks.3.attn", nn.Identity(), None),
        ("layers.1.downsample", nn.Linear(2, 2), "merging"),
        ("layers.1.downsample.norm", nn.LayerNorm(2), "LayerNorm"),
        ("layers.1.downsample.reduction", nn.Linear(2, 2), None),  # its caller's
        ("head_dist", nn.Linear(2, 2), "head"),
        ("overhead", nn.Linear(2, 2), None),
    ],
)
def test_kinds_of_modules(name, module, kind):
    assert kind_of_module(name, module) == kind


def test_nvtx_does_nothing_on_a_cpu():
    before = nn.Module.__call__
    with nvtx_ranges(one_stage(), "cpu"):
        assert nn.Module.__call__ is before


def test_nvtx_ranges_on_a_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda kind: contextlib.nullcontext(seen.append(kind)))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", contextlib.nullcontext)
    model = one_stage()
    with nvtx_ranges(model, "cuda"):
        model(torch.zeros(1, 1, 16, 16))
    assert set(seen) == FORWARD - {"merging"}
