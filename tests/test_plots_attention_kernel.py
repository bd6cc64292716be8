"""Figures of lesson 12: that they draw what they are given."""

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason='figures need `pip install "swin-lessons[plots]"`')
matplotlib.use("Agg")

from swin_lessons.plots.attention_kernel import show_roof, show_sides, show_tile, show_traffic  # noqa: E402


def test_traffic_has_a_bar_for_each_operation_and_one_for_all() -> None:
    (ax,) = show_traffic(["cut", "softmax"], [10.0, 30.0], [False, True], 12.0).axes
    assert sorted(patch.get_width() for patch in ax.patches) == [10, 12, 30]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cut", "softmax", "all in one"]
    assert len({patch.get_hatch() or "" for patch in ax.patches}) == 2, "colour is not the only sign"


def test_points_stand_on_the_roof() -> None:
    (ax,) = show_roof({"a": {"low": 10.0, "high": 500.0}}, 1e12, 100e12, "a machine").axes
    assert ax.lines[-1].get_ydata().tolist() == [10.0, 100.0]


def test_sides_are_written_into_their_cells() -> None:
    (ax,) = show_sides(np.array([[0, 1], [2, 3]]), (1, 2)).axes
    assert [text.get_text() for text in ax.texts] == ["00", "01", "10", "11"]


def test_a_tile_is_covered_by_its_parts() -> None:
    (ax,) = show_tile(49, 64).axes
    *parts, instruction = ax.patches
    assert sum(part.get_width() * part.get_height() for part in parts) == 64 * 64
    assert (instruction.get_x(), instruction.get_width()) == (56, 8)
