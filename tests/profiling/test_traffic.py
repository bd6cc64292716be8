"""Counting what operations move."""

import torch
import torch.nn.functional as F

from swin_lessons.profiling.traffic import Traffic


def counted(function) -> tuple[int, int]:
    with Traffic() as traffic:
        function()
    return traffic.launches, traffic.bytes


def test_reads_writes_and_views() -> None:
    x, y = torch.randn(100, 96), torch.randn(100, 96)
    assert counted(lambda: x + y) == (1, 3 * x.nbytes)
    assert counted(lambda: x * x) == (1, 2 * x.nbytes)  # one tensor, read once
    assert counted(lambda: x.add_(y)) == (1, 3 * x.nbytes)  # in place: read and written
    assert counted(lambda: x.view(-1).reshape(96, 100)) == (0, 0)
    assert counted(lambda: x.T.reshape(-1)) == (1, 2 * x.nbytes)  # a copy
    assert counted(lambda: x.sum().item()) == (1, x.nbytes + 4)
    statistics, parameters = 100 * 8, 2 * 96 * 4
    ones, zeros = torch.ones(96), torch.zeros(96)
    norm = counted(lambda: F.layer_norm(x, (96,), ones, zeros))
    assert norm == (1, 2 * x.nbytes + statistics + parameters)


def test_lists_of_tensors() -> None:
    xs, ys = ([torch.randn(50) for _ in range(3)] for _ in "xy")
    assert counted(lambda: torch._foreach_add_(xs, ys)) == (1, 3 * 3 * 200)
