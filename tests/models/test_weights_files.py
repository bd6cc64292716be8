"""Weight files: read without running code, written in one step, refused with a remedy."""

import argparse
import io
import os
import pickle
import socket
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from weights_small import images, official, swin

from swin_lessons.models.checkpoints.files import read_file
from swin_lessons.models.checkpoints.hub import fetch_pretrained, hub_repo
from swin_lessons.models.config import SwinConfig
from swin_lessons.models.swin import SwinTransformer
from swin_lessons.models.vit import VisionTransformer, ViTConfig
from swin_lessons.models.weights import WeightsError, load_weights, save_weights


class CreatesFile:
    """A pickle that would create a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


# --- round trips ---


def configs():
    """Small Swins of many shapes."""
    return st.builds(
        SwinConfig,
        version=st.sampled_from([1, 2]),
        img_size=st.sampled_from([(16, 16), (24, 16), (20, 28)]),
        in_chans=st.integers(1, 4),
        num_classes=st.integers(0, 5),
        embed_dim=st.sampled_from([8, 16]),
        depths=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
        num_heads=st.just((2, 4)),
        window_size=st.sampled_from([(4, 4), (2, 3), (3, 2), (7, 7)]),
        pretrained_window_sizes=st.sampled_from([(0, 0), (4, 2)]),
        qkv_bias=st.booleans(),
        absolute_pos_embed=st.booleans(),
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=configs(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
    pickled=st.booleans(),
)
def test_saving_and_loading_gives_the_same_weights(tmp_path, config, dtype, pickled):
    first, second = SwinTransformer(config).to(dtype), SwinTransformer(config).to(dtype)
    if pickled:
        path = tmp_path / "weights.pth"
        torch.save({"model": first.state_dict(), "epoch": 3}, path)
    else:
        path = tmp_path / "weights.safetensors"
        save_weights(first, path)
    report = load_weights(second, path)
    assert not (report.skipped)
    assert not (report.resized)
    assert not (report.missing)
    assert not (report.unexpected)
    assert not (report.notes)
    assert set(report.loaded) == set(first.state_dict())
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_deit_round_trip(tmp_path):
    config = ViTConfig(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, distilled=True)
    first, second = VisionTransformer(config).eval(), VisionTransformer(config).eval()
    save_weights(first, tmp_path / "new" / "weights.safetensors")  # the folder is made
    load_weights(second, tmp_path / "new" / "weights.safetensors")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(first(x), second(x))


def test_saved_file_holds_metadata(tmp_path):
    save_weights(
        swin(2), tmp_path / "w.safetensors", {"command": "train", "accuracy": 0.5, "classes": ["a", "b"]}
    )
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["command"] == "train"
    assert metadata["accuracy"] == "0.5"
    assert metadata["classes"] == '["a", "b"]'
    assert metadata["window_sizes"] == metadata["reference_windows"] == "[[4, 4], [4, 4]]"


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_weights(swin(), path)
    before = path.read_bytes()

    def disk_full(tensors, filename, metadata):
        Path(filename).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swin_lessons.models.checkpoints.files.save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_weights(swin(seed=1), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_weights_are_saved_as_safetensors_only(tmp_path):
    with pytest.raises(
        ValueError, match=r"w\.pth: weights are saved as safetensors; name the file w\.safetensors"
    ):
        save_weights(swin(), tmp_path / "w.pth")


# --- pickles ---


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["beside", "inside", "alone"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, zipped, place):
    trap = CreatesFile(tmp_path / "pwned")
    state = swin().state_dict()
    content = {
        "beside": {"model": state, "x": trap},
        "inside": {"model": state | {"x": trap}},
        "alone": trap,
    }[place]
    path = tmp_path / "weights.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"weights\.pth holds code .*mkdir.* not run.*safetensors"):
        load_weights(swin(), path)
    assert not trap.path.exists()
    torch.load(path, weights_only=False)  # the trap is real: it does spring when unpickled in earnest
    assert trap.path.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_plain_pickle_with_code_is_refused(tmp_path):
    trap = CreatesFile(tmp_path / "pwned")
    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"model": trap}))
    with pytest.raises(ValueError, match=r"weights\.pt"):
        load_weights(swin(), tmp_path / "weights.pt")
    assert not trap.path.exists()


def test_a_whole_pickled_model_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"holds code \(torch\.nn\.modules\.linear\.Linear\).*state_dict"):
        load_weights(swin(), tmp_path / "model.pth")


def test_training_settings_are_read_as_data(tmp_path, monkeypatch):
    """As in official files (a yacs config) and timm's (an argparse.Namespace), without yacs."""
    yacs, config = types.ModuleType("yacs"), types.ModuleType("yacs.config")

    class CfgNode(dict):
        pass

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    config.CfgNode = CfgNode
    monkeypatch.setitem(sys.modules, "yacs", yacs)
    monkeypatch.setitem(sys.modules, "yacs.config", config)
    node = CfgNode(MODEL=CfgNode(TYPE="swin"))
    node.frozen = True
    theirs = swin(seed=5)
    content = {"model": official(theirs), "config": node, "args": argparse.Namespace(lr=1e-3), "epoch": 3}
    torch.save(content, tmp_path / "weights.pth")
    monkeypatch.undo()
    assert "yacs" not in sys.modules
    ours = swin()
    load_weights(ours, tmp_path / "weights.pth")
    torch.testing.assert_close(ours(images()), theirs(images()))


@pytest.mark.parametrize("suffix", ["pth", "pt", "bin", "ckpt"])
def test_pickle_suffixes(tmp_path, suffix):
    theirs, ours = swin(seed=5), swin()
    torch.save(theirs.state_dict(), tmp_path / f"w.{suffix}")
    load_weights(ours, str(tmp_path / f"w.{suffix}"))
    assert torch.equal(ours.norm.weight, theirs.norm.weight)


# --- damaged and missing files ---


def half_of(content, tmp_path) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()[: buffer.tell() // 2]


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("damage", ["empty", "text", "half", "zeros"])
def test_damaged_files(tmp_path, suffix, damage):
    path = tmp_path / f"w.{suffix}"
    save_weights(swin(), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    half = whole[: len(whole) // 2] if suffix == "safetensors" else half_of(swin().state_dict(), tmp_path)
    page = b"<html>404: not found</html>"
    path.write_bytes({"empty": b"", "text": page, "half": half, "zeros": bytes(1000)}[damage])
    with pytest.raises(ValueError, match=rf"w\.{suffix} is no readable .* file .*fetch it again"):
        load_weights(swin(), path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), suffix=st.sampled_from(["pth", "safetensors"]))
def test_any_bytes_give_the_same_error(tmp_path, content, suffix):
    (tmp_path / f"w.{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"w\.{suffix} "):
        read_file(tmp_path / f"w.{suffix}")


def test_a_torchscript_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps(()))
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    with pytest.raises(ValueError, match=r"w\.pt"):
        load_weights(swin(), tmp_path / "w.pt")


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no weights at .*nowhere\.pth: check the path"):
        load_weights(swin(), tmp_path / "nowhere.pth")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors or .*pytorch_model\.bin"):
        load_weights(swin(), tmp_path)


def test_unknown_kinds(tmp_path):
    (tmp_path / "w.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"unknown kind '\.npz'; weights come as \.safetensors, \.pth"):
        load_weights(swin(), tmp_path / "w.npz")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        load_weights(swin(), tmp_path / "list.pth")


def test_a_refusal_names_the_file(tmp_path):
    save_weights(swin(2), tmp_path / "v2.safetensors")
    with pytest.raises(WeightsError, match=r"v2\.safetensors \(timm layout\) does not fit SwinTransformer"):
        load_weights(swin(1), tmp_path / "v2.safetensors")


# --- published weights ---


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network: any try fails the test. The hub's client is told so, and its cache is empty."""
    from huggingface_hub import constants

    def blocked(*args, **kwargs):
        raise AssertionError("a test asked for the network")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, blocked)
    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_offline_says_so_and_names_the_way_out(offline):
    message = r"(?s)cannot fetch the weights of 'swin_tiny_.*' \(timm/swin_.*\).*load_weights\(model, path\)"
    with pytest.raises(ConnectionError, match=message):
        fetch_pretrained("swin_tiny_patch4_window7_224")


def test_cached_weights_need_no_network(offline):
    repo = "timm/swin_tiny_patch4_window7_224.ms_in1k"
    folder = offline / f"models--{repo.replace('/', '--')}"
    file = folder / "snapshots" / "abc" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert fetch_pretrained("swin_tiny_patch4_window7_224") == file


@pytest.mark.parametrize(
    "name", ["swinv2_huge_window12_192", "swinv2_giant_window12_192", "nonsense", "resnet50.no"]
)
def test_no_published_weights(offline, name):
    with pytest.raises(ValueError, match=f"no published weights for '{name}'.*pass a file"):
        fetch_pretrained(name)


def test_repositories_are_timms():
    pytest.importorskip("timm")
    assert hub_repo("deit_tiny_patch16_224") == "timm/deit_tiny_patch16_224.fb_in1k"
    assert hub_repo("swin_base_patch4_window7_224.ms_in1k") == "timm/swin_base_patch4_window7_224.ms_in1k"


def test_without_timm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.models", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "swin-lessons\[vision\]"'):
        fetch_pretrained("swin_tiny_patch4_window7_224")
