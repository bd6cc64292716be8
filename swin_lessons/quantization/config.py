"""What to quantise and how, as one frozen data class that refuses what makes no sense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .grid import Grid

KINDS = {
    "linear": "inputs and weights of linear layers, but those of the next two kinds",
    "merging": "input and weight of the linear layer in each patch merging",
    "head": "input and weight of the classifier",
    "conv": "input and weight of the patch embedding",
    "output": "what quantised layers give, before the bias is added (FasterTransformer's aftergemm)",
    "narrow_output": "the same for layers with fewer outputs than inputs: fc2 and the linear layer of patch merging",
    "attention": "queries, keys (V2: normalised), values and probabilities: what attention multiplies",
    "softmax": "attention scores, before the position bias is added",
    "layer_norm": "what goes into each LayerNorm",
    "gelu": "what goes into each GELU",
    "residual": "both addends of each residual addition",
}
PRODUCTS = frozenset({"linear", "merging", "head", "conv"})
OBSERVERS = ("minmax", "moving", "percentile", "entropy", "mse")
GRANULARITIES = ("tensor", "channel", "group")
DYNAMIC = (None, "tensor", "token")


@dataclass(frozen=True)
class QuantConfig:
    """Which tensors become integers, of how many bits, and how their scales are found.

    Attributes:
        weight_bits, activation_bits: 8 or 4; activations also None: then they stay in float (weight-only).
        weight_granularity: one scale for the whole weight ("tensor"), one an output channel ("channel"), or one for
            `group_size` neighbours along the input axis ("group").
        weight_observer, activation_observer: "minmax"; "percentile"; "entropy" (least KL divergence); "mse" (least
            squared error); "moving" (average of minima and maxima, for training). Weights take all but "moving".
        percentile: how much of the values "percentile" keeps within the range, in percent.
        symmetric_weights, symmetric_activations: zero point 0. Otherwise the range may be lopsided, as after a GELU.
        dynamic: None for scales fixed by calibration; "token" finds one for each token at run time, "tensor" one for
            what a layer gets at once.
        momentum: of "moving", the share of the newest batch.
        learnable_scale: train scales by gradient (LSQ, arXiv:1902.08153).
        quantize, dequantize: kinds of places (`KINDS`); what is in both stays in float.
        skip: layers that stay in float: names, or patterns such as "layers.3.*".
    """

    weight_bits: int = 8
    activation_bits: int | None = 8
    weight_granularity: str = "channel"
    group_size: int = 32
    weight_observer: str = "minmax"
    activation_observer: str = "percentile"
    percentile: float = 99.99
    symmetric_weights: bool = True
    symmetric_activations: bool = False
    dynamic: str | None = None
    momentum: float = 0.01
    learnable_scale: bool = False
    quantize: frozenset[str] = PRODUCTS
    dequantize: frozenset[str] = frozenset()
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("quantize", "dequantize"):
            object.__setattr__(self, name, _kinds(name, getattr(self, name)))
        if isinstance(self.skip, str):
            raise ValueError(f"QuantConfig.skip is {self.skip!r}: give a tuple of names or patterns")
        object.__setattr__(self, "skip", tuple(self.skip))
        for name, (choices, words) in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices or type(value) not in map(type, choices):
                raise ValueError(f"QuantConfig.{name} is {value!r}: choose {words}")
        _check_numbers(self)
        if self.dynamic and self.activation_bits is None:
            raise ValueError("QuantConfig.dynamic chooses scales of activations: give activation_bits, too")
        if self.dynamic and self.learnable_scale:
            raise ValueError("QuantConfig.learnable_scale needs scales that are kept: use dynamic=None")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> QuantConfig:
        """A named choice, with any field changed.

        "linear" (the default): inputs and weights of linear layers and the patch embedding. "mode1", "mode2": as
        FasterTransformer's INT8 modes for Swin: one symmetric scale a tensor, percentile 99.99; integers in and out of
        linear layers and in attention, float in LayerNorm, softmax, GELU, residual additions, patch embedding and head;
        mode 2 also leaves the outputs of fc2 and of patch merging unquantised. "all": everything, to see it fail.
        "dynamic": "linear" with a scale for each token, found at run time. "w8a16", "w4a16": weights alone, 4 bits in
        groups of 32. "w4a8": such weights with INT8 activations.

        Raises:
            ValueError: an unknown name, field or value.
        """
        if name not in _PRESETS:
            raise ValueError(f"there is no preset {name!r}: choose one of {', '.join(_PRESETS)}")
        return replace(cls(), **{**_PRESETS[name], **changes})

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of places that are quantised; of activations none where they stay in float."""
        chosen = self.quantize - self.dequantize
        return chosen & PRODUCTS if self.activation_bits is None else chosen

    @property
    def weight_grid(self) -> Grid:
        """Integers of weights."""
        return Grid(self.weight_bits, self.symmetric_weights, narrow=self.symmetric_weights)

    @property
    def activation_grid(self) -> Grid:
        """Integers of activations."""
        assert self.activation_bits is not None
        return Grid(self.activation_bits, self.symmetric_activations)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        values = asdict(self)
        return values | {k: sorted(values[k]) for k in ("quantize", "dequantize")} | {"skip": list(self.skip)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantConfig:
        """Inverse of `to_dict`.

        Raises:
            ValueError: an unknown field, kind or value.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"QuantConfig has no field {', '.join(unknown)}: choose among {', '.join(sorted(known))}"
            )
        return cls(**values)


def _kinds(name: str, kinds: Iterable[str]) -> frozenset[str]:
    if isinstance(kinds, str):
        raise ValueError(f"QuantConfig.{name} is {kinds!r}: give a set of kinds, such as {{{kinds!r}}}")
    chosen = frozenset(kinds)
    if unknown := sorted(map(repr, chosen - KINDS.keys())):
        raise ValueError(
            f"QuantConfig.{name} names unknown kinds: {', '.join(unknown)}; choose among {', '.join(KINDS)}"
        )
    return chosen


def _check_numbers(c: QuantConfig) -> None:
    if not (_is_number(c.percentile) and 50 < c.percentile <= 100):
        raise ValueError(f"QuantConfig.percentile is {c.percentile!r}: use more than 50, and 100 at most")
    if not (_is_number(c.momentum) and 0 < c.momentum <= 1):
        raise ValueError(f"QuantConfig.momentum is {c.momentum!r}: use more than 0, and 1 at most")
    if not isinstance(c.group_size, int) or isinstance(c.group_size, bool) or c.group_size < 1:
        raise ValueError(f"QuantConfig.group_size is {c.group_size!r}: use a whole number of at least 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_CHOICES: dict[str, tuple[tuple, str]] = {
    "weight_bits": ((8, 4), "8 or 4"),
    "activation_bits": ((8, 4, None), "8, 4 or None"),
    "weight_granularity": (GRANULARITIES, f"one of {', '.join(GRANULARITIES)}"),
    "weight_observer": (tuple(o for o in OBSERVERS if o != "moving"), "minmax, percentile, entropy or mse"),
    "activation_observer": (OBSERVERS, f"one of {', '.join(OBSERVERS)}"),
    "symmetric_weights": ((True, False), "True or False"),
    "symmetric_activations": ((True, False), "True or False"),
    "dynamic": (DYNAMIC, "None, 'tensor' or 'token'"),
    "learnable_scale": ((True, False), "True or False"),
}
_MODE2: dict[str, Any] = {
    "weight_granularity": "tensor",
    "symmetric_activations": True,
    "quantize": frozenset({"linear", "merging", "output", "attention"}),
}
_PRESETS: dict[str, dict[str, Any]] = {
    "linear": {},
    "mode1": _MODE2 | {"quantize": _MODE2["quantize"] | {"narrow_output"}},
    "mode2": _MODE2,
    "all": {"weight_granularity": "tensor", "symmetric_activations": True, "quantize": frozenset(KINDS)},
    "dynamic": {"dynamic": "token"},
    "w8a16": {"activation_bits": None},
    "w4a16": {"weight_bits": 4, "activation_bits": None, "weight_granularity": "group"},
    "w4a8": {"weight_bits": 4, "weight_granularity": "group"},
}
