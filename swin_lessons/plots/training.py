"""Figures of a training run: images, schedules, curves, confusions, mistakes.

Grey images `(H, W)` are dark where the number is large; curves are plain sequences of numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from .sliders import frame_slider, picture
from .style import BLACK, BLUE, BLUES, CYCLE, GREY, HATCHES, ORANGE, bare

GREYS = plt.get_cmap("gray_r", 32)  # few levels make small files
LINES = ("-", "--", "-.", ":")  # a second sign beside colour


def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Mean of each value and up to `width` - 1 values before it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    last = np.arange(1, len(sums))
    first = np.maximum(last - width, 0)
    return (sums[last] - sums[first]) / (last - first)


def mosaic(rows: Sequence[Sequence[Any]], gap: int = 2) -> np.ndarray:
    """Rows of equal-sized images, `(H, W)` or `(H, W, 3)` of 0..255, as one picture with `gap` px of white between."""

    def frame(image: Any) -> np.ndarray:
        pixels = np.asarray(image)
        sides = ((gap, gap), (gap, gap), (0, 0))[: pixels.ndim]
        white = 255 if pixels.ndim == 3 else np.nan  # nan has no colour in any scale of greys
        return np.pad(pixels if pixels.ndim == 3 else pixels.astype(float), sides, constant_values=white)

    return np.concatenate([np.concatenate([frame(image) for image in row], axis=1) for row in rows])


def show_rows(rows: Sequence[Sequence[Any]], names: Sequence[str], width: float = 7.4) -> Figure:
    """Images in rows of equal length, with a name to the left of each row."""
    picture = mosaic(rows)
    height = picture.shape[0] / len(rows)
    figure, ax = plt.subplots(figsize=(width, 0.15 + width * 0.87 * picture.shape[0] / picture.shape[1]))
    bare(ax).imshow(picture, cmap=GREYS, interpolation="nearest")
    ax.set_yticks(height * (np.arange(len(rows)) + 0.5) - 0.5, names)
    ax.tick_params(length=0)
    return figure


def show_schedules(rates: Mapping[str, Sequence[float]]) -> Figure:
    """Learning rate against step, one line a schedule."""
    figure, ax = plt.subplots(figsize=(7.4, 2.5))
    for (name, values), style in zip(rates.items(), LINES, strict=False):
        ax.plot(values, style, label=name)
    ax.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    ax.legend()
    return figure


def draw_loss(ax: Axes, values: Sequence[float], name: str, number: int, width: int) -> None:
    """A faint line of the values and a strong one of their running mean."""
    colour = CYCLE[number % len(CYCLE)]
    ax.plot(values, color=colour, alpha=0.25, linewidth=0.8)
    ax.plot(smooth(values, width), LINES[number % len(LINES)], color=colour, label=name)


def draw_chance(ax: Axes, chance: float) -> None:
    """A line at the loss of a model that knows nothing."""
    ax.axhline(chance, color=GREY, linewidth=0.8)
    ax.annotate("guessing", (1, chance), (0, 2), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", va="bottom", color=GREY, fontsize=9)  # fmt: skip


def show_losses(
    curves: Mapping[str, Sequence[float]], *, width: int = 10, chance: float | None = None, top: float = 3.0
) -> Figure:
    """Training losses against step: faint as they are, strong as the mean of the last `width` steps."""
    figure, ax = plt.subplots(figsize=(7.4, 2.9))
    for number, (name, values) in enumerate(curves.items()):
        draw_loss(ax, values, name, number, width)
    if chance is not None:
        draw_chance(ax, chance)
    ax.set(xlabel="step", ylabel="loss", ylim=(0, top))
    if len(curves) > 1:
        ax.legend(loc="lower left")
    return figure


def show_run(history: Any, clip_norm: float, width: int = 50) -> Figure:
    """A `History`: loss in training and validation, validation accuracy, gradient norm."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7.4, 2.7))
    steps, evaluated = history.column("step"), history.column("step", "evals")
    loss, norm = history.column("loss"), history.column("grad_norm")
    left.plot(steps, loss, color=BLUE, alpha=0.2, linewidth=0.6)
    left.plot(steps, smooth(loss, width), color=BLUE, label="training")
    left.plot(
        evaluated, history.column("loss", "evals"), "o--", color=ORANGE, markersize=4, label="validation"
    )
    left.set(title="loss", xlabel="step", ylim=(0, 2.8))
    left.legend()
    accuracy = [100 * value for value in history.column("top1", "evals")]
    middle.plot(evaluated, accuracy, "o--", color=ORANGE, markersize=4)
    middle.set(title="validation accuracy, %", xlabel="step", xlim=(0, None))
    right.plot(steps, norm, color=BLUE, alpha=0.2, linewidth=0.6)
    right.plot(steps, smooth(norm, width), color=BLUE)
    right.axhline(clip_norm, color=BLACK, linewidth=0.8, linestyle="--")
    right.set(title="gradient norm, dashed: limit", xlabel="step", yscale="log")
    return figure


def replay(history: Any, clip_norm: float, *, frames: int = 8, id: str = "replay-run") -> HTML:
    """The curves of `show_run` as they grew, as a slider that plays."""
    last = int(history.column("step")[-1])
    stops = [last * k // frames for k in range(1, frames + 1)]
    drawn = [picture(cut_at(show_run(history, clip_norm), stop), dpi=70, colours=32) for stop in stops]
    losses = history.column("loss")
    alts = [f"The curves up to step {stop}: the loss is {losses[stop - 1]:.2f}." for stop in stops]
    labels = [f"step {stop}" for stop in stops]
    return frame_slider(drawn, labels, alts, id=id, name="Up to", caption="The same run as it went.")


def cut_at(figure: Figure, step: int) -> Figure:
    """Take away what curves show after a step; axes stay as they are."""
    for ax in figure.axes:
        ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
        for line in ax.lines:
            if line.get_transform() == ax.transData:  # a level, from edge to edge, stays
                x, y = (np.asarray(values) for values in line.get_data())
                line.set_data(x[x <= step], y[x <= step])
    return figure


def show_confusion(confusion: Any, classes: Sequence[str]) -> Figure:
    """Counts `(K, K)`, row the true class, column the answer; colour is the share of the row."""
    counts = np.asarray(confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, ax = plt.subplots(figsize=(6.4, 5.6))
    ax.imshow(np.ma.masked_equal(shares, 0), cmap=BLUES, norm=PowerNorm(0.5, 0, 1))
    for row, column in np.argwhere(counts > 0):
        colour = "white" if shares[row, column] > 0.3 else BLACK
        ax.text(column, row, counts[row, column], ha="center", va="center", color=colour, fontsize=9)
    places = np.arange(len(classes))
    ax.set_xticks(places, classes, rotation=45, ha="right", rotation_mode="anchor")
    ax.set(yticks=places, yticklabels=classes, xlabel="answer", ylabel="truth")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def show_class_accuracy(accuracies: Mapping[str, Sequence[float]], classes: Sequence[str]) -> Figure:
    """Bars in percent for each class, one bar a model; values are fractions of 1."""
    figure, ax = plt.subplots(figsize=(7.4, 0.5 + 0.38 * len(classes)))
    places, thickness = np.arange(len(classes)), 0.8 / len(accuracies)
    for i, (name, values) in enumerate(accuracies.items()):
        y = places + (i - (len(accuracies) - 1) / 2) * thickness
        percent = [100 * float(value) for value in values]
        hatch = HATCHES[i % len(HATCHES)]
        bars = ax.barh(
            y, percent, 0.9 * thickness, label=name, color=CYCLE[i], hatch=hatch, edgecolor="white"
        )
        ax.bar_label(bars, fmt="%.0f", fontsize=8, color=GREY, padding=2)
    ax.set(yticks=places, yticklabels=classes, xlabel="accuracy, %", xlim=(0, 106))
    ax.invert_yaxis()
    if len(accuracies) > 1:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def show_guesses(images: Sequence[Any], captions: Sequence[str], columns: int = 6) -> Figure:
    """Images with a caption of two lines or so above each."""
    rows = -(-len(images) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7.4, (7.4 / columns + 0.5) * rows), squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for ax, image, caption in zip(axes.flat, images, captions, strict=False):
        ax.set_visible(True)
        bare(ax).imshow(np.asarray(image), cmap=GREYS, interpolation="nearest")
        ax.set_title(caption, fontsize=9)
    return figure


def show_rate(with_warmup: Sequence[float], without: Sequence[float], rate: float, chance: float) -> Figure:
    """Two losses at one learning rate, with and without warm-up, on axes that are the same for every rate."""
    figure, ax = plt.subplots(figsize=(6.4, 2.9))
    draw_loss(ax, with_warmup, "with warm-up", 0, 5)
    draw_loss(ax, without, "without", 1, 5)
    draw_chance(ax, chance)
    ax.set(xlabel="step", ylabel="loss", ylim=(0, 4.5), title=f"learning rate {rate:g}")
    ax.legend(loc="lower left")
    return figure
