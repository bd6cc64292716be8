"""The roofline: what bounds which work, and a measurement that is kept for this machine alone."""

import json
import warnings

import pytest
import torch

from swin_lessons.profiling import Roofline, machine_info, measure_roofline, roof, roofline
from swin_lessons.profiling.roof import matrix_dtypes, roofline_file

ROOF = Roofline("cpu", 10e9, {"fp32": 100e9, "bf16": 400e9})


def test_bounds_by_hand():
    assert ROOF.ridge() == 10.0
    assert ROOF.ridge("bf16") == 40.0
    assert ROOF.bound(1e9, 1e9) == 0.1  # a byte takes as long as ten operations
    assert ROOF.bound(100e9, 1e9) == 1.0
    assert ROOF.bound(100e9, 1e9, "bf16") == 0.25
    assert ROOF.rate("fp16") == 100e9  # not among them: as fp32
    assert [ROOF.limit(flops, 1e9) for flops in (9e9, 11e9)] == ["memory", "compute"]
    assert ROOF.limit(11e9, 1e9, "bf16") == "memory"
    assert "10.0 GB/s copied, 100 GFLOP/s in fp32, 400 GFLOP/s in bf16; ridge at 10 FLOP" in ROOF.text()


@pytest.fixture
def measured(monkeypatch):
    """Each measurement is 1 GB/s faster than the one before, on a quiet machine."""
    calls = []
    info = machine_info()
    info["hardware"]["load"] = 0.0
    monkeypatch.setattr(roof, "machine_info", lambda: info)

    def measure(device):
        calls.append(device)
        return Roofline("cpu", 1e9 * len(calls), {"fp32": 2e9})

    monkeypatch.setattr(roof, "measure_roofline", measure)
    return calls


def test_it_is_measured_once(measured, tmp_path):
    first = roofline(folder=tmp_path)
    assert roofline(folder=tmp_path) == first
    assert len(measured) == 1
    kept = json.loads(roofline_file(folder=tmp_path).read_text())
    assert kept["roofline"] == {"device": "cpu", "bandwidth": 1e9, "rates": {"fp32": 2e9}}
    assert kept["provenance"]["hardware"]["cpu"]
    assert roofline(folder=tmp_path, remeasure=True).bandwidth == 2e9
    assert roofline(folder=tmp_path).bandwidth == 2e9
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # nothing half written


@pytest.mark.parametrize("damage", ["", "{", '{"roofline": 1}'])
def test_a_damaged_file_is_measured_again(damage, measured, tmp_path):
    roofline_file(folder=tmp_path).write_text(damage)
    assert roofline(folder=tmp_path).bandwidth == 1e9
    assert roofline(folder=tmp_path).bandwidth == 1e9


@pytest.mark.parametrize(
    ("group", "key", "value"), [("hardware", "threads", 99), ("versions", "torch", "9.9")]
)
def test_another_machine_has_another_file(group, key, value, monkeypatch, tmp_path):
    mine = roofline_file(folder=tmp_path)
    assert roofline_file(folder=tmp_path) == mine
    info = machine_info()
    info[group][key] = value
    monkeypatch.setattr(roof, "machine_info", lambda: info)
    assert roofline_file(folder=tmp_path) != mine


def test_the_cache_folder_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert roofline_file().parent == tmp_path / "swin_lessons" / "roofline"


def test_a_folder_that_cannot_be_written_only_costs_a_warning(measured, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the roofline cannot be kept in .*file"):
        assert roofline(folder=tmp_path / "file").bandwidth == 1e9


@pytest.mark.parametrize(("load", "notes"), [(99.0, 1), (0.5, 0), (None, 0)])
def test_a_busy_machine_is_told(load, notes, measured, monkeypatch, tmp_path):
    info = machine_info()
    info["hardware"] |= {"load": load, "cores": 2}
    monkeypatch.setattr(roof, "machine_info", lambda: info)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        roofline(folder=tmp_path)
        roofline(folder=tmp_path)  # kept: nothing to say
    assert ["other programs keep this machine busy" in str(w.message) for w in seen] == [True] * notes


def test_a_small_measurement(monkeypatch):
    """The real thing on small arrays: a rate is 2 n^3 over the best time, a bandwidth twice the array's bytes."""
    seconds = {"copy": 0.5, "product": 0.25}
    done = []

    def best(function, device):
        result = function()
        done.append(tuple(result.shape))
        return seconds["copy" if result.ndim == 1 else "product"]

    monkeypatch.setattr(roof, "_best", best)
    monkeypatch.setattr(roof, "SIDE", {"cpu": 32})
    monkeypatch.setattr(roof, "cache_bytes", lambda device: 0)
    found = measure_roofline()
    assert found.bandwidth == 2 * (64 << 20) / 0.5
    assert found.rates["fp32"] == 2 * 32**3 / 0.25
    assert done.count((32, 32)) == 2 * len(found.rates)


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [((6, 1), ["fp32"]), ((7, 5), ["fp32", "fp16"]), ((9, 0), ["fp32", "fp16", "bf16"])],
)
def test_what_a_gpu_multiplies(capability, dtypes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert matrix_dtypes(torch.device("cuda")) == dtypes
