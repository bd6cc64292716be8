"""Which places of a model are quantised: found by type and structure, never by a library's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from swin_lessons.models import SwinStage, vit
from swin_lessons.models.attention import WindowAttention

from .attention import ATTENTIONS, BLOCKS, AttentionCore, QuantAdd
from .config import PRODUCTS, QuantConfig
from .fake import DynamicQuantize, FakeQuantize, Place, Quantizer
from .modules import become_quantized
from .observers import make_observer
from .peers import adapt, gelu_types

OUTPUTS = ("output", "narrow_output")


class Point(NamedTuple):
    """A place to quantise: the name of a layer, and one of `KINDS`."""

    layer: str
    kind: str


@dataclass(frozen=True)
class Plan:
    """What was quantised in a model, and how: its attribute `quantization`.

    Attributes:
        config: the choices.
        points: the places, in the order of the model's layers.
        integer: has `convert` turned its weights into integers?
    """

    config: QuantConfig
    points: tuple[Point, ...]
    integer: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "config": self.config.to_dict(),
            "points": [list(p) for p in self.points],
            "integer": self.integer,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Inverse of `to_dict`."""
        points = tuple(Point(*p) for p in values["points"])
        return cls(QuantConfig.from_dict(values["config"]), points, values["integer"])


# --- finding


def find_points(model: nn.Module, config: QuantConfig) -> list[Point]:
    """Every place of the kinds that `config` quantises, in the order of the model's layers.

    Raises:
        ValueError: nothing is left to quantise, or a pattern of `config.skip` fits no layer.
    """
    unused = set(config.skip)
    found: list[Point] = []
    position = _position_layers(model)
    for layer, module in model.named_modules():  # a shared layer comes once, with its first name
        kinds = [] if module in position else _wanted(_kinds_of(model, layer, module), config)
        fits = {pattern for pattern in config.skip if fnmatchcase(layer, pattern)}
        unused -= fits
        if not fits:
            found += [Point(layer, kind) for kind in kinds]
    if unused:
        raise ValueError(
            f"QuantConfig.skip: no layer is called {', '.join(sorted(unused))}; "
            "model.named_modules() lists the names"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to quantise of kind {', '.join(sorted(config.kinds)) or 'any'}"
        )
    return found


def _wanted(kinds: list[str], config: QuantConfig) -> list[str]:
    """Those of a layer's kinds that are to be quantised; an output only where the layer itself is."""
    wanted = [kind for kind in kinds if kind in config.kinds]
    return [] if wanted and wanted[0] in OUTPUTS else wanted


def _kinds_of(model: nn.Module, layer: str, module: nn.Module) -> list[str]:
    """The kinds of places that a layer has."""
    if isinstance(module, nn.Linear):
        kind = _kind_of_linear(model, layer, module)
        narrow = kind != "head" and module.out_features < module.in_features
        return [kind, "narrow_output" if narrow else "output"]
    if isinstance(module, nn.Conv2d):
        return ["conv", "output"]
    if isinstance(module, nn.LayerNorm):
        return ["layer_norm"]
    if isinstance(module, gelu_types()):
        return ["gelu"]
    if type(module) in ATTENTIONS:
        return ["softmax", "attention"]
    if type(module) in BLOCKS:
        return ["residual"]
    return []


def _kind_of_linear(model: nn.Module, layer: str, linear: nn.Linear) -> str:
    """Merging: four patches to two, without bias, beside a LayerNorm. Head: outside every list of blocks."""
    parent = model.get_submodule(layer.rpartition(".")[0])
    siblings = [m for m in parent.children() if m is not linear]
    merges = linear.bias is None and linear.in_features == 2 * linear.out_features
    if merges and len(siblings) == 1 and isinstance(siblings[0], nn.LayerNorm):
        return "merging"
    numbered = any(part.isdigit() for part in layer.split("."))
    return "linear" if numbered else "head"


def _position_layers(model: nn.Module) -> set[nn.Module]:
    """Linear layers that make V2's position bias from coordinates: no image goes through them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        parts = list(module.children()) if isinstance(module, nn.Sequential) else []
        if [type(p) for p in parts] == [nn.Linear, nn.ReLU, nn.Linear]:
            first, last = cast(nn.Linear, parts[0]), cast(nn.Linear, parts[2])
            if first.in_features == 2 and last.bias is None:
                found |= {first, last}
    return found


# --- placing


def prepare(
    model: nn.Module, config: QuantConfig, points: Sequence[Point] | None = None, measure: bool = True
) -> nn.Module:
    """A copy of `model` with quantisers at all points of `config`, or at those given; `measure` finds weights' scales.

    The copy takes the readable path, without fused kernels in its blocks. Its attribute `quantization` is a `Plan`.

    Raises:
        ValueError: a model that is quantised already; a layer that cannot be, by name; see also `find_points`.
    """
    if hasattr(model, "quantization"):
        raise ValueError(f"this {type(model).__name__} is quantised already: start from the float model")
    model = adapt(copy.deepcopy(model))
    points = find_points(model, config) if points is None else points
    for point in points:
        place(model, point, config, measure)
    for module in model.modules():
        if isinstance(module, SwinStage):
            module.fused_parts = frozenset()
    model.quantization = Plan(config, tuple(points))  # type: ignore[assignment]
    return model


def place(model: nn.Module, point: Point, config: QuantConfig, measure: bool = True) -> None:
    """Put the quantisers of one point into a model, in place.

    Raises:
        ValueError: the model has no such layer, or one of another type; the message has its name.
    """
    layer, kind = point
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        raise ValueError(
            f"{type(model).__name__} has no layer {layer}, which is quantised ({kind})"
        ) from None
    if kind not in _kinds_of(model, layer, module) and not _has_its_class(module, kind):
        raise ValueError(f"{layer} is a {type(module).__name__}, which has nothing of kind {kind}")
    BUILDERS[kind](module, Maker(point, config, device_of(module, model), measure))
    module.train(module.training)  # what was added, too


def device_of(*modules: nn.Module) -> torch.device:
    """Where the first parameter or buffer of these modules lies; the CPU where there is none."""
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    return next((t.device for t in tensors), torch.device("cpu"))


def _has_its_class(module: nn.Module, kind: str) -> bool:
    """Has another point given this layer its quantised class already?"""
    return kind in ("softmax", "attention") and type(module) in ATTENTIONS.values()


@dataclass(frozen=True)
class Maker:
    """Makes the quantisers of one point; `measure`: also finds the scales of weights."""

    point: Point
    config: QuantConfig
    device: torch.device
    measure: bool = True

    def activation(self, role: str, *, tokens: bool = True) -> Quantizer:
        """One scale for all that passes, or found at run time: a token, or (without `tokens`) a tensor."""
        config, place = self.config, Place(*self.point, role)
        if config.dynamic:
            return DynamicQuantize(config.activation_grid, config.dynamic if tokens else "tensor", place)
        name = f"{self.point.layer}.{role}"
        observer = make_observer(
            config.activation_observer, percentile=config.percentile, momentum=config.momentum, name=name
        )
        return FakeQuantize(config.activation_grid, observer=observer, place=place).to(self.device)

    def probability(self) -> Quantizer:
        """Probabilities lie between 0 and 1, whatever the batch: nothing is to be observed."""
        quantizer = FakeQuantize(self.config.activation_grid, place=Place(*self.point, "probabilities"))
        quantizer.set_range(0.0, 1.0)
        return quantizer.to(self.device)

    def weight(self, weight: Tensor) -> FakeQuantize:
        """Scales for this weight, found at once."""
        config, place = self.config, Place(*self.point, "weight")
        grid, granularity = config.weight_grid, config.weight_granularity
        quantizer = FakeQuantize(grid, tuple(weight.shape), granularity, config.group_size, place=place)
        quantizer.to(self.device)
        if self.measure and not weight.is_meta:
            rows = quantizer.rows(weight)
            name = f"{self.point.layer}.weight"
            observer = make_observer(
                config.weight_observer, len(rows), percentile=config.percentile, name=name
            )
            observer.to(self.device)(rows)
            quantizer.set_range(*observer.limits(grid))
        return quantizer


def place_product(module: nn.Module, make: Maker) -> None:
    """Input and weight of a linear layer or convolution; the input may stay in float."""
    layer = become_quantized(cast(nn.Linear, module), make.point.layer)
    layer.weight_quant = make.weight(layer.weight)
    if make.config.activation_bits is not None:
        layer.input_quant = make.activation("input", tokens=isinstance(layer, nn.Linear))


def place_output(module: nn.Module, make: Maker) -> None:
    """What a linear layer or convolution gives, before its bias."""
    layer = become_quantized(cast(nn.Linear, module), make.point.layer)
    layer.output_quant = make.activation("output", tokens=isinstance(layer, nn.Linear))


def place_input(module: nn.Module, make: Maker) -> None:
    """What goes into a LayerNorm or GELU, by a hook: so it may be of any class, with any forward."""
    module.input_quant = make.activation("input")
    module.register_forward_pre_hook(quantize_input)


def place_attention(module: nn.Module, make: Maker) -> None:
    """What attention multiplies."""
    core = attention_core(module)
    core.query, core.key = make.activation("query"), make.activation("key")
    core.value, core.probabilities = make.activation("value"), make.probability()


def place_scores(module: nn.Module, make: Maker) -> None:
    """Attention scores."""
    attention_core(module).scores = make.activation("scores")


def place_additions(module: nn.Module, make: Maker) -> None:
    """Both addends of a block's two additions."""
    module.__class__ = BLOCKS[type(module)]
    for number in (1, 2):
        add = QuantAdd()
        add.stream, add.branch = make.activation(f"stream{number}"), make.activation(f"branch{number}")
        module.add_module(f"add{number}", add)


BUILDERS: dict[str, Callable[[nn.Module, Maker], None]] = {
    **dict.fromkeys(PRODUCTS, place_product),
    **dict.fromkeys(OUTPUTS, place_output),
    **dict.fromkeys(("layer_norm", "gelu"), place_input),
    "attention": place_attention,
    "softmax": place_scores,
    "residual": place_additions,
}


def quantize_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook: the first argument goes through `module.input_quant`."""
    quantizer = cast(Quantizer, module.input_quant)
    return (quantizer(args[0]), *args[1:])


def attention_core(module: nn.Module) -> AttentionCore:
    """The attention core of an attention, which takes its place there first."""
    name = "attend" if isinstance(module, vit.Attention) else "core"
    core = getattr(module, name, None)
    if not isinstance(core, AttentionCore):
        core = AttentionCore()
        module.__class__ = ATTENTIONS[type(module)]
        if isinstance(module, WindowAttention):
            module.attention = "reference"
        setattr(module, name, core)
    return core


def owners(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The layers that hold quantisers, by name."""
    for name, module in model.named_modules():
        if any(isinstance(child, Quantizer) for child in module.children()):
            yield name, module
