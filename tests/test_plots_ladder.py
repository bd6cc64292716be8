"""Figures of the training ladder."""

import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from swin_lessons.plots.bars import show_bars  # noqa: E402
from swin_lessons.plots.ladder import show_batches  # noqa: E402


def test_bars_have_a_label_each_and_gaps_have_none():
    figure = show_bars(["low", "high"], {"ours": [1.0, 2.5], "theirs": [None, 2.0]}, "times as fast")
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["1.00", "2.50", "", "2.00"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["low", "high"]
    assert ax.yaxis_inverted()  # the first name stands on top
    plt.close(figure)


def test_batches_are_on_logarithmic_axes():
    figure = show_batches([8, 16], {"a": [100.0, 200.0], "b": [150.0, 160.0]}, "images a second")
    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in ax.lines] == ["a", "b"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "16"]
    plt.close(figure)
