"""Models by fused kernels, in the interpreter: the numbers of the same model by PyTorch, step by step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from swin_cases import images

from swin_lessons.models import create_model
from swin_lessons.models.fused import kernel_parts

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = [
    {"kernels": "norm"},
    {"kernels": "windows"},
    {"kernels": "norm+mlp"},
    {"attention": "triton"},
    {"kernels": "triton"},
    {"kernels": "triton", "attention": "triton"},
]


def pair(version: int, fused: dict, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A narrow Swin of two stages by PyTorch and by kernels, with the same random parameters."""
    name = "swin_micro_fmnist" if version == 1 else "swinv2_micro_fmnist"
    options = {"embed_dim": 16, "num_heads": (1, 2), "num_classes": 5, "attention": "reference"} | options
    torch.manual_seed(0)
    ours = create_model(name, **options).to(DEVICE)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn(p.shape).to(DEVICE))  # norm gains and logit scales too
    theirs = create_model(name, **options | fused).to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x), device=DEVICE) % 5)


@pytest.mark.parametrize("fused", FUSED, ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_loss_and_gradients_are_those_of_pytorch(version, fused):
    """A map of 9 x 13 tokens, which windows of 4 do not tile."""
    ours, theirs = pair(version, fused)
    x = images(3, 1, 36, 52, dtype=torch.float32).to(DEVICE)
    losses = [loss_of(model, x) for model in (ours, theirs)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    expected, found = (
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for loss, model in zip(losses, (ours, theirs), strict=True)
    )
    for (name, _), a, b in zip(ours.named_parameters(), found, expected, strict=True):
        assert a is not None, name
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * max(1, b.abs().max().item()), msg=name)


@pytest.mark.parametrize("version", [1, 2])
def test_ten_steps_of_training_are_pytorch_s(version):
    """Everything by kernels, the optimiser included.

    A large eps, or else AdamW turns the rounding of gradients that are 0 (a key's bias) into whole steps.
    """
    from swin_lessons.kernels import FusedAdamW

    ours, theirs = pair(version, {"kernels": "triton", "attention": "triton"})
    optimizers = [
        torch.optim.AdamW(ours.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.05),
        FusedAdamW(theirs.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.05, impl="triton"),
    ]
    losses: list[list[float]] = [[], []]
    for step in range(10):
        x = images(2, 1, 32, 32, dtype=torch.float32, seed=step).to(DEVICE)
        for model, optimizer, seen in zip((ours, theirs), optimizers, losses, strict=True):
            loss = loss_of(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0][-1] != losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("version", [1, 2])
def test_dropped_images_are_the_same_ones(version):
    ours, theirs = pair(version, {"kernels": "triton"}, drop_path_rate=0.5)
    x = images(4, 1, 32, 32, dtype=torch.float32).to(DEVICE)
    seen = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        seen.append(model(x))
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_under_autocast_it_stays_near_fp32(version):
    ours, theirs = pair(version, {"kernels": "triton", "attention": "triton"})
    x = images(2, 1, 32, 32, dtype=torch.float32).to(DEVICE)
    expected = ours(x)
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        found = theirs(x)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("fused", [f for f in FUSED if "kernels" in f], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_under_autocast_the_map_stays_in_fp32(version, fused):
    """As on a GPU, where LayerNorm of the patches gives fp32: half precision is for branches alone."""
    half = torch.float16 if DEVICE == "cuda" else torch.bfloat16
    ours, theirs = (model.layers[0] for model in pair(version, fused, drop_path_rate=0.3))
    x = torch.randn(2, 9, 13, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    results = []
    for stage in (ours, theirs):
        torch.manual_seed(1)
        with torch.autocast(DEVICE, half):
            y = stage(x)
        assert y.dtype == torch.float32
        results.append((y, *torch.autograd.grad(y.square().mean(), list(stage.parameters()))))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() < 0.03 * expected.norm() + 1e-4


def test_a_replaced_or_watched_layer_is_called():
    _, model = pair(1, {"kernels": "triton"})
    seen = []
    block = model.layers[0].blocks[0]
    block.mlp.fc1.register_forward_hook(lambda *args: seen.append("fc1"))
    other = model.layers[0].blocks[1]
    other.norm2 = torch.nn.Identity()
    model(images(1, 1, 32, 32, dtype=torch.float32).to(DEVICE))
    assert seen == ["fc1"]


@pytest.mark.parametrize("version", [1, 2])
def test_shapes_alone_on_the_meta_device(version):
    from swin_lessons.profiling import count_macs

    _, model = pair(version, {"kernels": "triton", "attention": "triton"})
    counted = count_macs(model, (1, 36, 52)).total
    model = model.to("meta")
    assert model(torch.empty(2, 1, 36, 52, device="meta")).shape == (2, 5)
    assert count_macs(model, (1, 36, 52)).total == counted


def test_parts_have_names():
    assert kernel_parts("torch") == frozenset()
    assert kernel_parts("triton") == {"norm", "windows", "mlp"}
    assert kernel_parts("norm+mlp") == {"norm", "mlp"}
    with pytest.raises(ValueError, match="kernels='norm,mlp': choose 'torch', 'triton', or parts"):
        kernel_parts("norm,mlp")
    with pytest.raises(ValueError, match="kernels=True: give a word"):
        create_model("swin_micro_fmnist", kernels=True)


@pytest.mark.parametrize("version", [1, 2])
def test_fx_traces_the_blocks_themselves(version):
    _, model = pair(version, {"kernels": "triton", "attention": "triton"})
    x = images(2, 1, 32, 32, dtype=torch.float32).to(DEVICE)
    traced = torch.fx.symbolic_trace(model.eval())
    with torch.no_grad():
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-5)


def test_compilers_take_it_whole():
    _, model = pair(1, {"kernels": "triton", "attention": "triton"})
    x = images(2, 1, 32, 32, dtype=torch.float32).to(DEVICE)
    compiled = torch.compile(copy.deepcopy(model).eval(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model.eval()(x), rtol=0, atol=1e-5)
