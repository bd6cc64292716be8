"""The row path gives the numbers and the gradients of the readable path, and leaves the field where it can't."""

import copy
import random

import pytest
import torch
from swin_cases import assert_near, attentions, images, readable, swin
from torch import nn
from torch.nn.utils import parametrize

from swin_lessons.models import fast
from swin_lessons.models import swin as swin_module
from swin_lessons.models.fast import window_attention
from swin_lessons.models.layers import DropPath, PatchEmbed, PatchMerging
from swin_lessons.models.swin import set_window

VERSIONS = pytest.mark.parametrize("version", [1, 2])
FEW_KEYS, MANY_KEYS = (3, 3), (4, 4)  # windows of 9 and 16 tokens; heads have 12 channels
CASES = {
    "even": ((32, 32), MANY_KEYS),
    "few keys": ((48, 24), FEW_KEYS),
    "padded": ((36, 28), MANY_KEYS),
    "padded, few keys": ((40, 28), FEW_KEYS),
    "patches padded": ((31, 45), MANY_KEYS),
    "clamped": ((16, 16), MANY_KEYS),
    "clamped in one axis": ((8, 64), MANY_KEYS),
    "oblong": ((24, 40), (2, 5)),
    "one token": ((4, 4), MANY_KEYS),
    "windows of one token": ((16, 16), (1, 1)),
    "extreme": ((4, 200), MANY_KEYS),
}


def outcome(model: nn.Module, x: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Logits and all gradients, with the same random numbers for each model."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    out = model(x)
    (out * images(*out.shape, seed=5).to(out)).sum().backward()
    return {"logits": out.detach(), "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def assert_same(a: dict, b: dict, tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in b:
        if b[name] is None:
            assert a[name] is None, name
        else:
            assert_near(a[name], b[name], tolerance)


@pytest.fixture
def stages_by_rows(monkeypatch):
    """The first block of each stage that took the row path."""
    taken = []
    run = swin_module.run_stage
    monkeypatch.setattr(
        swin_module, "run_stage", lambda x, blocks, *args: taken.append(blocks[0]) or run(x, blocks, *args)
    )
    return taken


# --- same numbers, same gradients ---


@VERSIONS
def test_rows_equal_maps_with_onednn(version, monkeypatch, stages_by_rows):
    """fp32 on an x86 CPU: every product by oneDNN, however small (elsewhere by F.linear)."""
    monkeypatch.setattr(fast, "ONEDNN_MACS", 0)
    model = swin(version, dtype=torch.float32)
    x = images(3, 3, 32, 32, dtype=torch.float32)
    expected = outcome(readable(model), x)
    assert_same(outcome(model, x), expected, 1e-4)
    assert len(stages_by_rows) == 2


@VERSIONS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_bytes", [1, 8 << 20], ids=["small chunks", "one chunk"])
def test_rows_equal_maps(version, case, chunk_bytes, monkeypatch, stages_by_rows):
    monkeypatch.setattr(fast, "CHUNK_BYTES", chunk_bytes)
    size, window = CASES[case]
    model = swin(version, window_size=window)
    x = images(3, 3, *size)
    expected = outcome(readable(model), x)
    assert not stages_by_rows
    assert_same(outcome(model, x), expected)
    assert len(stages_by_rows) == 2


@VERSIONS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_bytes", [1, 8 << 20], ids=["small chunks", "one chunk"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_works_in_place_on_rows_of_its_own(
    version, case, chunk_bytes, mode, monkeypatch, stages_by_rows
):
    monkeypatch.setattr(fast, "CHUNK_BYTES", chunk_bytes)
    size, window = CASES[case]
    model = swin(version, window_size=window, extra_norm_every=2 if version == 2 else 0).eval()
    x = images(3, 3, *size)
    given = x.clone()
    with mode():
        expected = readable(model)(x)
        assert_near(model(x), expected)
        assert_near(model(x), expected)  # nothing kept was overwritten
    assert torch.equal(x, given)
    assert len(stages_by_rows) == 4


@VERSIONS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("score_bytes", [1, 1 << 20], ids=["a window at a time", "all windows"])
@pytest.mark.parametrize("case", ["even", "padded", "oblong"])
def test_both_ways_to_attend_at_inference(version, threads, score_bytes, case, monkeypatch):
    """One thread takes the fused operation; more take batched products in small windows."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(fast, "SCORE_BYTES", score_bytes)
    calls = []
    for name in ("_attend_group", "_attend_and_keep"):
        run = getattr(fast, name)
        monkeypatch.setattr(fast, name, lambda *a, run=run, name=name: calls.append(name) or run(*a))
    size, window = CASES[case]
    model = swin(version, window_size=window).eval()
    x = images(3, 3, *size)
    with torch.no_grad():
        assert_near(model(x), readable(model)(x))
    assert set(calls) == {"_attend_group" if threads == 1 else "_attend_and_keep"}


def test_a_gpu_gets_larger_chunks():
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    assert fast.chunk_length(cpu, 1 << 20) == 2  # 8 MB of 4-byte numbers
    assert fast.chunk_length(meta, 1 << 20) == 256
    assert fast.chunk_length(cpu, 1 << 40, at_least=3) == 3


@VERSIONS
@pytest.mark.parametrize("dropping", ["all", "mlp", "attention"])
def test_without_gradients_a_branch_in_training_mode_still_drops(version, dropping):
    model = swin(version, drop_path_rate=0.5, depths=(2, 3)).train(dropping == "all")
    for stage in model.layers:
        for block in stage.blocks:
            block.drop_path1.train(dropping != "mlp")
            block.drop_path2.train(dropping != "attention")
    x, plain = images(6, 3, 36, 36), readable(model)
    outs = []
    with torch.no_grad():
        for m in (model, plain):
            torch.manual_seed(3)
            outs.append(m(x))
    assert_near(*outs)


@VERSIONS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_drop_path_and_checkpointing(version, checkpointing, stages_by_rows):
    model = swin(version, drop_path_rate=0.5, depths=(2, 3), checkpointing=checkpointing)
    plain = readable(model)
    plain.set_checkpointing(False)
    x = images(6, 3, 36, 36)
    assert_same(outcome(model, x), outcome(plain, x))
    assert stages_by_rows


@VERSIONS
def test_extra_norms(version):
    if version == 2:
        model = swin(2, depths=(2, 4), extra_norm_every=2)
        assert_same(outcome(model, images(2, 3, 36, 36)), outcome(readable(model), images(2, 3, 36, 36)))
    else:
        with pytest.raises(AttributeError, match="norm3"):
            _ = swin(1, extra_norm_every=2).layers[0].blocks[1].norm3


@VERSIONS
def test_one_stack_of_weights_serves_every_batch_and_size(version):
    model = swin(version)
    plain = readable(model)
    for shape in ((1, 3, 32, 32), (5, 3, 32, 32), (2, 3, 24, 44), (5, 3, 32, 32), (1, 3, 24, 44)):
        assert_same(outcome(model, images(*shape)), outcome(plain, images(*shape)))


@VERSIONS
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [FEW_KEYS, MANY_KEYS])
def test_any_part_may_be_frozen(version, seed, window):
    model = swin(version, window_size=window)
    choose = random.Random(seed)
    for p in model.parameters():
        p.requires_grad_(choose.random() < 0.5)
    x = images(2, 3, 36, 36)
    assert_same(outcome(model, x), outcome(readable(model), x))


@VERSIONS
@pytest.mark.parametrize("window", [FEW_KEYS, MANY_KEYS])
@pytest.mark.parametrize("frozen", ["nothing", "bias", "all"])
def test_second_derivatives(version, window, frozen):
    model = swin(version, window_size=window)
    model.requires_grad_(frozen != "all")
    if frozen == "bias":
        for attn in attentions(model):
            for p in attn._bias_parameters():
                p.requires_grad_(False)

    def penalty(model: nn.Module) -> dict:
        x = images(1, 3, 36, 36).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}

    assert_same(penalty(model), penalty(readable(model)))


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("head_dim", [2, 4], ids=["many keys", "few keys"])
def test_attention_core_by_finite_differences(cosine, head_dim):
    heads, N, groups = 2, 4, ((0, 1), (1, 1), (1, 2), (2, 3))
    qkv = images(3 * N, 3 * heads * head_dim).requires_grad_()
    hidden = torch.zeros(4, 1, N, N, dtype=torch.bool)
    hidden[2:, :, 0, 1:] = True  # some keys of some kinds of window
    bias = images(4, heads, N, N, seed=2).requires_grad_()
    scale = torch.tensor([[[3.0]], [[8.0]]], dtype=torch.float64, requires_grad=True) if cosine else 0.5

    def core(qkv, bias, scale):
        return window_attention(qkv, bias.masked_fill(hidden, -torch.inf), scale, groups, heads)

    assert torch.autograd.gradcheck(core, (qkv, bias, scale), fast_mode=True)
    assert torch.autograd.gradgradcheck(core, (qkv, bias, scale), fast_mode=True)


@VERSIONS
def test_gradients_twice_from_one_graph(version):
    model = swin(version)
    for size in ((32, 32), (4, 4)):
        model.zero_grad()
        loss = model(images(1, 3, *size)).sum()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        for p, first in zip(model.parameters(), once, strict=True):
            assert_near(p.grad, 2 * first)


@VERSIONS
def test_strange_memory_layouts(version):
    model = swin(version).eval()
    x = images(2, 3, 32, 32)
    expected = model(x)
    wide = torch.zeros(4, 3, 64, 96, dtype=torch.float64)
    wide[::2, :, ::2, ::3] = x
    for same in (
        wide[::2, :, ::2, ::3],
        x.contiguous(memory_format=torch.channels_last),
        x.mT.contiguous().mT,
    ):
        assert not same.is_contiguous()
        assert_near(model(same), expected)
    assert_near(model(x[:1].expand(3, -1, -1, -1)), expected[:1].expand(3, -1))


@VERSIONS
def test_fp32_uses_other_kernels_for_the_same_numbers(version, monkeypatch):
    monkeypatch.setattr(fast, "CHUNK_BYTES", 1 << 14)
    model = swin(version, dtype=torch.float32)
    x = images(3, 3, 36, 36, dtype=torch.float32)
    assert_same(outcome(model, x), outcome(readable(model), x), 2e-4)
    with torch.no_grad():
        assert_near(model.eval()(x), readable(model)(x), 1e-5)


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_agrees_to_its_precision(version, dtype):
    model = swin(version, dtype=torch.float32)
    x = images(3, 3, 36, 36, dtype=torch.float32)
    exact = outcome(readable(model), x)
    with torch.autocast("cpu", dtype):
        rows = outcome(model, x)
    assert_near(rows["logits"].float(), exact["logits"], 0.05)
    for name, grad in rows.items():
        assert torch.isfinite(grad).all()
        cosine = torch.cosine_similarity(grad.float().flatten(), exact[name].flatten(), dim=0)
        assert cosine > 0.9, name


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models_agree_to_their_precision(version, dtype):
    exact = swin(version).eval()
    half = copy.deepcopy(exact).to(dtype)
    x = images(3, 3, 36, 36)
    for model in (half, readable(half)):
        assert_near(model(x.to(dtype)).double(), exact(x), 0.1)


@VERSIONS
def test_inference_first_then_training(version):
    """What the first forward pass caches must serve autograd later."""
    x = images(2, 3, 20 + 4 * version, 52)  # a size no other test has cached
    model = swin(version)
    with torch.inference_mode():
        model.eval()(x)
    frozen_bias = copy.deepcopy(model)
    for attn in attentions(frozen_bias):
        for p in attn._bias_parameters():
            p.requires_grad_(False)
    assert_same(outcome(frozen_bias, x), outcome(readable(frozen_bias), x))
    assert_same(outcome(model.train(), x), outcome(readable(model), x))


@VERSIONS
def test_function_transforms_and_forward_mode(version):
    model = swin(version).eval()
    x, direction = images(2, 3, 32, 32), images(2, 3, 32, 32, seed=3)
    reference = readable(model)
    slopes = torch.func.jvp(reference, (x,), (direction,))[1]
    assert_near(torch.func.jvp(model, (x,), (direction,))[1], slopes)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        assert_near(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent, slopes)
    jacobian = torch.autograd.functional.jacobian(model.requires_grad_(False), x[:1], vectorize=True)
    assert_near((jacobian[0, :, 0] * direction[0]).sum((1, 2, 3)), slopes[0])


@VERSIONS
def test_an_ensemble_by_vmap(version):
    members = [swin(version, seed).eval() for seed in (0, 1, 2)]
    parameters, _ = torch.func.stack_module_state(members)
    base, x = copy.deepcopy(members[0]), images(2, 3, 36, 36)
    with torch.no_grad():
        together = torch.func.vmap(lambda p: torch.func.functional_call(base, p, (x,)))(parameters)
        assert_near(together, torch.stack([member(x) for member in members]))


# --- where the row path must step aside ---


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x).square()


class Negative(nn.Module):
    def forward(self, x):
        return -x


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Watched(torch.Tensor):
    """Stands for quantised and sharded parameters, which are subclasses too."""


def squared(linear: nn.Linear) -> nn.Linear:
    new = Squared(linear.in_features, linear.out_features, bias=linear.bias is not None).double()
    new.load_state_dict(linear.state_dict())
    return new


def replace_part(block: nn.Module, name: str, new) -> None:
    path, _, last = name.rpartition(".")
    setattr(block.get_submodule(path), last, new)


CHANGES = {
    "subclass of qkv": lambda b: replace_part(b, "attn.qkv", squared(b.attn.qkv)),
    "subclass of fc2": lambda b: replace_part(b, "mlp.fc2", squared(b.mlp.fc2)),
    "parametrized proj": lambda b: parametrize.register_parametrization(b.attn.proj, "weight", Twice()),
    "other activation": lambda b: replace_part(b, "mlp.act", nn.ReLU()),
    "approximate GELU": lambda b: replace_part(b, "mlp.act", nn.GELU(approximate="tanh")),
    "no drop path": lambda b: replace_part(b, "drop_path1", nn.Identity()),
    "no dropout modules": lambda b: [
        replace_part(b, n, nn.Identity()) for n in ("attn.proj_drop", "mlp.drop")
    ],
    "other norm": lambda b: replace_part(b, "norm2", nn.Identity()),
    "another window": lambda b: set_window(b.attn, (2, 2), (1, 1)),
    "another forward": lambda b: setattr(b.mlp, "forward", lambda x: 3 * x),
}


@VERSIONS
@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_part_is_used(version, change, stages_by_rows):
    model = swin(version, drop_path_rate=0.1).eval()
    x = images(2, 3, 32, 32)
    before = model(x)
    CHANGES[change](model.layers[0].blocks[1])
    taken = len(stages_by_rows)
    after = model(x)
    assert model.layers[0].blocks[0] not in stages_by_rows[taken:]
    assert_near(after, readable(model)(x))
    same = change in ("no drop path", "no dropout modules")
    assert torch.allclose(after, before) == same


@VERSIONS
def test_a_parameter_of_another_class_takes_the_readable_path(version, stages_by_rows):
    model = swin(version).eval()
    before = model(images(2, 3, 32, 32))
    proj = model.layers[0].blocks[1].attn.proj
    proj.weight = nn.Parameter(proj.weight.detach().as_subclass(Watched))
    stages_by_rows.clear()
    assert_near(model(images(2, 3, 32, 32)).as_subclass(torch.Tensor), before)
    assert model.layers[0].blocks[0] not in stages_by_rows


@VERSIONS
def test_a_parametrized_position_is_used(version):
    model = swin(version).eval()
    attn = model.layers[0].blocks[1].attn
    before = model(images(2, 3, 32, 32))
    name = "relative_position_bias_table" if version == 1 else "logit_scale"
    parametrize.register_parametrization(attn, name, Twice())
    with torch.no_grad():
        after = model(images(2, 3, 32, 32))
    assert not torch.allclose(after, before)
    assert_near(after, readable(model)(images(2, 3, 32, 32)))


class NegativeEmbed(PatchEmbed):
    def forward(self, x):
        return -super().forward(x)


class NegativeMerging(PatchMerging):
    def forward(self, x):
        return -super().forward(x)


@VERSIONS
def test_another_stem_or_merging_is_used(version):
    model = swin(version).eval()
    x = images(2, 3, 32, 32)
    stem, merging = model.patch_embed, model.layers[1].downsample
    negative = NegativeEmbed(4, 3, 24).double(), NegativeMerging(24, version == 2).double()
    negative[0].load_state_dict(stem.state_dict())
    negative[1].load_state_dict(merging.state_dict())
    model.patch_embed = nn.Sequential(stem, Negative())
    model.layers[1].downsample = nn.Sequential(merging, Negative())
    expected = model(x)
    model.patch_embed, model.layers[1].downsample = negative
    assert_near(model(x), expected)


@VERSIONS
@pytest.mark.parametrize(
    "part", ["patch_embed", "patch_embed.proj", "layers.1.downsample", "layers.1.downsample.reduction"]
)
def test_a_hook_beside_the_blocks_is_called(version, part):
    model, shapes = swin(version), []
    model.get_submodule(part).register_forward_hook(lambda m, inputs, output: shapes.append(output.shape))
    model(images(2, 3, 32, 32))
    assert len(shapes) == 1
    assert len(shapes[0]) == 4


@VERSIONS
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_on_any_part_of_a_block_is_called(version, kind):
    names = [name for name, _ in swin(version, extra_norm_every=1).layers[0].blocks[1].named_modules()]
    for name in names:
        if "cpb_mlp" in name:
            continue  # it sees coordinates, not the image
        model = swin(version, drop_path_rate=0.1, extra_norm_every=1)
        called = []
        part = model.layers[0].blocks[1].get_submodule(name)
        getattr(part, f"register_{kind}_hook")(lambda *args, called=called: called.append(1))
        model(images(1, 3, 32, 32).requires_grad_()).sum().backward()
        assert called, name


@VERSIONS
@pytest.mark.parametrize(
    "part", ["", "norm1", "norm2", "norm3", "attn", "mlp", "mlp.fc1", "mlp.act", "drop_path2"]
)
def test_a_hook_sees_maps(version, part):
    if version == 1 and part == "norm3":
        part = "norm2"
    model = swin(version, extra_norm_every=1)
    shapes = []
    module = model.layers[0].blocks[1].get_submodule(part)
    module.register_forward_hook(
        lambda m, inputs, output: shapes.append((inputs[0].shape[:3], output.shape[:3]))
    )
    model(images(2, 3, 32, 32))
    assert shapes == [((2, 8, 8), (2, 8, 8))]


@VERSIONS
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_global_hooks_see_every_block(version, kind):
    seen = []
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    handle = register(lambda module, *args: seen.append(type(module).__name__))
    try:
        swin(version)(images(1, 3, 32, 32).requires_grad_()).sum().backward()
    finally:
        handle.remove()
    assert sum(name.startswith("SwinBlock") for name in seen) == 4


@VERSIONS
def test_dropout_takes_the_readable_path_in_training_alone(version, stages_by_rows):
    model = swin(version, proj_drop_rate=0.5)
    x = images(1, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    assert not stages_by_rows
    model.eval()
    assert torch.equal(model(x), model(x))
    assert len(stages_by_rows) == 4
    model.layers[0].blocks[0].mlp.drop.train()  # Monte Carlo dropout
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_drop_path_is_one_decision_an_image(rate):
    model = swin(1, drop_path_rate=rate, depths=(1, 1))
    drops = [m for m in model.modules() if isinstance(m, DropPath)]
    assert [m.rate for m in drops] == [0.0, 0.0, rate, rate]
    torch.manual_seed(0)
    out = drops[-1](torch.ones(400, 2, 2, 3))
    assert (out == out[:, :1, :1, :1]).all()
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / max(1 - rate, 0.1)))
    assert (out[:, 0, 0, 0] == 0).float().mean().item() == pytest.approx(rate, abs=0.08)
