"""What loading did, and the error when it could not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


class WeightsError(ValueError):
    """The checkpoint does not fit the model, which was left unchanged."""


@dataclass
class LoadReport:
    """What `load_weights` did. Names are the model's, except in `unexpected` and for parts never renamed."""

    source: str  # the layout: timm, official, simmim, torchvision, transformers, openmmlab
    loaded: list[str] = field(default_factory=list)  # every parameter that was set, resized ones too
    resized: list[tuple[str, Shape, Shape, str]] = field(default_factory=list)  # name, before, after, how
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name, reason
    missing: list[str] = field(default_factory=list)  # in the model, not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, not in the model
    nonfinite: list[str] = field(default_factory=list)  # set, but with NaN or infinity in it
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} parameters loaded from the {self.source} layout"]
        lines += [f"  resized {name}: {old} -> {new}, {how}" for name, old, new, how in self.resized]
        lines += [f"  skipped {short(names)}: {reason}" for reason, names in self._by_reason().items()]
        lists = ("missing", self.missing), ("unexpected", self.unexpected), ("not finite", self.nonfinite)
        lines += [f"  {word}: {short(names, 10)}" for word, names in lists if names]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _by_reason(self) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped:
            reasons.setdefault(reason, []).append(name)
        return reasons


def short(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
