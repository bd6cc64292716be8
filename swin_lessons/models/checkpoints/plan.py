"""All new values of a model, and what to say about them, worked out before anything is changed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .layouts import State
from .report import LoadReport, WeightsError, short
from .resize import Misfit, fit
from .windows import Size, model_windows, stage_window

HEAD = ("head.", "head_dist.")


def place_dense_norms(state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> State:
    """Dense backbones call their output norms norm0, norm1, ...: put them where the model has them.

    A classifier has one final norm. Where the checkpoint lacks it, the last stage's output norm serves: it
    stands in the same place.
    """
    norms = {name: re.match(r"norm(\d+)\.(weight|bias)$", name) for name in state}
    if any(name.startswith("out_norms.") for name in target):
        return {f"out_norms.{name}" if norms[name] else name: value for name, value in state.items()}
    if "norm.weight" in state or "norm.weight" not in target:
        return dict(state)
    last = max((int(match[1]) for match in norms.values() if match), default=None)
    if last is None or state[f"norm{last}.weight"].shape != target["norm.weight"].shape:
        return dict(state)
    return {re.sub(rf"^norm{last}\.", "norm.", name): value for name, value in state.items()}


class Plan:
    """Every new value of the model and what to say about it, made before anything is changed."""

    def __init__(self, model: nn.Module, target: State, report: LoadReport, class_map: Any):
        self.model, self.target, self.report = model, target, report
        self.class_map = None if class_map is None else torch.as_tensor(class_map)
        self.values: State = {}
        self.misfits: list[tuple[str, str]] = []  # name, why

    def make(self, state: State, windows: dict[str, list]) -> None:
        for name, value in state.items():
            if name in self.target:
                self._take(name, value, stage_window(windows, name))
            else:
                self._leave(name)
        for name in self.target:
            if name not in state:
                self._keep(name, state)
        self._compare_windows(windows)

    def _take(self, name: str, value: Tensor, window: Size | None) -> None:
        param, how = self.target[name], ""
        before = tuple(value.shape)
        try:
            if name.startswith(HEAD) and (before != param.shape or self.class_map is not None):
                value, how = self._fit_head(name, value, param.shape)
            elif before != param.shape or not value.is_floating_point():
                value, how = fit(name, value, param.shape, self.model, window)
        except Misfit as reason:
            self.misfits.append((name, f"checkpoint {before}, model {tuple(param.shape)} ({reason})"))
            return
        except Skip as reason:
            self.report.skipped.append((name, str(reason)))
            return
        self._set(name, value, param)
        if how:
            self.report.resized.append((name, before, tuple(param.shape), how))

    def _set(self, name: str, value: Tensor, param: Tensor) -> None:
        device = value.device if param.is_meta else param.device
        value = value.detach().to(device=device, dtype=param.dtype, copy=True).contiguous()
        self.values[name] = value
        self.report.loaded.append(name)
        if not value.isfinite().all():
            self.report.nonfinite.append(name)

    def _fit_head(self, name: str, value: Tensor, shape: torch.Size) -> tuple[Tensor, str]:
        if value.shape[1:] != shape[1:]:
            raise Misfit("another width")
        if self.class_map is None:
            raise Skip(
                f"{len(value)} classes in the checkpoint, {shape[0]} in the model, which keeps its own"
            )
        rows = self.class_map
        if rows.shape != shape[:1] or rows.min() < 0 or rows.max() >= len(value):
            raise ValueError(
                f"class_map has {len(rows)} values from {rows.min()} to {rows.max()}: it needs {shape[0]}, "
                f"one a class of the model, from 0 to {len(value) - 1}"
            )
        return value[rows.to(value.device)], "rows picked by class_map"

    def _leave(self, name: str) -> None:
        """A parameter that the model lacks: no fault if another kind of model has it."""
        reason = _why_unneeded(name, self.target, getattr(self.model, "features_only", False))
        if reason:
            self.report.skipped.append((name, reason))
        else:
            self.report.unexpected.append(name)

    def _keep(self, name: str, state: State) -> None:
        """A parameter that the checkpoint lacks: no fault if its whole kind of model lacks it."""
        for group, what in ((HEAD, "classifier"), (("out_norms.",), "output norms")):
            if name.startswith(group) and not any(other.startswith(group) for other in state):
                self.report.skipped.append((name, f"no {what} in the checkpoint: the model keeps its own"))
                return
        self.report.missing.append(name)

    def _compare_windows(self, windows: dict[str, list]) -> None:
        theirs, ours = windows.get("reference_windows"), model_windows(self.model).get("reference_windows")
        if theirs and ours and theirs != ours:
            self.report.notes.append(
                f"V2 positions were trained relative to windows {theirs}, the model uses {ours}: "
                f"build it with pretrained_window_size={tuple(h for h, _ in theirs)}"
            )

    def note_unfilled(self) -> None:
        """Tell which parameters stay on the meta device, without any values."""
        unfilled = [name for name, param in self.target.items() if param.is_meta and name not in self.values]
        if unfilled:
            self.report.notes.append(
                f"still without values, on the meta device: {short(unfilled)}. Build the model on a real device"
            )

    def check(self, origin: str, strict: bool) -> None:
        """Refuse what does not fit; without `strict`, only a checkpoint of which nothing fits."""
        if not strict and self.values:
            self.report.skipped += self.misfits
            return
        faults = self._faults()
        if faults:
            raise WeightsError(
                f"{origin} ({self.report.source} layout) does not fit {type(self.model).__name__}, "
                f"which was left unchanged:\n{faults}\n"
                "Build the model to match, or pass strict=False to load what fits."
            )

    def _faults(self) -> str:
        missing = [f"{name} {tuple(self.target[name].shape)}" for name in self.report.missing]
        lists = (
            ("of the wrong shape", [f"{name}: {why}" for name, why in self.misfits]),
            ("missing from the checkpoint", missing),
            ("unexpected by the model", self.report.unexpected),
        )
        return "\n".join(f"  {len(names)} {word}:{_listed(names)}" for word, names in lists if names)


class Skip(Exception):
    """A parameter to leave as it is; the message says why."""


def _listed(names: Sequence[str], limit: int = 12) -> str:
    more = [f"... and {len(names) - limit} more"] if len(names) > limit else []
    return "".join(f"\n    {name}" for name in [*names[:limit], *more])


def _why_unneeded(name: str, target: Mapping[str, Tensor], features_only: bool) -> str:
    """Why a model may do without this parameter; "" if it may not."""
    if name == "mask_token":
        return "SimMIM's mask token, for pre-training alone"
    if name.startswith(HEAD) and not any(other.startswith(HEAD) for other in target):
        return "the model has no classifier"
    if re.match(r"norm\.", name) and "norm.weight" not in target:
        return "the model has no final norm"
    if re.match(r"norm\d+\.|hidden_states_norms\.", name):
        return "an output norm of a dense backbone"
    stage = re.match(r"(layers|blocks)\.\d+\.", name)
    if features_only and stage and not any(other.startswith(stage[0]) for other in target):
        return "beyond the last feature map"
    return ""
