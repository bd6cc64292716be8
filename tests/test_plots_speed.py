"""Figures of speed and of number formats: that they draw what they are given, in its units."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

matplotlib = pytest.importorskip("matplotlib", reason='figures need `pip install "swin-lessons[plots]"`')
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from swin_lessons.plots import bars, precision, roofline  # noqa: E402


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def heights(figure: plt.Figure, axes: int = 0) -> list[list[float]]:
    """The y values of each line."""
    return [list(line.get_ydata()) for line in figure.axes[axes].lines]


def test_samples_are_milliseconds_and_the_line_is_the_later_median() -> None:
    line, points = heights(roofline.show_samples({"step": [9.0, 1.0, 2.0, 3.0]}))
    assert points == [9000, 1000, 2000, 3000]
    assert line == [2500, 2500]


def test_a_roof_is_a_slope_and_then_flat() -> None:
    figure = roofline.show_roofline(1e9, {"fp32": 1e10}, {"MLP": (2.0, 1e9)})
    roof, point = heights(figure)
    assert max(roof) == pytest.approx(10)
    assert roof[0] == pytest.approx(0.05)
    assert point == [1.0]


def test_bars_stand_in_the_order_of_their_names_from_the_top() -> None:
    figure = bars.show_bars(["a", "b"], {"predicted": [1, 2], "measured": [3, 4]}, "ms")
    assert [patch.get_width() for patch in figure.axes[0].patches] == [1, 2, 3, 4]
    assert figure.axes[0].yaxis_inverted()


def test_batches_show_curves_and_points_in_milliseconds() -> None:
    figure = roofline.show_batches({"roof": {1: 0.001, 8: 0.002}}, {"measured": {8: 0.005}})
    assert heights(figure) == [[1, 2], [5]]


def test_memory_has_a_panel_for_each_batch() -> None:
    figure = roofline.show_memory({"1 image": {"plain": [2e6, 3e6]}, "8 images": {"plain": [5e6]}})
    assert [heights(figure, i) for i in (0, 1)] == [[[2, 3]], [[5]]]


def test_bits_are_counted() -> None:
    ax = precision.show_bits({"bf16": (8, 7)}).axes[0]
    assert len(ax.patches) == 16
    letters = [text.get_text() for text in ax.texts]
    assert [letters.count(letter) for letter in "sem"] == [1, 8, 7]


def test_every_exponent_falls_into_a_bar() -> None:
    figure = precision.show_exponents({"scale 1": [-30.0, -2.5, -2.4, 20.0]}, -25, -14, 16)
    bars = [p for p in figure.axes[0].patches if p.get_width() == 1]
    assert sum(bar.get_height() for bar in bars) == 4


def test_a_cross_marks_each_skipped_step() -> None:
    _, _, crosses = heights(precision.show_scale([4, 8, 4], [1], [6, 6, 6]))
    assert crosses == [8]


def test_later_curves_are_thinner_so_that_all_are_seen() -> None:
    figure = precision.show_curves({"fp32": [2, 1], "bf16": [2, 1], "fp16": [2, 1]}, "step", "loss")
    widths = [line.get_linewidth() for line in figure.axes[0].lines]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3


def test_errors_have_a_panel_for_each_kind_of_factors() -> None:
    figure = precision.show_errors([2, 4], {"random": {"TF32": [0.1, 0.2]}, "positive": {"TF32": [0.3, 0.1]}})
    assert [heights(figure, i) for i in (0, 1)] == [[[0.1, 0.2]], [[0.3, 0.1]]]
