"""The loop trains, accumulates, averages, evaluates, and stops when it must."""

import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_small import small_config, small_model, small_set

from swin_lessons.data import Augment, ImageArrays
from swin_lessons.models import create_model
from swin_lessons.training import (
    TrainConfig,
    TrainingDiverged,
    build_optimizer,
    confusion_matrix,
    derive_seed,
    evaluate,
    grad_scaler,
    read_tensors,
    recipe,
    topk_hits,
    train,
    train_step,
)
from swin_lessons.training.batches import parse_augment, train_batches
from swin_lessons.training.checkpoint import TrainState

CPU = torch.device("cpu")


def state_of(model, config):
    return TrainState(model, build_optimizer(model, config), grad_scaler(CPU, config.precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_learns(tmp_path, precision):
    config = TrainConfig(steps=60, batch_size=20, lr=1e-2, ema=0.9, precision=precision, augment="flip=0")
    history = train(small_model(), small_set(), small_set(40, seed=1), config, tmp_path)
    losses = history.column("loss")
    assert losses[-1] < 0.3 * losses[0]
    assert history.best["top1"] > 0.95


@pytest.mark.parametrize("micro", [1, 3, 10])
def test_micro_batches_give_the_gradients_of_the_whole(micro):
    images, targets = next(iter(train_batches(small_set(), small_config(), 0)))
    gradients = []
    for size in (None, micro):
        model = small_model(drop_path=0).double()
        config = small_config(micro_batch=size, clip_norm=None)
        loss, norm = train_step(state_of(model, config), images.double(), targets.double(), config)
        gradients.append((loss, norm, [p.detach().clone() for p in model.parameters()]))
    (loss, norm, weights), (micro_loss, micro_norm, micro_weights) = gradients
    # the loss is taken in fp32 whatever the model computes in
    torch.testing.assert_close((micro_loss, micro_norm), (loss, norm), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(micro_weights, weights, rtol=1e-4, atol=1e-5)


def test_step_equals_plain_pytorch():
    """An independent step: cross-entropy, clipping and AdamW by torch's own functions."""
    config = TrainConfig(lr=3e-3, clip_norm=0.1, label_smoothing=0.1, weight_decay=0.2)
    images, labels = next(iter(train_batches(small_set(), config, 0)))
    mine, plain = small_model(drop_path=0), small_model(drop_path=0)
    loss, norm = train_step(state_of(mine, config), images, labels, config)
    expected = F.cross_entropy(plain(images), labels, label_smoothing=0.1)
    expected.backward()
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    rest = [p for p in plain.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    total = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.AdamW(groups, lr=3e-3, fused=False).step()
    torch.testing.assert_close((loss, norm), (expected.detach(), total))
    torch.testing.assert_close(list(mine.parameters()), list(plain.parameters()), rtol=1e-4, atol=1e-6)


def test_final_weights_are_the_average(tmp_path):
    config = small_config(ema=0.99)
    model = small_model()
    train(model, small_set(), None, config, tmp_path)
    checkpoint = read_tensors(tmp_path / "checkpoints" / "step-00000012.safetensors")[0]
    last = read_tensors(tmp_path / "last.safetensors")[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, checkpoint[f"ema.{name}"])
        assert torch.equal(tensor, last[name])
    assert not torch.equal(model.head.weight, checkpoint["model.head.weight"])


def test_best_weights_are_those_of_the_best_evaluation(tmp_path):
    val_set = small_set(24, seed=5)
    history = train(small_model(), small_set(), val_set, small_config(steps=30, eval_every=3), tmp_path)
    tensors, metadata = read_tensors(tmp_path / "best.safetensors")
    model = small_model()
    model.load_state_dict(tensors)
    assert evaluate(model, val_set).top1 == history.best["top1"]
    about = json.loads(metadata["about"])
    assert about["step"] == history.best["step"]
    assert about["val_top1"] == history.best["top1"]


def test_each_evaluation_is_reported(tmp_path):
    rows = []
    history = train(small_model(), small_set(), small_set(8), small_config(), tmp_path, on_eval=rows.append)
    assert rows == history.evals
    assert len(rows) == 3


def test_evaluation_counts_by_hand():
    model, dataset = small_model(), small_set(23, seed=2)
    logits = model.eval()(torch.stack([image for image, _ in dataset]))
    labels = torch.tensor([label for _, label in dataset])
    model.train()
    result = evaluate(model, dataset, batch_size=5)
    assert model.training
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert result.top1 == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert result.top5 == 1.0  # there are four classes
    assert result.count == 23
    for label in range(4):
        chosen = logits[labels == label].argmax(1)
        assert result.confusion[label].tolist() == [(chosen == other).sum() for other in range(4)]
        assert result.per_class[label] == pytest.approx((chosen == label).double().mean().item())


def test_metrics_on_known_answers():
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.8, 0.1, 0.3]])
    assert topk_hits(logits, torch.tensor([2, 0]), 1).tolist() == [False, True]
    assert topk_hits(logits, torch.tensor([2, 1]), 2).tolist() == [True, False]
    assert confusion_matrix(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0]), 2).tolist() == [[1, 1], [0, 1]]


def test_the_callers_generators_are_left_alone(tmp_path):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    train(small_model(), small_set(), None, small_config(init="xavier"), tmp_path)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_seeds_differ_in_every_part():
    seeds = [derive_seed(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 1), (2**40, 3)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_decides_the_run(tmp_path):
    losses = []
    for number, seed in enumerate((0, 0, 1)):
        config = small_config(seed=seed)
        losses.append(train(small_model(), small_set(), None, config, tmp_path / str(number)).column("loss"))
    assert losses[0] == losses[1] != losses[2]


def test_an_infinite_loss_stops_the_run_with_its_step(tmp_path):
    class Exploding(type(small_model())):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (math.inf if self.calls == 4 else 1)

    config = small_config(micro_batch=None, log_every=1)
    with pytest.raises(TrainingDiverged, match=r"loss is nan at step 4 .*smaller lr"):
        train(Exploding(), small_set(), None, config, tmp_path)
    assert [path.stem for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_recipe_fits_model_and_data():
    narrow = recipe(create_model("swin_micro_fmnist"), small_set(img_size=32))
    assert (narrow.init, narrow.lr, narrow.epochs) == ("xavier", 2e-3, 200)  # one step an epoch
    assert narrow.eval_every == narrow.save_every == 5
    wide = create_model("swin_micro_fmnist", embed_dim=96, num_heads=(3, 6))
    assert recipe(wide, small_set(img_size=32)).init == "default"
    tuned = recipe(wide, small_set(img_size=32), from_scratch=False, lr=None, epochs=3, batch_size=8)
    assert (tuned.lr, tuned.epochs, tuned.eval_every) == (5e-5, 3, 5)


def test_recipe_splits_large_images_only():
    model = create_model("swin_tiny_patch4_window7_224")
    large, small = (small_set(2, classes=2, img_size=size) for size in (224, 32))
    large, small = (rgb(dataset) for dataset in (large, small))
    micro = recipe(model, large, batch_size=64).micro_batch
    assert micro is not None
    assert micro & (micro - 1) == 0  # a power of two
    assert recipe(model, small, batch_size=64).micro_batch is None


def rgb(dataset):
    return ImageArrays(
        dataset.images, dataset.labels, dataset.classes, mean=(0.3,) * 3, std=(0.3,) * 3,
        img_size=dataset.img_size, in_chans=3,
    )  # fmt: skip


def test_fewer_images_than_a_batch(tmp_path):
    history = train(small_model(), small_set(3), None, small_config(steps=4, batch_size=64), tmp_path)
    assert history.column("epoch") == [0, 1, 2, 3]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*file.*choose another folder"):
        train(small_model(), small_set(), None, small_config(), tmp_path / "file" / "run")


def test_augmentation_by_name_or_fields():
    assert parse_augment("light").flip == 0.5
    assert parse_augment("shift=3, flip=0.25").shift == 3
    assert parse_augment("crop_area=0.5:1,rand_augment=rand-m9") == Augment(
        crop_area=(0.5, 1), rand_augment="rand-m9"
    )
    with pytest.raises(ValueError, match=r"twist"):
        parse_augment("twist=1")
    with pytest.raises(ValueError, match=r"augment='heavy'"):
        parse_augment("heavy")


def test_no_bar_where_there_is_no_terminal(tmp_path, capfd):
    train(small_model(), small_set(), None, small_config(), tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": "shift=8"}, "shift=8 moves the whole image out.*8 px"),
        ({"augment": "crop_area=0.5:1"}, "crop_area works on image folders"),
        ({"augment": "rand_augment=rand-m9"}, "rand_augment works on image folders"),
        ({"warmup": 12}, "warmup is 12 steps, but the run has 12"),
        ({"warmup": 50, "steps": None, "epochs": 2}, "warmup is 50 steps, but the run has 8"),
    ],
)
def test_what_does_not_fit_the_data_is_an_error_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(small_model(), small_set(), None, small_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
