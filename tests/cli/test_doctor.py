import json

import pytest

from swin_lessons.cli import doctor, main


def test_json_says_what_the_text_says(capsys):
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    main(["doctor"])
    text = capsys.readouterr().out
    assert status in (0, 1)
    assert report["profile"] in text
    for finding in report["findings"]:
        assert finding["value"] in text
        assert finding["meaning"] in text


@pytest.mark.parametrize(
    ("capability", "has", "lacks"),
    [(7.0, "too old", "bf16,"), (7.5, "fp16 and INT8", "bf16, INT8"), (8.0, "2:4", "FP8 and"),
     (8.6, "INT4", "FP8 and"), (8.9, "FP8", "too old"), (9.0, "FP8", "too old")],
)  # fmt: skip
def test_what_a_gpu_means(capability, has, lacks):
    assert has in doctor.gpu_meaning(capability)
    assert lacks not in doctor.gpu_meaning(capability)


def test_a_missing_extra_names_its_installation(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert all(finding.ok is None for finding in doctor.extras())
    assert 'pip install "swin-lessons[plots]"' in doctor.extras()[1].meaning


def test_old_pytorch_and_little_memory_need_the_user():
    machine = {"versions": {"python": "3.11", "torch": "2.9.1+cpu"}}
    assert doctor.software(machine)[1].ok is False
    assert "2.11 or newer" in doctor.software(machine)[1].meaning
    found = {"cpu": "x", "cores": 1, "threads": 1, "cpu_features": [], "memory_gib": 2.0, "gpu": None}
    by_name = {finding.name: finding for finding in doctor.hardware(found)}
    assert by_name["Memory"].ok is False
    assert by_name["bf16"].ok is by_name["int8"].ok is None
    assert "fp32" in by_name["bf16"].meaning


def test_fashion_mnist_is_found_where_the_user_says(tmp_path, monkeypatch):
    from swin_lessons.data import fashion_mnist

    monkeypatch.setattr(fashion_mnist, "search_folders", lambda root: [tmp_path])
    assert doctor._fashion_mnist(None).ok is None
    for name in fashion_mnist.SHA256:
        (tmp_path / f"{name}.gz").write_bytes(b"")
    assert doctor._fashion_mnist(None).value == str(tmp_path)
