"""The training ladder: one model made faster rung by rung, with PyTorch's own compiler as the peer.

Each rung keeps what the rungs below it brought: TF32, mixed precision, fused LayerNorm and AdamW, window kernels, fused
attention, a fused first layer of the MLP. The steps are those of the training loop (`training.train_step`), on the same
images, from the same weights. Before a rung is timed its gradients are compared with those of the lowest.

Without a GPU it runs a small version: the rungs that need no kernel are timed; those with Triton kernels go through the
interpreter on two images, where gradients and losses are compared and no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.models import SwinTransformer
from swin_lessons.profiling.peak import peak_allocated
from swin_lessons.profiling.peers import SwinSpec, build, reference_model
from swin_lessons.profiling.steps import check_equal, images_and_labels
from swin_lessons.profiling.suites import BenchOptions, Show, check_kernels_run
from swin_lessons.profiling.suites.cpu import find_spec, short_name
from swin_lessons.profiling.timing import Comparison, compare
from swin_lessons.training.checkpoint import TrainState
from swin_lessons.training.config import TrainConfig
from swin_lessons.training.loop import train_step
from swin_lessons.training.optim import param_groups
from swin_lessons.training.precision import autocast, float32_products, grad_scaler

__all__ = ["ARTICLE", "Rung", "climb", "ladder", "run"]

ARTICLE = {
    "AMP": 1.63,
    "LayerNorm, AdamW": 2.11,
    "attention": 2.85,
}  # the article's gains on one GPU, cumulative
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
)
SMALL_MODELS = ("swin_lesson_c48", "swinv2_lesson_c64")  # without a GPU
STEPS = 10  # of training, after which losses are compared
CHECKED = 8  # images whose gradients are compared
LOSS_TOLERANCE = 0.05  # relative, after the last of these steps
INTERPRETED = 2  # images and steps of rungs that run in the interpreter
BASE = "eager fp32"
BARS = {"whole over eager fp32": 2.85, "whole over torch.compile with AMP": 1.15}


@dataclass(frozen=True)
class Rung:
    """One way to train the same model."""

    name: str
    precision: str = "fp32"
    kernels: str = "torch"
    attention: str = "reference"
    optimizer: str = "default"  # torch.optim.AdamW as it comes; "fused": its fused form; "triton": FusedAdamW
    compiled: bool = False

    @property
    def triton(self) -> bool:
        """Does it need a GPU, or the interpreter?"""
        return self.kernels != "torch" or self.attention == "triton" or self.optimizer == "triton"


def ladder(half: str = "fp16", cuda: bool = True) -> list[Rung]:
    """The rungs, lowest first, then the compiler's; `half` is "fp16" or "bf16". A CPU has no TF32."""
    amp = Rung("+ AMP", half)
    norm = replace(amp, name="+ LayerNorm, AdamW", kernels="norm", optimizer="triton")
    attention = replace(norm, name="+ attention", attention="triton")
    rungs = [
        Rung(BASE),
        Rung("+ TF32", "tf32"),
        amp,
        norm,
        replace(norm, name="+ windows", kernels="norm+windows"),
        attention,
        replace(attention, name="+ MLP epilogue", kernels="norm+mlp"),
        *(
            Rung(f"torch.compile {precision}", precision, attention="sdpa", optimizer="fused", compiled=True)
            for precision in ("fp32", "tf32", half)
        ),
    ]
    return [rung for rung in rungs if cuda or rung.precision != "tf32"]


def short_ladder(half: str = "fp16", cuda: bool = True) -> list[Rung]:
    """The rungs that the bars need: for all models but the first."""
    names = (BASE, "+ AMP", "+ MLP epilogue", f"torch.compile {half}")
    return [rung for rung in ladder(half, cuda) if rung.name in names]


def run(options: BenchOptions, show: Show) -> dict[str, Any]:
    """Every model, precision and batch: {"options", "rows", "tables": {"gains", "bars"}}."""
    cuda = torch.cuda.is_available()
    specs, halves = plan(options)
    rows = []
    for i, spec in enumerate(specs):
        weights = reference_model(spec).state_dict()
        for half in halves if options.full or i == 0 else halves[:1]:
            rungs = (ladder if options.full or i == 0 else short_ladder)(half, cuda)
            for batch in options.batches or ((32, 128) if cuda else (8,)):
                rows += climb(spec, weights, rungs, batch, half, options.rounds, show)
    return {
        "options": asdict(options),
        "article": ARTICLE,
        "rows": rows,
        "tables": {"gains": gains(rows), "bars": bars(rows)},
    }


def plan(options: BenchOptions) -> tuple[list[SwinSpec], tuple[str, ...]]:
    """The models to climb with, and their mixed precisions.

    Raises:
        ValueError: an unknown model, another precision, or a machine where kernels cannot run.
    """
    cuda = torch.cuda.is_available()
    check_kernels_run()
    models = options.models or (MODELS if cuda else SMALL_MODELS)
    models = models[:1] if options.quick and not options.models else models
    halves = options.dtypes or (("fp16", "bf16") if cuda else ("bf16",))
    if wrong := set(halves) - {"fp16", "bf16"}:
        raise ValueError(f"dtype={','.join(sorted(wrong))}: the ladder's mixed precision is fp16 or bf16")
    return [find_spec(name) for name in models], halves


def climb(
    spec: SwinSpec,
    weights: dict[str, Tensor],
    rungs: list[Rung],
    batch: int,
    half: str,
    rounds: int,
    show: Show,
) -> list[dict[str, Any]]:
    """Check every rung against the lowest, then time those that this machine can time: a row a rung."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    title = f"{spec.name} {half} batch {batch}"
    timed = [rung for rung in rungs if device.type == "cuda" or not rung.triton]
    ladders = {rung: Climber(rung, spec, weights, device) for rung in rungs}
    with show.section(title, len(rungs) + len(timed) * (rounds + 1)) as progress:
        found = {}
        for rung, climber in ladders.items():
            count = batch if rung in timed else INTERPRETED
            found[rung] = climber.check(ladders[rungs[0]], count)
            progress(rung.name)
        x, y = _batch(spec, batch, device)
        steps = {rung.name: ladders[rung].timed_step(x, y) for rung in timed}
        for rung in timed:
            found[rung]["peak_bytes"] = ladders[rung].peak(steps[rung.name])
            progress(rung.name)
        result = compare(steps, rounds=rounds, device=device, progress=progress)
    show.text(f"{title}\n{result.table()}\n")
    case = {"model": spec.name, "half": half, "batch": batch, "device": device.type}
    return [case | asdict(rung) | found[rung] | _times(rung.name, result, batch) for rung in rungs]


class Climber:
    """A rung with its model and optimiser."""

    def __init__(self, rung: Rung, spec: SwinSpec, weights: dict[str, Tensor], device: torch.device) -> None:
        self.rung, self.spec, self.device = rung, spec, device
        self.model = _model(rung, spec, weights).to(device).train()
        self.called: Any = torch.compile(self.model) if rung.compiled else self.model

    def check(self, base: Climber, count: int) -> dict[str, Any]:
        """Gradients against those of `base`, then the losses of a few steps from the same weights.

        Raises:
            ArithmeticError: the gradients or the last losses differ by more than the precision explains.
        """
        few = min(CHECKED, count)
        x, y = _batch(self.spec, few, self.device)
        expected = base.gradients(x, y)
        tolerance = "fp32" if self.rung.precision == "fp32" else "bf16"
        difference = check_equal(self.rung.name, self.gradients(x, y), expected, tolerance)
        steps = STEPS if count > INTERPRETED else INTERPRETED
        losses, expected_losses = self.losses(steps, count), base.losses(steps, count)
        if not abs(losses[-1] - expected_losses[-1]) <= LOSS_TOLERANCE * expected_losses[-1]:
            raise ArithmeticError(
                f"{self.rung.name}: after {steps} steps the loss is {losses[-1]:.4f}, that of {base.rung.name} "
                f"{expected_losses[-1]:.4f}: it trains differently, so nothing is timed"
            )
        found = {"relative_difference": difference, "steps": steps, "images": count, "peak_bytes": None}
        return found | {"losses": losses, "eager_losses": expected_losses}

    def gradients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of the mean cross-entropy, by parameter."""
        scale = 1024.0 if self.rung.precision == "fp16" else 1.0
        with float32_products(self.rung.precision), autocast(self.device, self.rung.precision):
            loss = F.cross_entropy(self.called(x).float(), y)
            (loss * scale).backward()
        found = {n: p.grad / scale for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found

    def losses(self, steps: int, count: int) -> list[float]:
        """Of `steps` steps of training on one batch of `count` images; the weights are put back."""
        x, y = _batch(self.spec, count, self.device)
        start = {name: value.clone() for name, value in self.model.state_dict().items()}
        step = self.step(x, y, lr=1e-4)
        losses = [step().item() for _ in range(steps)]
        self.model.load_state_dict(start)
        return losses

    def step(self, x: Tensor, y: Tensor, lr: float) -> Callable[[], Tensor]:
        """A step of the training loop, which returns the loss."""
        config = TrainConfig(precision=self.rung.precision)
        scaler = grad_scaler(self.device, self.rung.precision)
        state = TrainState(self.called, self._optimizer(lr), scaler)

        def step() -> Tensor:
            with float32_products(self.rung.precision):
                return train_step(state, x, y, config)[0]

        return step

    def timed_step(self, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        """With a learning rate of 0: the same arithmetic, and the weights stay."""
        return self.step(x, y, lr=0.0)

    def peak(self, step: Callable[[], Any]) -> int:
        """Bytes that a step holds at its highest, over what is there before it."""
        step()
        return peak_allocated(step, self.device)

    def _optimizer(self, lr: float) -> torch.optim.Optimizer:
        groups = param_groups(self.model)
        if self.rung.optimizer == "triton":
            from swin_lessons.kernels import FusedAdamW

            return FusedAdamW(groups, lr=lr, impl="triton")
        return torch.optim.AdamW(groups, lr=lr, fused=True if self.rung.optimizer == "fused" else None)


def _model(rung: Rung, spec: SwinSpec, weights: dict[str, Tensor]) -> nn.Module:
    """The spec's model as the rung runs it, with these weights."""
    plain: Any = build("ours", spec, weights)
    model = SwinTransformer(replace(plain.config, kernels=rung.kernels, attention=rung.attention))
    model.load_state_dict(plain.state_dict())
    return model


def _batch(spec: SwinSpec, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = images_and_labels(count, spec.in_chans, spec.img_size, spec.num_classes)
    return x.to(device), y.to(device)


def _times(name: str, result: Comparison, batch: int) -> dict[str, Any]:
    """What was measured; nothing for a rung that was not timed."""
    if name not in result.timings:
        return {"seconds": None, "iqr": None, "images_per_second": None, "speedup": None}
    timing = result.timings[name]
    return {
        "seconds": timing.median,
        "iqr": timing.iqr,
        "images_per_second": batch / timing.median,
        "speedup": result.speedup(name),
    }


# --- for pages


def gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a rung: its gain over eager fp32 beside the article's, memory, and loss after the last step."""
    return [
        {key: row[key] for key in ("model", "half", "batch", "speedup", "images_per_second")}
        | {"short": short_name(row["model"]), "rung": row["name"]}
        | {"article": ARTICLE.get(row["name"].removeprefix("+ ")) if row["device"] == "cuda" else None}
        | {"loss": row["losses"][-1], "eager_loss": row["eager_losses"][-1]}
        | {"peak_gib": row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None}
        for row in rows
    ]


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole ladder against what it has to beat: a line a model and bar, at the batch where it is best."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for bar, least in BARS.items():
            ratios = [r for case in _cases(rows, model) if (r := _ratio(case, bar)) is not None]
            if ratios:
                found.append(
                    {
                        "short": short_name(model),
                        "what": bar,
                        "ratio": max(ratios),
                        "bar": least,
                        "met": max(ratios) >= least,
                    }
                )
    return found


def _cases(rows: list[dict[str, Any]], model: str) -> list[list[dict[str, Any]]]:
    cases: dict[tuple, list[dict[str, Any]]] = {}
    for row in (row for row in rows if row["model"] == model):
        cases.setdefault((row["half"], row["batch"]), []).append(row)
    return list(cases.values())


def _ratio(case: list[dict[str, Any]], bar: str) -> float | None:
    """The whole ladder's images a second over the other's; None where one of them was not timed."""
    speed = {row["name"]: row["images_per_second"] for row in case}
    other = BASE if bar.endswith(BASE) else f"torch.compile {case[0]['half']}"
    whole, base = speed.get("+ MLP epilogue"), speed.get(other)
    return whole / base if whole and base else None


def summary(result: dict[str, Any]) -> str:
    """The gains, a line a rung, and the bars."""
    lines = [
        f"{'':28s}{'half':6s}{'batch':>6s}{'images/s':>10s}{'gain':>8s}{'article':>9s}{'loss':>8s}{'eager':>8s}"
    ]
    for r in result["tables"]["gains"]:
        gain = (
            ("-", "-") if r["speedup"] is None else (f"{r['images_per_second']:.1f}", f"{r['speedup']:.2f}x")
        )
        article = f"{r['article']:.2f}x" if r["article"] else ""
        lines.append(
            f"{r['short'] + ' ' + r['rung']:28s}{r['half']:6s}{r['batch']:6d}{gain[0]:>10s}{gain[1]:>8s}{article:>9s}"
            f"{r['loss']:8.4f}{r['eager_loss']:8.4f}"
        )
    for b in result["tables"]["bars"]:
        lines.append(
            f"{'ok' if b['met'] else '!!'}  {b['short']} {b['what']}: {b['ratio']:.2f}, at least {b['bar']}"
        )
    return "\n".join(lines)
