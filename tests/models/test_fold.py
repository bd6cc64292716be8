"""The bias folded for inference is never stale, whatever changes the parameters it comes from."""

import copy
import pickle

import pytest
import torch
from swin_cases import assert_near, attentions, images, readable, scramble, swin
from torch import nn
from torch.nn.utils import prune

VERSIONS = pytest.mark.parametrize("version", [1, 2])
X = images(2, 3, 32, 32)


def folded(version: int, **changes) -> nn.Module:
    model = swin(version, **changes).eval()
    assert all(attn._fold_is_valid() for attn in attentions(model.requires_grad_(False)))
    return model.requires_grad_(True)


def fresh(model: nn.Module) -> torch.Tensor:
    """What the model should say: from the parameters alone."""
    model = readable(model)
    for attn in attentions(model):
        attn.folded_bias = None
    with torch.no_grad():
        return model(X.to(next(model.parameters()).dtype))


def positions(model: nn.Module) -> list[nn.Parameter]:
    return [p for attn in attentions(model) for p in attn._bias_parameters()]


def add_noise(p: torch.Tensor) -> torch.Tensor:
    return p + images(*p.shape, seed=4).to(p)


def write_in_place(model):
    with torch.no_grad():
        for p in positions(model):
            p.copy_(add_noise(p))


def write_through_data(model):
    for p in positions(model):
        p.data.copy_(add_noise(p.data))


def replace_data(model):
    for p in positions(model):
        p.data = add_noise(p.data)


def write_through_state_dict(model):
    for name, value in model.state_dict().items():
        if "bias_table" in name or "cpb_mlp" in name:
            value.copy_(add_noise(value))


def load(model):
    model.load_state_dict(scramble(copy.deepcopy(model), seed=8).state_dict())


def load_by_assignment(model):
    model.load_state_dict(scramble(copy.deepcopy(model), seed=8).state_dict(), assign=True)


def step(model):
    with torch.enable_grad():
        model(X).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def step_in_training_mode(model):
    model.train()
    step(model)
    model.eval()


def replace_parameters(model):
    for attn in attentions(model):
        if hasattr(attn, "relative_position_bias_table"):
            attn.relative_position_bias_table = nn.Parameter(
                add_noise(attn.relative_position_bias_table.detach())
            )
        else:
            attn.cpb_mlp[0] = scramble(nn.Linear(2, 512), seed=8).double()


CHANGES = [
    write_in_place,
    write_through_data,
    replace_data,
    write_through_state_dict,
    load,
    load_by_assignment,
    step,
    step_in_training_mode,
    replace_parameters,
]


@VERSIONS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", ["rows", "readable"])
def test_a_change_of_parameters_is_seen(version, change, path):
    model = folded(version)
    if path == "readable":
        model = readable(model)
    with torch.no_grad():
        before = model(X)
        change(model)
        after = model(X)
    assert not torch.allclose(after, before)
    assert_near(after, fresh(model))


@VERSIONS
def test_a_change_is_seen_by_a_compiled_model(version):
    model = folded(version, depths=(2,), num_heads=(2,))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert_near(compiled(X), fresh(model))
        write_in_place(model)
        assert_near(compiled(X), fresh(model))


@VERSIONS
def test_a_change_of_a_parameter_without_gradient_is_seen_with_gradients_on(version):
    model = folded(version)
    for p in positions(model):
        p.requires_grad_(False)
    write_through_data(model)
    assert_near(model(X).detach(), fresh(model))


@VERSIONS
def test_parameters_lent_for_one_call_are_used(version):
    model = folded(version)
    other = scramble(copy.deepcopy(model), seed=8)
    with torch.no_grad():
        out = torch.func.functional_call(model, dict(other.named_parameters()), (X,))
        assert_near(out, fresh(other))
        assert_near(model(X), fresh(model))


@VERSIONS
def test_positions_get_gradients_in_evaluation(version):
    model = folded(version)
    model(X).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in positions(model))


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conversion_folds_anew(version, dtype):
    model = folded(version).to(dtype)
    with torch.no_grad():
        assert_near(model(X.to(dtype)).float(), fresh(model).float(), 0.1)
        again = model.double()
        assert_near(again(X), fresh(again))


@VERSIONS
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent(version, how):
    model = folded(version)
    twin = how(model)
    before = fresh(model)
    write_in_place(twin)
    with torch.no_grad():
        assert_near(model(X), before)
        assert_near(twin(X), fresh(twin))
        assert not torch.allclose(twin(X), before)


@VERSIONS
def test_training_mode_keeps_no_table(version):
    model = folded(version).train()
    assert all(attn.folded_bias is None for attn in attentions(model))
    assert not [name for name in model.state_dict() if "folded" in name]
    assert [name for name, _ in model.eval().named_buffers() if "folded" in name]
    assert not [name for name in model.state_dict() if "folded" in name]


@VERSIONS
def test_another_input_size_folds_anew(version):
    model = folded(version)
    model.set_input_size(64, 8)
    with torch.no_grad():
        assert_near(model(images(1, 3, 64, 64)), readable(model.train()).eval()(images(1, 3, 64, 64)))


@VERSIONS
def test_a_window_that_the_map_clamps_does_not_use_the_table_of_the_full_one(version):
    model = folded(version)
    small = images(2, 3, 12, 20)
    with torch.no_grad():
        inference = model(small)
    assert_near(inference, readable(model.train())(small).detach())


@VERSIONS
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_folding_inside_inference_mode_serves_later(version, mode):
    model = swin(version)
    with mode():
        expected = model.eval()(X)
    for p in positions(model):
        p.requires_grad_(False)
    out = model(X)
    out.sum().backward()
    assert_near(out.detach(), expected)


@VERSIONS
def test_pruned_layers_work_and_stay_fresh(version):
    model = folded(version)
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    with torch.no_grad():
        assert_near(model(X), fresh(model))
        for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
            layer.weight_orig.mul_(2)
        pruned = model(X)
        for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
            prune.remove(layer, "weight")
        assert_near(pruned, model(X))


@VERSIONS
@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="this build has no quantised kernels")
def test_layers_may_be_replaced_by_quantised_ones(version):
    model = swin(version, dtype=torch.float32).eval()
    with pytest.warns(match="deprecated"):
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    x = X.float()
    with torch.no_grad():
        similar = torch.cosine_similarity(small(x), model(x))
    assert (similar > 0.99).all()
    assert not torch.equal(small(x), model(x))
