"""Saved-for-backward against hand counts, published figures and real processes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swin_lessons.models import create_model
from swin_lessons.profiling.kinds import REST
from swin_lessons.profiling.memory import (
    LayerMemory,
    MemoryLedger,
    memory_ledger,
    saved_by_kind,
    saved_for_backward,
)
from swin_lessons.profiling.peak import peak_allocated, peak_memory
from swin_lessons.profiling.steps import Contestant, images_and_labels

MB = 2**20


def test_hand_count_of_an_mlp():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    saved = saved_for_backward(model, torch.zeros(5, 8))
    # each linear saves its input, GELU its own; weights do not count
    assert saved.by_module == {"0": 4 * 5 * 8, "1": 4 * 5 * 32, "2": 4 * 5 * 32}
    assert saved.total == 4 * 5 * (8 + 32 + 32)
    assert saved.per_image == saved.total / 5


def test_a_storage_saved_twice_counts_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = x * 2
            return y * y + y[:1] * y  # y, y, a view of y, y

    x = torch.ones(3, 7, requires_grad=True)
    assert saved_for_backward(Twice(), x).total == 4 * 21


def test_a_small_view_holds_its_whole_storage():
    class View(nn.Module):
        def forward(self, x):
            return (x + 1)[:, :1].square()

    x = torch.ones(4, 100, requires_grad=True)
    assert saved_for_backward(View(), x).total == 4 * 400


class Stashing(torch.autograd.Function):
    """Keeps one tensor the documented way, and others as attributes of ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.mask = x > 0
        ctx.more = {"pair": (x * 2, x)}
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_tensors_on_ctx_are_found():
    class Model(nn.Module):
        def forward(self, x):
            return Stashing.apply(x)

    saved = saved_for_backward(Model(), torch.ones(2, 6, requires_grad=True))
    assert saved.by_module == {"": 4 * 12}
    assert saved.on_ctx == 12 + 4 * 12  # a mask of bytes, x * 2; x is counted already
    assert saved.total == 9 * 12


def test_checkpointing_saves_the_input_alone():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    inner = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.ones(3, 8, requires_grad=True)
    assert saved_for_backward(Checkpointed(inner), x).total <= 4 * 3 * 8
    assert saved_for_backward(inner, x).total == 4 * 3 * (8 + 64 + 64)


@pytest.mark.parametrize(
    ("version", "size", "window", "published"), [("", 224, 7, 107), ("_v2", 256, 8, 181)]
)
def test_swin_tiny_of_timm(version, size, window, published):
    """MB an image in fp32, as measured on real tensors; here without allocating any."""
    module = pytest.importorskip(f"timm.models.swin_transformer{version}")
    cls = module.SwinTransformerV2 if version else module.SwinTransformer
    with torch.device("meta"):
        model, x = cls(img_size=size, window_size=window), torch.empty(2, 3, size, size)
    assert saved_for_backward(model, x).per_image / 1e6 == pytest.approx(published, rel=0.03)


def test_meta_and_real_agree():
    module = pytest.importorskip("timm.models.swin_transformer")
    config = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (1, 2),
        "window_size": 4,
    }
    real = module.SwinTransformer(**config)
    with torch.device("meta"):
        meta, x = module.SwinTransformer(**config), torch.empty(2, 3, 32, 32)
    assert saved_for_backward(real, torch.zeros(2, 3, 32, 32)).total == saved_for_backward(meta, x).total


def test_ledger_with_a_real_optimizer():
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32))
    model[0].bias.requires_grad_(False)
    x = torch.ones(5, 8)
    assumed = memory_ledger(model, x)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(x).sum().backward()
    optimizer.step()
    ledger = memory_ledger(model, x, optimizer=optimizer)
    assert ledger.parameters == 4 * (8 * 32 + 32 + 64)
    assert ledger.gradients == 4 * (8 * 32 + 64)
    assert ledger.buffers == 4 * 64 + 8
    steps = 4 * 3  # a step count for each trainable parameter
    assert ledger.optimizer == assumed.optimizer + steps == 2 * ledger.gradients + steps
    assert ledger.total == ledger.states + ledger.activations
    assert "total" in ledger.table()


def test_three_billion_parameters_with_adamw_are_48_gb():
    """Swin V2, section 3.5: why the giant needs ZeRO."""
    swin = pytest.importorskip("timm.models.swin_transformer_v2")
    with torch.device("meta"):
        giant = swin.SwinTransformerV2(
            img_size=192, window_size=12, embed_dim=512, depths=(2, 2, 42, 4), num_heads=(16, 32, 64, 128)
        )
        ledger = memory_ledger(giant, torch.empty(1, 3, 192, 192))
    assert isinstance(ledger, MemoryLedger)
    assert ledger.states / 1e9 == pytest.approx(48, rel=0.01)


def ledger_of(gradients, *layers, parameters=0):
    rows = [LayerMemory(f"{i}", *sizes) for i, sizes in enumerate(layers)]
    return MemoryLedger(1, parameters, 0, gradients, 0, sum(r.activations for r in rows), rows)


def test_the_peak_by_hand():
    # where the backward pass begins, all activations are there, and the last layer's gradients
    assert ledger_of(5, (100, 2), (50, 3), parameters=7).peak == 7 + 150 + 3
    # a wide last layer: its activations are gone when the first layer makes its gradients
    assert ledger_of(80, (100, 70), (10, 10)).peak == max(110 + 10, 100 + 80) == 180
    # hardly any activations: the optimiser's step, where all gradients are there
    assert ledger_of(80, (1, 40), (1, 30)).peak == 80
    assert ledger_of(0).peak == 0
    # a checkpointed layer is rebuilt beside what the layers before it keep
    assert ledger_of(5, (10, 2, 300), (20, 3)).peak == 10 + 2 + 3 + 300
    # the last layer works while all is kept, the first one with larger tensors
    assert ledger_of(0, (100, 0, 0, 40), (20, 0, 0, 8)).peak == max(120 + 8, 100 + 40) == 140


def test_a_layer_works_with_two_gradients_of_its_largest_tensor():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    ledger = memory_ledger(model, torch.zeros(5, 8))
    assert [(row.name, row.working) for row in ledger.layers] == [
        ("0", 2 * 4 * 5 * 8),
        ("1", 2 * 4 * 5 * 32),
        ("2", 2 * 4 * 5 * 32),
    ]


NARROW = {"embed_dim": 24, "num_heads": (1, 2, 4, 8), "num_classes": 10}
MODELS = {
    "micro": ("swin_micro_fmnist", {}),
    "micro V2": ("swinv2_micro_fmnist", {}),
    "checkpointed": ("swin_micro_fmnist", {"checkpointing": True}),
    "explicit": ("swinv2_micro_fmnist", {"attention": "reference"}),
    "DeiT": ("deit_micro_fmnist", {}),
    "narrow": ("swin_tiny_patch4_window7_224", {**NARROW, "img_size": 112}),
    "narrow V2": ("swinv2_tiny_window8_256", {**NARROW, "img_size": 128}),
}


@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("which", list(MODELS))
def test_the_predicted_peak_is_the_measured_one_within_a_tenth(which, batch):
    name, options = MODELS[which]
    model = create_model(name, **options)
    config = model.config
    size = config.img_size if isinstance(config.img_size, int) else config.img_size[0]
    x, y = images_and_labels(batch, config.in_chans, size, config.num_classes)
    contestant = Contestant(name, "ours", model, "train")
    step = contestant.step(x, y)
    step()  # the optimiser has its states now
    ledger = memory_ledger(model, x, optimizer=contestant.optimizer)
    measured = ledger.resident + peak_allocated(step)
    assert ledger.peak == pytest.approx(measured, rel=0.1)
    assert ledger.peak != ledger.total  # the sum of all is no prediction


def test_checkpointing_keeps_the_inputs_of_blocks():
    model = create_model("swin_micro_fmnist", checkpointing=True).train()
    whole = create_model("swin_micro_fmnist").train()
    x = torch.zeros(2, 1, 32, 32)
    saved = saved_for_backward(model, x)
    rows = [4 * 2 * 64 * 64, 4 * 2 * 16 * 128]  # bytes of a stage's map
    assert saved.by_module["layers.0"] == 2 * rows[0]  # two blocks a stage
    assert saved.by_module["layers.1"] == 2 * rows[1]
    block = saved_for_backward(whole, x).by_module
    of_first = sum(size for name, size in block.items() if name.startswith("layers.0.blocks.1"))
    assert saved.recomputed["layers.0"] == pytest.approx(of_first, rel=0.15)
    assert saved_for_backward(whole, x).recomputed == {}
    for param in model.parameters():
        param.requires_grad_(False)
    assert saved_for_backward(model, x).recomputed == {"layers.0": 0, "layers.1": 0}  # nothing to rebuild


def test_layers_have_names_and_add_up():
    model = create_model("swin_micro_fmnist").train()
    ledger = memory_ledger(model, torch.zeros(2, 1, 32, 32))
    layers = {row.name: row for row in ledger.layers}
    assert sum(row.gradients for row in ledger.layers) == ledger.gradients
    assert next(iter(layers)) == "patch_embed"
    mlp = model.layers[0].blocks[1].mlp
    assert layers["layers.0.blocks.1.mlp"].gradients == 4 * sum(p.numel() for p in mlp.parameters())
    assert layers["layers.0.blocks.1.mlp"].activations >= 4 * 2 * 64 * mlp.fc1.out_features
    assert "layers.0.blocks.1.mlp" in ledger.layer_table()


def test_kinds_keep_what_layers_keep():
    model = create_model("swinv2_micro_fmnist").train()
    x = torch.zeros(2, 1, 32, 32)
    kinds = saved_by_kind(model, x)
    assert sum(kinds.values()) == saved_for_backward(model, x).total
    hidden = sum(
        4 * 2 * tokens * block.mlp.fc1.out_features
        for stage, tokens in zip(model.layers, (64, 16), strict=True)
        for block in stage.blocks
    )
    assert kinds["MLP"] >= hidden
    assert kinds.keys() <= {
        "patch embedding",
        "LayerNorm",
        "QKV",
        "attention",
        "proj",
        "MLP",
        "merging",
        "head",
        REST,
    }


def test_peak_of_the_allocator():
    held = []

    def step():
        torch.ones(3 * MB).sum()  # 12 MB, gone before the next
        held.append(torch.ones(MB))
        return torch.ones(MB) + held[-1]

    assert 12 * MB <= peak_allocated(step) < 12 * MB + 1024
    held.clear()
    assert 8 * MB <= peak_allocated(lambda: torch.ones(MB) + 1) < 8 * MB + 1024


def test_peak_of_a_gpu_is_its_allocator_s(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    assert peak_allocated(lambda: calls.append("step"), "cuda") == 250
    assert calls == ["wait", "reset", "step"]


def allocate(megabytes):
    def step():
        return torch.ones(megabytes * MB // 4).sum().item()

    return step


def test_peak_of_a_process_of_its_own():
    peak = peak_memory(partial(allocate, 200))
    assert 190 * MB < peak.rise < 240 * MB


def test_a_local_function_cannot_travel():
    with pytest.raises(ValueError, match="top level of a module"):
        peak_memory(lambda: allocate(1))
