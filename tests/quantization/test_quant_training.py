"""Quantisation-aware training: the loss, observers over time, and a run that heals a model."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from quant_cases import batches, logits, model
from swin_cases import swin
from torch import nn
from torch.nn import functional as F

from swin_lessons.data import ImageArrays
from swin_lessons.quantization import (
    QuantConfig,
    conversion_gap,
    convert,
    prepare_qat,
    ptq,
    qat_loss,
    quantizers,
    switch,
    train_qat,
)
from swin_lessons.training import TrainConfig, TrainingDiverged, evaluate, train


def quadrants(length: int = 48) -> ImageArrays:
    """Noise with a bright quadrant that tells the class."""
    rng, labels = np.random.default_rng(0), np.arange(length) % 4
    images = rng.integers(0, 80, (length, 1, 16, 16))
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 150
    return ImageArrays(images.astype(np.uint8), labels, list("abcd"), mean=(0.3,), std=(0.25,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(1, 16, 4, 4)
        self.blocks = nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)])
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        y = x
        for block in self.blocks:
            y = block(y)
        return self.head((x + y).flatten(1))


# --- the loss


def test_the_loss_by_hand():
    student, teacher = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    labels = torch.tensor([0, 1])
    hard = (math.log(1 + math.exp(-2)) + math.log(2)) / 2
    soft = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = ([math.exp(v / 2) / sum(math.exp(w / 2) for w in z) for v in z] for z in (t, s))
        soft += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 2
    found = qat_loss(student, teacher, labels, temperature=2.0, hard=0.5, soft=3.0)
    assert found.item() == pytest.approx(0.5 * hard + 3.0 * 4 * soft, rel=1e-6)
    assert qat_loss(student, None, labels).item() == pytest.approx(hard, rel=1e-6)
    assert qat_loss(student, student, labels, hard=0).item() == pytest.approx(0, abs=1e-7)
    shares = F.one_hot(labels, 2).float()
    assert qat_loss(student, None, shares).item() == pytest.approx(hard, rel=1e-6)


def test_the_teacher_gets_no_gradient_and_must_have_the_same_classes():
    student, teacher = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    qat_loss(student, teacher, torch.tensor([0, 1])).backward()
    assert student.grad is not None
    assert teacher.grad is None
    with pytest.raises(ValueError, match=r"teacher gives \(2, 4\), the student \(2, 3\)"):
        qat_loss(student, torch.zeros(2, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="temperature=0"):
        qat_loss(student, teacher, torch.tensor([0, 1]), temperature=0)


# --- observers over time


def test_ranges_move_in_training_until_they_are_frozen():
    trained = prepare_qat(Net())
    scales = lambda: torch.stack([q.scale.flatten()[0] for q in quantizers(trained)])  # noqa: E731
    trained(torch.randn(4, 1, 16, 16))
    first = scales().clone()
    trained(10 * torch.randn(4, 1, 16, 16))
    second = scales().clone()
    assert (second > first)[[0, 4, 6]].all()  # inputs, but that behind the LayerNorm
    trained.eval()(1000 * torch.ones(1, 1, 16, 16))
    assert torch.equal(scales(), second)
    with torch.no_grad():
        trained.head.weight.mul_(2)
    trained.train()(torch.randn(1, 1, 16, 16))
    assert scales()[-1] == 2 * second[-1]
    frozen = scales().clone()
    switch(trained, observe="never")
    trained(1000 * torch.ones(1, 1, 16, 16))
    assert torch.equal(scales(), frozen)


def test_calibrated_ranges_stay_in_training():
    trained = prepare_qat(Net(), batches=[torch.randn(8, 1, 16, 16)])
    before = {q.name: q.scale.clone() for q in quantizers(trained) if q.role == "input"}
    trained(100 * torch.ones(2, 1, 16, 16))
    assert all(torch.equal(q.scale, before[q.name]) for q in quantizers(trained) if q.role == "input")


def test_refusals():
    with pytest.raises(ValueError, match="give prepare_qat some batches"):
        prepare_qat(Net(), QuantConfig(learnable_scale=True))
    with pytest.raises(ValueError, match="observed twice"):
        prepare_qat(swin(1, checkpointing=True))
    with pytest.raises(ValueError, match="is not quantised"):
        train_qat(Net(), quadrants(), TrainConfig(steps=1))


# --- training


@pytest.fixture(scope="module")
def taught() -> nn.Module:
    """A float network that knows the quadrants."""
    net, data = Net(), quadrants()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    images = data.prepare(data.images)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(images), data.labels).backward()
        optimizer.step()
    assert evaluate(net, data).top1 == 1.0
    return net


@pytest.mark.parametrize("learnable", [False, True])
def test_training_heals_what_4_bits_break(taught, learnable):
    data = quadrants()
    config = QuantConfig(
        weight_bits=4,
        activation_bits=4,
        weight_granularity="tensor",
        activation_observer="minmax",
        learnable_scale=learnable,
    )
    images = data.prepare(data.images)
    student = prepare_qat(taught, config, batches=[images])

    @torch.no_grad()
    def distance() -> float:
        return qat_loss(student.eval()(images), taught(images), data.labels, hard=0.0).item()

    before, state = distance(), torch.get_rng_state()
    run = TrainConfig(epochs=20, batch_size=16, lr=2e-3, clip_norm=None, precision="fp32")
    rows = train_qat(student, data, run, teacher=taught, hard=0.0, val_set=data, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [row["step"] for row in rows] == list(range(3, 61, 3))
    assert rows[-1]["top1"] == 1.0
    assert {row["gap"] for row in rows} == {0.0}  # ao#4824, pytorch#111192: what is trained is what will run
    assert not student.training
    assert {q.observes for q in quantizers(student)} == {"never"}
    assert distance() < 0.5 * before
    with torch.no_grad():
        assert torch.equal(convert(student)(images), student(images))


@pytest.mark.parametrize("learnable", [False, True])
def test_the_package_s_own_loop_trains_and_resumes(tmp_path, taught, learnable):
    """Checkpoints hold scales and averages, so a stopped run goes on bit for bit."""
    data, results = quadrants(), []
    images = [data.prepare(data.images)] if learnable else None
    for folder, stops in (("whole", [4]), ("parts", [3, 4])):
        for steps in stops:
            student = prepare_qat(taught, QuantConfig(learnable_scale=learnable), batches=images)
            run = TrainConfig(steps=4, batch_size=16, ema=0.9, save_every=2, lr=1e-3)
            if steps == 3:
                with pytest.raises(KeyboardInterrupt):
                    train(student, data, data, replace(run, eval_every=3), tmp_path / folder, on_eval=stop)
            else:
                train(
                    student,
                    data,
                    None,
                    replace(run, eval_every=3),
                    tmp_path / folder,
                    resume=folder == "parts",
                )
        results.append(student.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert conversion_gap(student, data.prepare(data.images)) == 0.0


def stop(row) -> None:
    raise KeyboardInterrupt


def test_a_run_is_repeatable_and_micro_batches_add_up(taught):
    data, results = quadrants(), []
    for micro in (None, None, 4):
        student = prepare_qat(taught, batches=[data.prepare(data.images)])
        run = TrainConfig(steps=4, batch_size=16, micro_batch=micro, augment="shift=1", lr=1e-3)
        train_qat(student, data, run, teacher=taught, progress=False)
        results.append(student.head.weight.detach())
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], atol=1e-4, rtol=1e-3)


def test_observers_freeze_after_the_given_step(taught):
    student, data, seen = prepare_qat(taught), quadrants(), []
    student.embed.register_forward_hook(lambda m, *_: seen.append((m.training, m.input_quant.observes)))
    train_qat(student, data, TrainConfig(steps=4, batch_size=16), freeze_after=3, progress=False)
    assert [when for training, when in seen if training] == ["training"] * 3 + ["never"]


def test_a_loss_that_is_no_number_is_refused(taught):
    student, data = prepare_qat(taught), quadrants()
    with torch.no_grad():
        student.head.bias.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="step 1"):
        train_qat(student, data, TrainConfig(steps=1, batch_size=8), progress=False)


def test_two_steps_on_swin_v2_leave_no_gap():
    """pytorch#150746: after QAT, fake and converted networks differed."""
    trained = prepare_qat(model("v2"), QuantConfig.preset("mode1"))
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    for batch in batches(2):
        optimizer.zero_grad()
        F.cross_entropy(trained(batch), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
    assert conversion_gap(trained, batches(1, seed=30)[0]) == 0.0
    assert not torch.equal(
        logits(trained.eval()), logits(ptq(model("v2"), batches(), QuantConfig.preset("mode1")))
    )
    assert copy.deepcopy(trained).quantization == trained.quantization
