"""ONNX files in ONNX Runtime and OpenVINO, and the choice among engines."""

import pytest
import torch
from swin_cases import assert_near, images, swin

from swin_lessons.deploy import engines, export_onnx, prepare
from swin_lessons.deploy.engines import available, fastest, load
from swin_lessons.quantization import QuantConfig, convert, ptq

onnx = pytest.importorskip("onnx", reason='needs `pip install "swin-lessons[deploy]"`')
NAMES = ["onnxruntime", "openvino"]


@pytest.fixture(scope="module", params=[1, 2], ids=["V1", "V2"])
def model(request):
    return swin(request.param, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return export_onnx(model, tmp_path_factory.mktemp("onnx") / "model.onnx", input_size=(3, 32, 32))


def batch(B, seed=1):
    return images(B, 3, 32, 32, dtype=torch.float32, seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_any_batch(name, model, path):
    pytest.importorskip(name)
    engine = load(path, name, threads=1)
    for B in (1, 5, 2, 3, 4, 1):  # more batch sizes than are kept
        with torch.no_grad():
            assert_near(engine(batch(B)), model(batch(B)), 1e-4)
    assert_near(engine(batch(2).double().requires_grad_()), engine(batch(2)), 1e-6)
    assert_near(engine(batch(2).numpy()), engine(batch(2)), 1e-6)


def test_bf16_in_openvino(model, path):
    pytest.importorskip("openvino")
    with torch.no_grad():
        assert_near(load(path, "openvino", precision="bf16", threads=1)(batch(4)), model(batch(4)), 0.05)


QUANTISED = {  # version, preset, changes
    "linear V1": (1, "linear", {}),
    "mode2 V2": (2, "mode2", {}),
    "w8a16 V1": (1, "w8a16", {}),
    "all V2": (2, "all", {"symmetric_activations": False}),
}


@pytest.fixture(scope="module", params=QUANTISED)
def quantised(request, tmp_path_factory):
    version, preset, changes = QUANTISED[request.param]
    model = swin(version, dtype=torch.float32).eval()
    converted = convert(ptq(model, [batch(16)], QuantConfig.preset(preset, **changes), progress=False))
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    return converted, export_onnx(converted, path, input_size=(3, 32, 32))


@pytest.mark.parametrize("name", NAMES)
def test_integers(name, quantised):
    pytest.importorskip(name)
    converted, path = quantised
    with torch.no_grad():
        # an engine may sum in another order: a number between two codes then goes to the other one
        assert_near(load(path, name, threads=1)(batch(3)), converted(batch(3)), 0.05)


def test_the_file_holds_integers(quantised):
    converted, int8 = quantised
    weights = [layer for layer in converted.modules() if hasattr(layer, "weight_bits")]
    graph = onnx.load(int8).graph
    stored = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) > 1]
    assert sum(torch.Size(t.dims).numel() for t in stored) == sum(layer.weight.numel() for layer in weights)
    floats = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    largest = max(layer.weight.numel() for layer in weights)
    assert max(torch.Size(t.dims).numel() for t in floats) < largest  # no weight is there as floats, too


def test_quantised_models_that_cannot_be_exported(tmp_path):
    model = swin(dtype=torch.float32).eval()
    for preset, message in (("dynamic", "has no fixed 8-bit scale"), ("w4a8", "has 4-bit weights")):
        converted = convert(ptq(model, [batch(2)], QuantConfig.preset(preset), progress=False))
        with pytest.raises(ValueError, match=message):
            export_onnx(converted, tmp_path / "model.onnx", input_size=(3, 32, 32))
    with pytest.raises(ValueError, match=r"call quantization\.convert\(model\) first"):
        export_onnx(ptq(model, [batch(2)], progress=False), tmp_path / "model.onnx", input_size=(3, 32, 32))
    assert not list(tmp_path.iterdir())


def test_bad_requests(path, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    with pytest.raises(ValueError, match="engine='tflite': choose 'onnxruntime' or 'openvino'"):
        load(path, "tflite")
    with pytest.raises(ValueError, match="precision='bf16': onnxruntime runs a model in fp32"):
        load(path, precision="bf16")
    with pytest.raises(ValueError, match="threads=0: give at least 1"):
        load(path, threads=0)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*missing\.onnx"):
        load(tmp_path / "missing.onnx")
    (tmp_path / "broken.onnx").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"broken\.onnx: onnxruntime cannot load it"):
        load(tmp_path / "broken.onnx")
    engine = load(path)
    with pytest.raises(ValueError, match=r"expected images \(B, C, H, W\)"):
        engine(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match=r"onnxruntime refuses images \(1, 3, 40, 40\)"):
        engine(torch.zeros(1, 3, 40, 40))
    monkeypatch.setitem(
        engines.ENGINES, "onnxruntime", type("Gone", (engines.OnnxRuntime,), {"package": "gone"})
    )
    assert "onnxruntime" not in available()
    with pytest.raises(ModuleNotFoundError, match=r'gone is missing: pip install "swin-lessons\[deploy\]"'):
        load(path)


def test_the_fastest_that_keeps_the_outputs(model, path):
    pytest.importorskip("onnxruntime")
    x = batch(2)
    with torch.no_grad():
        reference = model(x)
    wrong = {"noise": lambda x: torch.full_like(reference, float("nan")), "off": lambda x: reference * 2}
    choice = fastest({"prepared": prepare(model), "file": load(path), **wrong}, x, reference, tolerance=1e-3)
    assert choice.name in ("prepared", "file")
    assert_near(choice.run(x), reference, 1e-3)
    assert set(choice.seconds) == {"prepared", "file"}
    assert choice.refused == ("noise", "off")
    assert choice.errors["noise"] == float("inf")
    assert choice.errors["off"] == 1.0
    assert "off: error 1.0e+00, too large" in str(choice)
    with pytest.raises(ValueError, match=r"no candidate is within tolerance=0\.001"):
        fastest(wrong, x, reference, tolerance=1e-3)
    with pytest.raises(ValueError, match="no candidates"):
        fastest({}, x, reference)
    with pytest.raises(ValueError, match="do not compare"):
        fastest({"wrong": lambda x: x}, x, reference)


def test_every_engine_of_a_file(path):
    found = engines.candidates(path)
    assert set(found) == {
        f"{name} {precision}" for name in available() for precision in engines.ENGINES[name].precisions
    }
