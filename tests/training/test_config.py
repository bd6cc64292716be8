import math

import pytest

from swin_lessons.training import TrainConfig, lr_at, warmup_steps


def test_json_round_trip(tmp_path):
    config = TrainConfig(steps=10, betas=(0.8, 0.95), clip_norm=None, augment="shift=1", micro_batch=8)
    config.save(tmp_path / "train.json")
    assert TrainConfig.load(tmp_path / "train.json") == config


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("epochs", 0, "above 0"), ("steps", 0, "at least 1"), ("batch_size", 2.5, "whole number"),
        ("lr", -1e-3, "above 0"), ("lr", math.nan, "above 0"), ("warmup", -1, "part of the run"),
        ("weight_decay", "much", "at least 0"), ("layer_decay", 1.5, "at most 1"), ("betas", (0.9, 1.0), "below 1"),
        ("clip_norm", 0, "None for no clipping"), ("ema", 1.0, "below 1"), ("label_smoothing", 1, "below 1"),
        ("precision", "fp8", "fp32, tf32, bf16, fp16"), ("init", "he", "default, xavier"), ("seed", -1, "at least 0"),
        ("seed", 2**63, "below 2**63"),
        ("keep", 0, "at least 1"), ("batch_size", True, "whole number"), ("save_every", 0, "once an epoch"),
    ],
)  # fmt: skip
def test_bad_values_are_named_with_the_remedy(field, value, remedy):
    with pytest.raises(ValueError, match=rf"TrainConfig.{field} is ") as error:
        TrainConfig(**{field: value})
    assert remedy in str(error.value)
    assert repr(value) in str(error.value)


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match=r"micro_batch is 128, above batch_size 64"):
        TrainConfig(batch_size=64, micro_batch=128)
    with pytest.raises(ValueError, match=r"min_lr is 0.1, above lr"):
        TrainConfig(lr=0.01, min_lr=0.1)


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match=r"no field learning_rate: choose among .*lr"):
        TrainConfig.from_dict({"learning_rate": 1})


def test_differences_leave_bookkeeping_out():
    one, other = TrainConfig(lr=0.1, keep=1), TrainConfig(lr=0.2, keep=5)
    assert one.differences(other) == ["lr: 0.1, 0.2"]


def test_length_in_epochs_or_steps():
    assert TrainConfig(epochs=1.5).total_steps(10) == 15
    assert TrainConfig(epochs=0.01).total_steps(10) == 1
    assert TrainConfig(epochs=3, steps=7).total_steps(10) == 7


def test_schedule_by_hand():
    config = TrainConfig(lr=1.0, min_lr=0.2, warmup=4)
    assert [lr_at(step, 12, config) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert lr_at(4, 12, config) == 1.0
    assert lr_at(8, 12, config) == pytest.approx(0.6)  # half of the cosine: the mean of both ends
    assert lr_at(11, 12, config) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi * 7 / 8)))


def test_warmup_as_part_or_steps():
    assert warmup_steps(TrainConfig(warmup=0.15), 100) == 15
    assert warmup_steps(TrainConfig(warmup=30), 100) == 30
    assert warmup_steps(TrainConfig(warmup=30), 10) == 9
    assert lr_at(0, 1, TrainConfig(lr=0.5, warmup=0.9)) == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heavy", r"'heavy'; write none, light"), ("shiftt=1", r"no 'shiftt=1'.* shift, crop_area"),
        ("shift=1.5", r"shift=1\.5: give a whole number"), ("shift", "shift=: give a whole number"),
        ("flip=x", "flip=x: give a probability"), ("flip=0.5=3", "flip=0.5=3: give a probability"),
        ("flip=true", "flip=True: give a probability"), ("mixup=NaN", "mixup=nan: give a number"),
        ("crop_area=1", "crop_area=1: give two parts"), ("erase_area=0.1:0.2:0.3", "give two parts"),
        ("crop_area=a:b", "give two parts"), ("rand_augment=7", "rand_augment=7: give timm's words"),
    ],
)  # fmt: skip
def test_a_wrong_augmentation_is_named_with_what_there_is(text, message):
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(augment=text)
    assert f"{text!r}" in str(error.value)
