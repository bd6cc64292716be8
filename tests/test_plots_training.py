"""Figures of training: that they draw what they are given."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason='figures need `pip install "swin-lessons[plots]"`')
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from swin_lessons.plots import training as plots  # noqa: E402
from swin_lessons.training import History  # noqa: E402


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def heights(figure: plt.Figure) -> list[list[float]]:
    """The y values of each line of the first axes."""
    return [list(line.get_ydata()) for line in figure.axes[0].lines]


@pytest.mark.parametrize("width", [1, 3, 10])
def test_smooth_is_the_mean_of_the_last_values(width: int) -> None:
    values = np.random.default_rng(0).normal(size=8).tolist()
    expected = [np.mean(values[max(0, i - width + 1) : i + 1]) for i in range(8)]
    np.testing.assert_allclose(plots.smooth(values, width), expected)


def test_a_mosaic_puts_every_image_at_its_place() -> None:
    images = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)  # 2 rows of 3 images of 4 x 5
    picture = plots.mosaic(images, gap=1)
    assert picture.shape == (2 * 6, 3 * 7)
    assert (picture[7:11, 15:20] == images[1, 2]).all()
    assert np.isnan(picture[0]).all()


def test_a_mosaic_of_colour_images_is_white_between_them() -> None:
    images = np.zeros((1, 2, 4, 4, 3), np.uint8)
    picture = plots.mosaic(images, gap=1)
    assert picture.shape == (6, 12, 3)
    assert picture.dtype == np.uint8
    assert (picture[0] == 255).all()
    assert (picture[1:5, 1:5] == 0).all()


def test_rows_have_their_names_beside_them() -> None:
    figure = plots.show_rows(np.zeros((3, 4, 8, 8)), ["a", "b", "c"])
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c"]
    assert ax.get_yticks() == pytest.approx([5.5, 17.5, 29.5])  # 8 px and a gap of 2 on both sides


def test_schedules_and_losses_are_drawn_as_given() -> None:
    assert heights(plots.show_schedules({"a": [0, 1, 0.5], "b": [1, 1, 1]})) == [[0, 1, 0.5], [1, 1, 1]]
    drawn = heights(plots.show_losses({"a": [2.0, 1.0], "b": [2.0, 2.0]}, width=2, chance=2.3))
    assert drawn == [[2.0, 1.0], [2.0, 1.5], [2.0, 2.0], [2.0, 2.0], [2.3, 2.3]]


def test_the_frames_of_a_rate_have_the_same_axes() -> None:
    limits = {plots.show_rate([2.3, top], [2.3, 1], 0.1, 2.3).axes[0].get_ylim() for top in (1.0, 4.0)}
    assert len(limits) == 1


def test_a_run_shows_loss_accuracy_and_gradient() -> None:
    steps = [{"step": i, "loss": 2.0, "grad_norm": 3.0} for i in (1, 2, 3)]
    history = History(steps, [{"step": 3, "loss": 1.5, "top1": 0.25}])
    left, middle, right = plots.show_run(history, clip_norm=1.0).axes
    assert left.lines[2].get_xydata().tolist() == [[3, 1.5]]
    assert middle.lines[0].get_xydata().tolist() == [[3, 25.0]]
    assert right.lines[0].get_ydata().tolist() == [3, 3, 3]
    assert right.lines[2].get_ydata()[0] == 1.0


def test_a_confusion_shows_counts_and_colours_shares_of_rows() -> None:
    counts = np.array([[8, 2], [0, 40]])
    (ax,) = plots.show_confusion(counts, ["cat", "dog"]).axes
    assert {text.get_position(): text.get_text() for text in ax.texts} == {
        (0, 0): "8",
        (1, 0): "2",
        (1, 1): "40",
    }
    shares = ax.images[0].get_array()
    assert shares.filled(0).tolist() == [[0.8, 0.2], [0, 1]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("answer", "truth")


def test_a_class_without_images_has_no_colour() -> None:
    (ax,) = plots.show_confusion(np.array([[3, 1], [0, 0]]), ["cat", "dog"]).axes
    assert ax.images[0].get_array().filled(0).tolist() == [[0.75, 0.25], [0, 0]]


def test_class_accuracies_are_bars_in_percent() -> None:
    (ax,) = plots.show_class_accuracy({"a": [0.5, 1.0], "b": [0.25, 0.75]}, ["cat", "dog"]).axes
    assert [bar.get_width() for bar in ax.patches] == [50, 100, 25, 75]
    assert ax.yaxis_inverted()  # the first class on top


def test_guesses_fill_a_grid_and_hide_what_is_left() -> None:
    figure = plots.show_guesses(np.zeros((5, 8, 8)), list("abcde"), columns=3)
    assert [ax.get_visible() for ax in figure.axes] == [True] * 5 + [False]
    assert [ax.get_title() for ax in figure.axes[:5]] == list("abcde")


def test_a_replay_ends_with_the_whole_run() -> None:
    history = History(
        [{"step": k, "loss": 2.0 / k, "grad_norm": 1.0 + k} for k in range(1, 41)],
        [{"step": k, "loss": 1.0, "top1": 0.5} for k in (20, 40)],
    )
    half = plots.cut_at(plots.show_run(history, 1.0), 20)
    assert [len(line.get_xdata()) for line in half.axes[0].lines] == [20, 20, 1]
    assert list(half.axes[2].lines[-1].get_ydata()) == [1.0, 1.0]  # the limit stays
    whole = plots.show_run(history, 1.0)
    assert half.axes[0].get_xlim() == whole.axes[0].get_xlim()
    assert half.axes[1].get_ylim() == whole.axes[1].get_ylim()
    html = plots.replay(history, 1.0, frames=4).data
    assert '"label": "step 40"' in html
    assert html.count("data:image/png") == 5  # four frames, the first twice
