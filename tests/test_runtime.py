import platform

import pytest
import torch

from swin_lessons.runtime import by_profile, keep_freed_memory, profile


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.delenv("SWIN_LESSONS_PROFILE", raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_found_by_the_machine(monkeypatch):
    assert profile() == "cpu"
    monkeypatch.setenv("CI", "true")
    assert profile() == "ci"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert profile() == "gpu"


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv("SWIN_LESSONS_PROFILE", "gpu")
    assert by_profile(ci=1, cpu=8, gpu=30) == 30


def test_unknown_profiles_are_refused(monkeypatch):
    monkeypatch.setenv("SWIN_LESSONS_PROFILE", "tpu")
    with pytest.raises(ValueError, match="'tpu': set it to one of ci, cpu, gpu"):
        profile()


def test_glibc_keeps_freed_memory():
    """Where the C library is glibc it says yes, elsewhere no; and allocation goes on."""
    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")
    assert torch.ones(10_000_000).sum() == 10_000_000
