"""machine_info: complete, serialisable, and nobody's private business."""

import getpass
import json
import os
import socket
from datetime import datetime
from pathlib import Path

import torch

from swin_lessons.profiling import cpu_features, machine_info
from swin_lessons.results import check_result


def test_provenance_is_json_and_complete():
    info = json.loads(json.dumps(machine_info()))
    hardware, versions = info["hardware"], info["versions"]
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert hardware["threads"] == torch.get_num_threads()
    assert hardware["cores"] == os.cpu_count()
    assert hardware["memory_gib"] > 0.5
    assert (hardware["gpu"] is None) == (not torch.cuda.is_available())
    assert datetime.fromisoformat(info["date"]).tzinfo is not None


def test_it_is_the_provenance_that_results_expect():
    check_result({"provenance": machine_info() | {"command": "swin-lessons bench"}})


def test_features_agree_with_pytorch():
    """PyTorch dispatches to AVX512 only where the processor has it."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert "AVX512" in cpu_features()
    assert cpu_features()


def test_nothing_private(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", f"{Path.home()}/secret/libtune.so:/opt/other.so")
    info = machine_info()
    assert info["hardware"]["tuning"]["LD_PRELOAD"] == "libtune.so other.so"
    text = json.dumps(info)
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in text
    assert f"/{getpass.getuser()}" not in text
