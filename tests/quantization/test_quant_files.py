"""Quantised models in files: round trips, and files that are refused."""

import copy
import json

import pytest
import torch
from quant_cases import KINDS, batches, logits, model, numbers, quantised
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from swin_cases import swin
from torch import nn

from swin_lessons.models import save_weights
from swin_lessons.quantization import QuantConfig, convert, load, prepare_qat, ptq, quantizers, save, select


def other(kind: str) -> nn.Module:
    """A model of the same architecture with other values, some of which are no numbers."""
    fresh = copy.deepcopy(model(kind))
    with torch.no_grad():
        for p in fresh.parameters():
            p.fill_(float("nan"))
    return fresh


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["linear", "all", "dynamic", "w4a8"])
@pytest.mark.parametrize("integer", [False, True], ids=["fake", "integer"])
def test_round_trip(tmp_path, kind, preset, integer):
    """pytorch#33830: per-channel ranges were empty at load."""
    saved = quantised(kind, preset)
    saved = convert(saved) if integer else saved
    path = save(saved, tmp_path / "model.safetensors")
    again = load(other(kind), path)
    assert again.quantization == saved.quantization
    assert not again.training
    assert torch.equal(logits(again), logits(saved))
    assert torch.equal(logits(load(lambda: other(kind), path)), logits(saved))
    if not integer:
        assert torch.equal(logits(convert(again)), logits(saved))


def test_the_file_holds_integers_and_json(tmp_path):
    path = save(convert(quantised("v1", "w4a8")), tmp_path / "model.safetensors")
    tensors = load_file(path)
    assert tensors["layers.0.blocks.0.mlp.fc1.weight"].dtype == torch.uint8
    assert tensors["layers.0.blocks.0.mlp.fc1.weight"].shape == (96, 12)
    assert not any("observer" in name for name in tensors)
    with safe_open(path, "pt") as file:
        plan = json.loads(file.metadata()["quantization"])
    assert plan["integer"] is True
    assert plan["config"]["weight_bits"] == 4
    assert ["layers.0.blocks.0.mlp.fc1", "linear"] in plan["points"]
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_int8_file_is_about_a_quarter(tmp_path):
    net = swin(1, dtype=torch.float32, embed_dim=96, num_heads=(4, 4)).eval()
    save_weights(net, tmp_path / "float.safetensors")
    fake = ptq(net, batches(1), QuantConfig(activation_observer="minmax"))
    save(convert(fake), tmp_path / "int8.safetensors")
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("int8", "float")]
    assert sizes[0] < 0.29 * sizes[1]


def test_what_is_switched_off_is_not_in_the_file(tmp_path):
    fake = quantised("v1", "all")
    select(fake, [p for p in fake.quantization.points if p.kind in ("linear", "layer_norm")])
    for saved in (fake, convert(fake)):
        again = load(model("v1"), save(saved, tmp_path / "model.safetensors"))
        assert {kind for _, kind in again.quantization.points} == {"linear", "layer_norm"}
        assert torch.equal(logits(again), logits(saved))


def test_learned_scales_are_kept(tmp_path):
    trained = prepare_qat(model("v1"), QuantConfig(learnable_scale=True), batches=batches())
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if name.endswith("scale") and "quant" in name:
                p.mul_(1.1)
    again = load(model("v1"), save(trained, tmp_path / "model.safetensors"))
    assert torch.equal(logits(again), logits(trained.eval()))


# --- refusals


def test_a_float_checkpoint(tmp_path):
    """FasterTransformer#357: it was loaded, and the accuracy was 0.1 %."""
    save_weights(model("v1"), tmp_path / "float.safetensors")
    with pytest.raises(ValueError, match="is no quantised model: it has no scales"):
        load(model("v1"), tmp_path / "float.safetensors")


def test_saving_what_is_not_calibrated(tmp_path):
    with pytest.raises(RuntimeError, match=r"patch_embed\.proj\.input is not calibrated"):
        save(prepare_qat(model("v1")), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not quantised"):
        save(model("v1"), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_another_model(tmp_path):
    path = save(quantised("v1"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no layer layers\.0\.blocks\.0\.attn\.qkv"):
        load(model("vit"), path)
    with pytest.raises(ValueError, match=r"lacks layers\.0\.blocks\.0\.attn\.cpb_mlp.*another model"):
        load(model("v2"), path)
    with pytest.raises(ValueError, match=r"differs in head\.fc\.weight \(7, 48\), here \(9, 48\)"):
        load(swin(1, dtype=torch.float32, num_classes=9), path)
    replaced = copy.deepcopy(model("v1"))
    replaced.head.fc = nn.Identity()
    with pytest.raises(ValueError, match=r"head\.fc is a Identity, which has nothing of kind head"):
        load(replaced, path)


@pytest.mark.parametrize("integer", [False, True], ids=["fake", "integer"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"scale of head\.fc\.input_quant holds NaN or infinity"),
        (float("inf"), r"scale of head\.fc\.input_quant holds NaN or infinity"),
        (0.0, r"head\.fc\.input has a scale of 0"),
        (-1.0, r"head\.fc\.input has a scale of -1"),
        (None, r"lacks head\.fc\.input_quant\.scale"),
    ],
)
def test_bad_scales(tmp_path, integer, value, message):
    fake = quantised("v1")
    path = save(convert(fake) if integer else fake, tmp_path / "model.safetensors")
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if value is None:
        del tensors["head.fc.input_quant.scale"]
    else:
        tensors["head.fc.input_quant.scale"] = torch.tensor(value)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=message):
        load(model("v1"), path)


def test_weights_that_are_no_numbers(tmp_path):
    fake = quantised("v1")
    fake.norm.weight.data[0] = float("nan")
    path = save(fake, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="weight of norm holds NaN"):
        load(model("v1"), path)


def test_damaged_files(tmp_path):
    path = save(quantised("v1"), tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="is damaged"):
        load(model("v1"), path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(model("v1"), tmp_path / "none.safetensors")


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="cannot write"):
        save(quantised("v1"), tmp_path / "no folder" / "model.safetensors")


def test_training_checkpoints_keep_what_observers_saw():
    """A run that is resumed goes on from the same averages."""
    trained = prepare_qat(model("v1"))
    trained(batches(1)[0])
    again = prepare_qat(model("v1"))
    again.load_state_dict(trained.state_dict())
    for ours, theirs in zip(quantizers(again), quantizers(trained), strict=True):
        assert torch.equal(ours.scale, theirs.scale)
        assert torch.equal(ours.observer.low, theirs.observer.low)
    x = numbers(2, 3, 32, 32)
    assert torch.equal(again(x), trained(x))
