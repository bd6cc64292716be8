"""Count multiply-accumulates (MACs), layer by layer, for any `nn.Module`.

What counts, and why
--------------------
* **Matrix products**: linear layers, convolutions, and the two products of attention (q @ k and attn @ v).
  One multiply and one add is *one* MAC; `torch.utils.flop_counter` calls it two FLOPs, so its figure is
  twice the sum of these rows.
* **Normalised elements**: one MAC for each element that enters a LayerNorm (or another norm). Elementwise
  work is otherwise free, as in the authors' ``flops()``. This is the convention behind the published 4.5 G
  of Swin-T: 4.4906 G of products plus 0.0038 G of norms.
* **The authors' final norm**: they divide its elements by 2 to the number of stages, where the map shrank
  by 4 to the number of patch mergings; for four stages that is four times too many. We keep the published
  figures comparable to the last digit, so a Swin classifier gets a row of its own kind, "authors_norm",
  with the surplus (0.0001 G for Swin-T). It is in `.total`; `.counted` leaves it out.
* **The log-CPB MLP of Swin V2** has its own kind, "log_cpb", and is left out of `.total`: it depends on the
  weights alone, so it folds to a constant table at inference (paper section 3.3), and the authors' figure
  has no place for it. It runs once a forward pass, not once an image. `.folded` is its size; a model that
  has already folded it shows 0.

Operations are counted where they reach the dispatcher, after autograd and before the kernel. So functional
calls, fused attention (on a CPU too, where `FlopCounterMode` misses it) and oneDNN's packed linears are all
seen, on any device: a model on the meta device is counted without allocating its weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swin_lessons.profiling.mac_formulas import FORMULAS, Formula, formula_of
from swin_lessons.profiling.running import module_names, running_module, storage_key

__all__ = ["LayerMacs", "MacReport", "count_macs"]

# timm and torchvision; transformers; old SimMIM checkpoints
CPB_NAMES = ("cpb_mlp", "continuous_position_bias_mlp", "rpe_mlp")


@dataclass
class LayerMacs:
    """One kind of work of one module. `params` are those the module owns itself, so rows add up."""

    name: str
    kind: str
    macs: int = 0
    params: int = 0


@dataclass
class MacReport:
    """MACs of one image. `.total` follows the authors' convention; see the module's docstring."""

    rows: list[LayerMacs]
    input_size: tuple[int, ...]
    by_kind: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.by_kind = {}
        for row in self.rows:
            self.by_kind[row.kind] = self.by_kind.get(row.kind, 0) + row.macs

    @property
    def total(self) -> int:
        """MACs of one image as the authors publish them, without what folds to a constant at inference."""
        return sum(self.by_kind.values()) - self.folded

    @property
    def counted(self) -> int:
        """`.total` without the surplus of the authors' final-norm formula: work that was really seen."""
        return self.total - self.by_kind.get("authors_norm", 0)

    @property
    def folded(self) -> int:
        """MACs of the log-CPB MLPs in one forward pass, whatever its batch."""
        return self.by_kind.get("log_cpb", 0)

    @property
    def matmul(self) -> int:
        """MACs of matrix products, log-CPB included: half of `FlopCounterMode`'s figure for one image."""
        return self.counted - self.by_kind.get("norm", 0) + self.folded

    @property
    def params(self) -> int:
        """Number of parameters of the model; a shared one counts once."""
        return sum(row.params for row in self.rows)

    def table(self, by: str = "layer") -> str:
        """A plain-text table, one line a layer (`by="layer"`) or a kind of work (`by="kind"`)."""
        if by not in ("layer", "kind"):
            raise ValueError(f'by={by!r} is unknown: use "layer" or "kind"')
        rows = self.rows if by == "layer" else self._kind_rows()
        lines = [(r.name, r.kind, f"{r.macs / 1e6:,.3f}", f"{r.params:,}") for r in rows]
        lines.append(("total", "", f"{self.total / 1e6:,.3f}", f"{self.params:,}"))
        return _align([("layer", "kind", "MMACs", "params"), *lines])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        keys = ("input_size", "total", "counted", "folded", "params", "by_kind")
        return {key: getattr(self, key) for key in keys} | {"rows": [asdict(row) for row in self.rows]}

    def _kind_rows(self) -> list[LayerMacs]:
        params = {kind: sum(r.params for r in self.rows if r.kind == kind) for kind in self.by_kind}
        return [LayerMacs("", kind, macs, params[kind]) for kind, macs in self.by_kind.items()]


def count_macs(
    model: nn.Module,
    input_size: tuple[int, ...],
    *,
    extra: Mapping[Any, tuple[str, Formula]] | None = None,
) -> MacReport:
    """Run `model` once in eval mode and count the MACs of one image.

    Args:
        model: any module that takes one tensor; on any device, the meta device included.
        input_size: (C, H, W), or with the batch in front: (B, C, H, W), or (B, C, T, H, W) for video. The
            report is per image either way.
        extra: operations of your own, as {torch.ops overload packet: (kind, formula)}, where
            `formula(result, *args, **kwargs)` returns MACs of the whole batch.

    Raises:
        ValueError: `input_size` has fewer than 3 numbers, or one that is not a positive integer.
    """
    size = _batched(input_size)
    model = getattr(model, "_orig_mod", model)  # look inside torch.compile's wrapper
    counter = _Counter(model, FORMULAS | dict(extra or {}))
    with _eval_mode(model), _mha_slow_path(), torch.no_grad(), counter:
        model(_example(model, size))
    return MacReport(counter.rows(batch=size[0]), tuple(input_size))


# ----------------------------------------------------------------------------------------------------
# Attribution: which module does the work


class _Counter(TorchDispatchMode):
    """Adds each counted call to the module that owns its weight, or else to the innermost running module."""

    def __init__(self, model: nn.Module, formulas: Mapping[Any, tuple[str, Formula]]) -> None:
        super().__init__()
        self.model = model
        self.formulas = formulas
        self.names = module_names(model)
        self.found: dict[tuple[str, str], int] = {}
        self.owner = _owners(self.model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = formula_of(func, self.formulas)
        if found is None and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if found is not None:
            self._add(*found, out, args, kwargs)
        return out

    def _add(self, kind: str, formula: Formula, out: Any, args: Any, kwargs: Any) -> None:
        storages = [storage_key(a) for a in args if isinstance(a, Tensor)]
        weights = [self.owner[key] for key in storages if key in self.owner]
        name = weights[-1] if weights else running_module(self.names)
        if kind == "attention" and weights:
            kind = "linear"  # a batched product with a weight, not of two activations
        if any(part in name.split(".") for part in CPB_NAMES):
            kind = "log_cpb"
        self.found[name, kind] = self.found.get((name, kind), 0) + formula(out, *args, **kwargs)

    def rows(self, batch: int) -> list[LayerMacs]:
        """Rows in the order of execution, then modules whose parameters met no counted operation."""
        rows = [
            LayerMacs(name, kind, macs if kind == "log_cpb" else macs // batch)
            for (name, kind), macs in self.found.items()
        ]
        params = _own_params(self.model)
        for row in rows:
            row.params = params.pop(row.name, 0)
        unused = [LayerMacs(name, "other", 0, count) for name, count in params.items()]
        return rows + self._authors_norm(rows) + unused

    def _authors_norm(self, rows: list[LayerMacs]) -> list[LayerMacs]:
        """The surplus of the authors' final norm, C L / 2^stages, over the real C L / 4^(stages - 1)."""
        last = next((row for row in reversed(rows) if row.kind == "norm"), None)
        if last is None or not _is_swin_final_norm(self.model, last):
            return []
        patch_weight: Any = self.model.get_submodule(
            rows[0].name
        ).weight  # a convolution, or a linear layer on patches
        channels, tokens = last.params // 2, rows[0].macs // patch_weight.numel()
        stages = 1 + round(math.log(tokens * channels / last.macs, 4))
        return [LayerMacs(last.name, "authors_norm", channels * tokens // 2**stages - last.macs)]


def _is_swin_final_norm(model: nn.Module, row: LayerMacs) -> bool:
    """timm, torchvision and we call it `norm`, transformers `swin.layernorm`; features only: none."""
    wrapper, _, name = row.name.rpartition(".")
    return "swin" in type(model).__name__.lower() and "." not in wrapper and name in ("norm", "layernorm")


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _owners(model: nn.Module) -> dict[int | None, str]:
    """The module that owns each parameter's storage."""
    owner: dict[int | None, str] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owner.setdefault(storage_key(param), name)
    owner.pop(None, None)
    return owner


def _own_params(model: nn.Module) -> dict[str, int]:
    """{module: number of its own parameters}, for modules that own some; a shared one counts once."""
    counts: dict[str, int] = {}
    for name, param in model.named_parameters():
        module = name.rpartition(".")[0]
        counts[module] = counts.get(module, 0) + param.numel()
    return counts


# ----------------------------------------------------------------------------------------------------
# The run itself


def _batched(input_size: tuple[int, ...]) -> tuple[int, ...]:
    size = tuple(input_size) if isinstance(input_size, (tuple, list)) else ()
    if len(size) < 3 or not all(isinstance(n, int) and n > 0 for n in size):
        raise ValueError(f"input_size={input_size!r}: give positive integers as (C, H, W) or (B, C, H, W)")
    return (1, *size) if len(size) == 3 else size


def _example(model: nn.Module, size: tuple[int, ...]) -> Tensor:
    param = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(size, dtype=param.dtype, device=param.device)


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside (a batch norm must not learn from zeros); each module's own mode restored after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _mha_slow_path() -> Iterator[None]:
    """`nn.MultiheadAttention` in eval mode is one opaque operation; take it apart."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _align(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = len(widths) - 2  # names to the left, numbers to the right
    cells = (
        [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))]
        for r in lines
    )
    return "\n".join("  ".join(row).rstrip() for row in cells)
