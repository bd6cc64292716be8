"""Where quantisation hurts: one kind or one layer at a time, and a model that stays within an accuracy budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from tqdm import tqdm

from .config import QuantConfig
from .fake import quantizers
from .points import Point, prepare
from .ptq import plan_of, ptq

Evaluate = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Sensitivity:
    """The effect of quantising one thing alone.

    Attributes:
        name: a kind or a layer.
        score: of the model with nothing else quantised.
        drop: the float model's score less this one.
        points: the places that belong to it.
    """

    name: str
    score: float
    drop: float
    points: tuple[Point, ...] = field(repr=False)


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Evaluate,
    *,
    by: str = "kind",
    config: QuantConfig | None = None,
    progress: bool | None = None,
) -> list[Sensitivity]:
    """Quantise one kind or one layer at a time: rows, the most sensitive first.

    The model is calibrated once, in floats, for all rows.

    Args:
        model, batches, progress: as for `ptq`.
        evaluate: gives a model's score, the higher the better, such as its top-1 on a fixed set.
        by: "kind" or "layer".
        config: what could be quantised; the default is everything (`QuantConfig.preset("all")`).

    Raises:
        ValueError: another `by`. See also `ptq`.
    """
    config = QuantConfig.preset("all") if config is None else config
    quantised = ptq(model, batches, config, progress=progress)
    return sweep(quantised, evaluate, evaluate(model), by, progress)


def sweep(
    quantised: nn.Module, evaluate: Evaluate, best: float, by: str, progress: bool | None = None
) -> list[Sensitivity]:
    """The rows of `sensitivity` for a calibrated model, whose quantisers are all on at the end."""
    groups = group_points(plan_of(quantised).points, by)
    rows, disable = [], None if progress is None else not progress
    for name, points in tqdm(groups.items(), desc="sensitivity", unit=by, disable=disable):
        select(quantised, points)
        score = evaluate(quantised)
        rows.append(Sensitivity(name, score, best - score, tuple(points)))
    select(quantised, plan_of(quantised).points)
    return sorted(rows, key=lambda row: -row.drop)


def group_points(points: Iterable[Point], by: str) -> dict[str, list[Point]]:
    """Points by kind or by layer.

    Raises:
        ValueError: another word.
    """
    if by not in ("kind", "layer"):
        raise ValueError(f"by={by!r}: choose 'kind' or 'layer'")
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(getattr(point, by), []).append(point)
    return groups


def select(model: nn.Module, points: Iterable[Point]) -> None:
    """Switch the quantisers of these points on and all others off."""
    chosen = set(points)
    for quantizer in quantizers(model):
        quantizer.quantizing = Point(quantizer.layer, quantizer.kind) in chosen


@dataclass(frozen=True)
class Budgeted:
    """A model within its accuracy budget.

    Attributes:
        model: quantised and calibrated; `convert` and `save` take it.
        kept_float: kinds or layers that stay in float, the most sensitive first.
        score, float_score: of this model and of the float one.
        within: is the loss within the budget?
        rows: what `sensitivity` found.
    """

    model: nn.Module
    kept_float: list[str]
    score: float
    float_score: float
    within: bool
    rows: list[Sensitivity] = field(repr=False)


def budgeted(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Evaluate,
    points: float = 0.5,
    *,
    by: str = "kind",
    config: QuantConfig | None = None,
    progress: bool | None = None,
) -> Budgeted:
    """Quantise as much as an accuracy budget allows.

    Everything is quantised first. The most sensitive kind (or layer) goes back to float, then the next, until the
    loss is within the budget. Then each of them, the least sensitive first, is quantised again if the budget allows.

    Args:
        model, batches, config, by, progress: as for `sensitivity`.
        evaluate: gives a model's accuracy as a fraction of 1, such as top-1.
        points: what may be lost, in percentage points of that accuracy.

    Returns:
        The model, and what it left in float. It may be over budget only if nothing is left to go back.

    Raises:
        ValueError: a negative budget. See also `sensitivity`.
    """
    if points < 0:
        raise ValueError(f"points={points}: give what may be lost, such as 0.5 percentage points")
    config = QuantConfig.preset("all") if config is None else config
    quantised = ptq(model, batches, config, progress=progress)
    best = evaluate(model)
    rows = sweep(quantised, evaluate, best, by, progress)
    everything = plan_of(quantised).points

    def score_without(kept: Sequence[Sensitivity]) -> float:
        out = {point for row in kept for point in row.points}
        select(quantised, [p for p in everything if p not in out])
        return evaluate(quantised)

    def fits(score: float) -> bool:
        return best - score <= points / 100 + 1e-9  # accuracies are rounded fractions

    kept: list[Sensitivity] = []
    score, waiting = score_without(kept), list(rows)
    while not fits(score) and len(waiting) > 1:  # with nothing quantised there is no quantised model
        kept.append(waiting.pop(0))
        score = score_without(kept)
    for row in reversed(kept[:-1]):
        fewer = [other for other in kept if other is not row]
        if fits(again := score_without(fewer)):
            kept, score = fewer, again
    out = {point for row in kept for point in row.points}
    final = rebuilt(quantised, model, [p for p in everything if p not in out], config)
    return Budgeted(final, [row.name for row in kept], score, best, fits(score), rows)


def rebuilt(
    calibrated: nn.Module, model: nn.Module, points: Sequence[Point], config: QuantConfig
) -> nn.Module:
    """A quantised copy of `model` with these points alone, and the scales that `calibrated` has there."""
    final = prepare(model, config, points).eval()
    scales = {(q.layer, q.role): q.state_dict() for q in quantizers(calibrated)}
    for quantizer in quantizers(final):
        quantizer.load_state_dict(scales[quantizer.layer, quantizer.role])
    return final
