"""Mixed precision: each trap that a loop can fall into, on the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_small import small_config, small_model, small_set

from swin_lessons.models import create_model
from swin_lessons.models.attention import WindowAttention, WindowAttentionV2
from swin_lessons.training import (
    TrainConfig,
    autocast,
    build_optimizer,
    evaluate,
    float32_products,
    grad_scaler,
    lr_at,
    read_tensors,
    train,
    train_step,
)
from swin_lessons.training.batches import train_batches
from swin_lessons.training.checkpoint import TrainState
from swin_lessons.training.loop import Run

CPU = torch.device("cpu")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


# --- precision by name ---


def settings():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("precision", "inside"), [("tf32", ("high", True)), ("fp32", ("highest", False))])
@pytest.mark.parametrize("before", [("highest", True), ("high", False)])
def test_tf32_is_on_inside_alone(precision, inside, before):
    kept = settings()
    try:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        with float32_products(precision):
            assert settings() == inside
        with pytest.raises(ZeroDivisionError), float32_products(precision):
            raise ZeroDivisionError
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cudnn.allow_tf32 = kept[1]


class Watched(type(small_model())):
    """Notes how products are computed in each forward pass."""

    def forward(self, x):
        self.seen = {*getattr(self, "seen", ()), (self.training, *settings())}
        return super().forward(x)


def test_a_run_and_an_evaluation_set_tf32_and_put_it_back(tmp_path):
    before = settings()
    model = Watched()
    train(model, small_set(), None, small_config(steps=2, precision="tf32", ema=0.0), tmp_path)
    evaluate(model, small_set(8), precision="tf32")
    assert model.seen == {(True, "high", True), (False, "high", True)}
    assert settings() == before


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_no_autocast_without_a_half_precision(precision):
    with autocast(CPU, precision):
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("precision", "on"), [("fp32", False), ("tf32", False), ("bf16", False), ("fp16", True)]
)
def test_only_fp16_scales_its_loss(precision, on):
    assert grad_scaler(CPU, precision).is_enabled() == on
    assert grad_scaler(CPU, precision).get_scale() == (65536 if on else 1)


# --- loss scaling ---


class Spy(torch.amp.GradScaler):
    """Notes its calls in order, and the gradients' norm when the optimiser would use them."""

    def __init__(self, log, scale=2.0**16):
        super().__init__("cpu", init_scale=scale)
        self.log = log

    def scale(self, outputs):
        self.log.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer):
        self.log.append("unscale")
        return super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.log.append("step")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norm_at_step = torch.stack([g.norm() for g in gradients]).norm()
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.log.append("update")
        return super().update(new_scale)


def fp16_state(model, config, log):
    return TrainState(model, build_optimizer(model, config), Spy(log))


def batch(config):
    return next(iter(train_batches(small_set(), config, 0)))


def test_one_unscale_and_one_step_for_all_passes_of_a_step():
    """Ten images in passes of 4: 4, 4 and 2."""
    config, log = small_config(precision="fp16"), []
    train_step(fp16_state(small_model(), config, log), *batch(config), config)
    assert log == ["scale", "scale", "scale", "unscale", "step", "update"]


def test_gradients_are_unscaled_before_they_are_clipped():
    """Scaled by 65,536, they would all be clipped to next to nothing, and the norm would be wrong."""
    config, log = small_config(precision="fp16", clip_norm=0.5, micro_batch=None), []
    state = fp16_state(small_model(drop_path=0), config, log)
    _, norm = train_step(state, *batch(config), config)
    plain = small_config(precision="fp32", clip_norm=0.5, micro_batch=None)
    model = small_model(drop_path=0)
    expected = train_step(
        TrainState(model, build_optimizer(model, plain), grad_scaler(CPU, "fp32")), *batch(plain), plain
    )
    assert norm == pytest.approx(expected[1].item(), rel=1e-2)
    assert norm > 0.5
    assert state.scaler.norm_at_step == pytest.approx(0.5, rel=1e-4)


def test_unscaling_twice_is_an_error_that_the_step_cannot_make():
    config, log = small_config(precision="fp16"), []
    state = fp16_state(small_model(), config, log)
    for _ in range(3):
        train_step(state, *batch(config), config)  # `update` clears what `unscale_` noted
    state.scaler.scale(state.model(batch(config)[0]).sum()).backward()
    state.scaler.unscale_(state.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        state.scaler.unscale_(state.optimizer)


def overflow_at(model, *calls):
    """Let the loss's gradients be infinite in the forward passes of these numbers, from 1."""
    count = [0]

    def hook(module, args, output):
        if module.training:
            count[0] += 1
            if count[0] in calls:
                output.register_hook(lambda grad: grad * math.inf)

    model.register_forward_hook(hook)
    return model


def test_an_overflow_skips_the_optimiser_and_halves_the_scale():
    config, log = small_config(precision="fp16", micro_batch=None), []
    model = overflow_at(small_model(), 1)
    state = fp16_state(model, config, log)
    before = [p.detach().clone() for p in model.parameters()]
    train_step(state, *batch(config), config)
    assert all(map(torch.equal, before, model.parameters()))
    moments = [t for kept in state.optimizer.state.values() for t in kept.values()]
    assert not any(t.any() for t in moments)  # nor does AdamW count the step
    assert log[-1] == "update"  # also after a skipped step, else the next `unscale_` raises
    assert state.scaler.get_scale() == 32768
    train_step(state, *batch(config), config)
    assert not any(map(torch.equal, before, model.parameters()))
    assert state.scaler.get_scale() == 32768


def test_an_overflow_in_one_pass_of_several_skips_the_whole_step():
    config = small_config(precision="fp16")
    model = overflow_at(small_model(), 2)
    state = fp16_state(model, config, [])
    before = [p.detach().clone() for p in model.parameters()]
    train_step(state, *batch(config), config)
    assert all(map(torch.equal, before, model.parameters()))


FP16 = {"precision": "fp16", "micro_batch": None, "steps": 9, "warmup": 3}


def test_the_schedule_and_the_average_count_what_the_optimiser_did(tmp_path):
    """Steps 2 and 5 overflow: the rates of steps 2 and 3 are one, and so are those of 5 and 6."""
    config = small_config(**FP16)
    history = train(overflow_at(small_model(), 2, 5), small_set(), None, config, tmp_path)
    updates = [0, 1, 1, 2, 3, 3, 4, 5, 6]  # optimiser steps done before each step
    assert history.column("lr") == [lr_at(done, 9, config) for done in updates]
    assert [math.isfinite(norm) for norm in history.column("grad_norm")] == [
        i not in (1, 4) for i in range(9)
    ]
    assert all(map(math.isfinite, history.column("loss")))


def test_a_resumed_fp16_run_has_the_scale_and_the_schedule_it_had(tmp_path, monkeypatch):
    config = small_config(**FP16, save_every=3)
    straight = train(overflow_at(small_model(), 2, 5), small_set(), None, config, tmp_path / "straight")
    after = Run._after_step

    def stopping(self, epoch, bar):
        after(self, epoch, bar)
        if self.state.step == 7:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_after_step", stopping)
        with pytest.raises(InterruptedError):
            train(overflow_at(small_model(), 2, 5), small_set(), None, config, tmp_path / "stopped")
    resumed = train(
        small_model(), small_set(), None, config, tmp_path / "stopped", resume=True
    )  # from step 6
    for name in ("loss", "lr", "grad_norm"):
        assert repr(resumed.column(name)) == repr(straight.column(name))
    one, other = (
        read_tensors(tmp_path / run / "checkpoints" / "step-00000009.safetensors")
        for run in ("straight", "stopped")
    )
    assert one[1]["state"] == other[1]["state"]
    assert '"scale": 16384.0' in one[1]["state"]
    assert '"skipped": 2' in one[1]["state"]
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_the_scale_grows_again(tmp_path):
    config, log = small_config(precision="fp16"), []
    state = fp16_state(small_model(), config, log)
    state.scaler.set_growth_interval(2)
    for _ in range(2):
        train_step(state, *batch(config), config)
    assert state.scaler.get_scale() == 131072


# --- what stays in fp32 ---


def test_weights_gradients_and_moments_are_fp32_and_the_loss_too():
    config = small_config(precision="bf16")
    model = small_model()
    state = TrainState(model, build_optimizer(model, config), grad_scaler(CPU, "bf16"))
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    loss, norm = train_step(state, *batch(config), config)
    assert {loss.dtype, norm.dtype, *seen, *(p.dtype for p in model.parameters())} == {torch.float32}
    assert {t.dtype for moments in state.optimizer.state.values() for t in moments.values()} == {
        torch.float32
    }


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layer_norm_sums_in_fp32(precision):
    """Values around 100 with a spread of 1: statistics in half precision would be off by tens of percent.

    CPU autocast keeps the input's half precision, CUDA's makes it fp32; the statistics are fp32 in both.
    """
    torch.manual_seed(0)
    x = (100 + torch.randn(8, 768)).to(HALF[precision])
    norm = nn.LayerNorm(768)
    with autocast(CPU, precision):
        found = norm(x)
    expected = F.layer_norm(x.double(), (768,))
    ulp = torch.finfo(HALF[precision]).eps
    assert ((found.double() - expected).abs() <= ulp * expected.abs() + 1e-4).all()
    low = x - x.mean(-1, keepdim=True)  # the same with each operation's result in half precision
    low = low / (low.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (low.double() - expected).abs().max() > 4 * ulp


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("training", [True, False])
def test_softmax_sums_in_fp32(precision, training):
    """Sixty-four equal keys: each probability is 1/64, and the sum of the 64 is 1 to fp32's rounding.

    The values are 1 but for the last, so the output shows the sum of the probabilities.
    """
    attn = WindowAttention(32, 1, (8, 8)).train(training)
    with torch.no_grad():
        attn.qkv.weight.zero_()
        attn.qkv.bias.zero_()
        attn.qkv.bias[64:] = 1  # every value
        attn.relative_position_bias_table.copy_(torch.linspace(-6, 6, 225)[:, None])
        attn.proj.weight.copy_(torch.eye(32))
        attn.proj.bias.zero_()
    attn.fold()
    with autocast(CPU, precision):
        found = attn(torch.zeros(1, 8, 8, 32))
    assert (found.double() - 1).abs().max() <= torch.finfo(HALF[precision]).eps


@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_fast_path_s_softmax_gets_and_gives_fp32(name, precision, monkeypatch):
    from swin_lessons.models import fast

    seen = set()
    original = fast._probabilities

    def watched(q, k, bias, groups):
        probabilities = original(q, k, bias, groups)
        seen.add((bias.dtype, probabilities.dtype))
        return probabilities

    monkeypatch.setattr(fast, "_probabilities", watched)
    model = create_model(name, num_classes=4, img_size=16)
    with autocast(CPU, precision):
        loss = model(torch.randn(2, 1, 16, 16)).float().square().mean()
    loss.backward()
    assert seen == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_cosines_are_worked_out_in_fp32(precision):
    """Queries of 2^-14: their squares, 2^-28, are zero in fp16, and a vector divided by 0 has no direction."""
    attn = WindowAttentionV2(32, 1, (2, 2))
    q = torch.full((1, 1, 4, 32), 2.0**-14, dtype=HALF[precision])
    with autocast(CPU, precision):
        unit_q, unit_k = attn.scale_qk(q, q)
        cosine = (unit_q.double() * unit_k.double()).sum(-1)
    torch.testing.assert_close(cosine, torch.full_like(cosine, 10.0), rtol=1e-2, atol=0)  # logit scale 10
    assert q.square().sum(-1).eq(0).all() == (precision == "fp16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_whole_model_keeps_tiny_and_large_activations(precision):
    """V2 with a head that makes tiny queries: its gradients are finite, and near those of fp32."""
    torch.manual_seed(0)
    model = create_model("swinv2_micro_fmnist", num_classes=4, img_size=16)
    with torch.no_grad():
        for block in (b for stage in model.layers for b in stage.blocks):
            block.norm1.weight.fill_(1.0)
            block.norm2.weight.fill_(1.0)
            block.attn.qkv.weight.mul_(2.0**-10)
    x, y = torch.randn(4, 1, 16, 16), torch.tensor([0, 1, 2, 3])
    norms = []
    for word in ("fp32", precision):
        model.zero_grad()
        with autocast(CPU, word):
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


def test_old_checkpoints_without_a_count_of_skipped_steps_are_read(tmp_path):
    from swin_lessons.training import write_tensors

    config = small_config(steps=6)
    train(small_model(), small_set(), None, config, tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006.safetensors"
    tensors, metadata = read_tensors(newest)
    metadata["state"] = metadata["state"].replace('"skipped": 0, ', "")
    assert "skipped" not in metadata["state"]
    write_tensors(newest, tensors, {name: metadata[name] for name in ("format", "state")})
    assert len(train(small_model(), small_set(), None, config, tmp_path, resume=True).steps) == 6


def test_an_unknown_precision_names_the_known_ones():
    with pytest.raises(ValueError, match="fp32, tf32, bf16, fp16"):
        TrainConfig(precision="fp8")
