"""Lesson 13's processes: four ways to train on two, against one."""

import json
import subprocess
import sys

import pytest
import torch

from swin_lessons.training import by_hand
from swin_lessons.training.shards import read_shards


def test_two_processes_train_as_one(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "swin_lessons.training.by_hand", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    one = by_hand.small_swin()
    losses = by_hand.fit(one)
    assert losses[-1] < losses[0]
    for found in report.values():
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
    params = sum(p.numel() for p in one.parameters())
    assert report["DDP, 1 pass"]["bytes"] == report["DDP, 2 passes"]["bytes"] == 4 * params
    assert report["FSDP2"]["kept"] == pytest.approx(
        2 * params, rel=0.05
    )  # half of 4 bytes; small ones are uneven
    weights, _ = read_shards(tmp_path / "shards", lambda name, whole: torch.empty_like(whole, device="cpu"))
    for name, value in one.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-4)


def test_one_process_needs_no_launcher(tmp_path):
    by_hand.main(tmp_path)
    assert set(json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))) == {"one"}
