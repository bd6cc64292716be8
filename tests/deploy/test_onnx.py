"""ONNX files against PyTorch."""

import pytest
import torch

from swin_lessons.deploy import export_onnx
from swin_lessons.deploy import onnx as exporting
from swin_lessons.models import create_model
from swin_lessons.models.attention_maps import attention_maps

runtime = pytest.importorskip("onnxruntime", reason='needs `pip install "swin-lessons[deploy]"`')
pytest.importorskip("onnxscript")


def random_model(name: str, **options):
    torch.manual_seed(0)
    model = create_model(name, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    return model.eval()


def run(path, x):
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return names, [torch.from_numpy(a) for a in session.run(None, {"images": x.numpy()})]


@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_logits_and_attention_of_any_batch(name, tmp_path):
    model = random_model(name).train()
    path = export_onnx(model, tmp_path / "model.onnx", input_size=(1, 32, 32), attention=True)
    assert all(m.training for m in model.modules())
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    model.eval()
    for batch in (1, 3):
        x = torch.randn(batch, 1, 32, 32)
        names, (logits, *maps) = run(path, x)
        assert names == ["logits", "attention_1", "attention_2", "attention_3", "attention_4"]
        with torch.no_grad():
            torch.testing.assert_close(logits, model(x), rtol=1e-4, atol=1e-4)
        for found, expected in zip(maps, attention_maps(model, x), strict=True):
            torch.testing.assert_close(found, expected.weights, rtol=1e-4, atol=1e-5)


def test_logits_alone(tmp_path):
    model = random_model("deit_micro_fmnist")
    path = export_onnx(model, tmp_path / "model.onnx", input_size=(1, 32, 32))
    x = torch.randn(2, 1, 32, 32)
    names, (logits,) = run(path, x)
    assert names == ["logits"]
    with torch.no_grad():
        torch.testing.assert_close(logits, model(x), rtol=1e-4, atol=1e-4)


def test_a_file_tells_nothing_of_the_machine(tmp_path):
    path = export_onnx(random_model("swin_micro_fmnist"), tmp_path / "model.onnx", input_size=(1, 32, 32))
    content = path.read_bytes()
    for word in (b"stack_trace", b".py", b"site-packages", str(tmp_path).encode()):
        assert word not in content


def test_bad_requests(tmp_path, monkeypatch):
    model = random_model("swin_micro_fmnist")
    with pytest.raises(ValueError, match=r"input_size=\(32, 32\).*channels, height, width"):
        export_onnx(model, tmp_path / "a.onnx", input_size=(32, 32))
    with pytest.raises(ValueError, match="takes 1 channels"):
        export_onnx(model, tmp_path / "a.onnx", input_size=(3, 32, 32))
    with pytest.raises(OSError, match=r"cannot write .*no/such/a\.onnx"):
        export_onnx(model, tmp_path / "no" / "such" / "a.onnx", input_size=(1, 32, 32))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ModuleNotFoundError, match=r"onnxscript is missing: .*\[deploy\]"):
        export_onnx(model, tmp_path / "a.onnx", input_size=(1, 32, 32))
