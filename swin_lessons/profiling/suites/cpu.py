"""Ours against timm, torchvision and transformers on a CPU: same weights, same images, one process, in turns.

The table's rows by contestant:

* timm: the baseline, as it comes. "timm fused" has its fused attention switched on (V1 alone has it).
* "..., micro-batches": the same work in pieces that fit the cache: at inference, pieces of the batch; in training,
  accumulated gradients with one optimiser step, equal gradients. The peers get the trick too.
* ours cuts its inference batches by itself, so it has no such row there.
* Where ours misses its bar, ours and the baseline get a profile: where their time goes, by kind of work.
* "linear layers alone" is no contestant: the time of their matrix products by PyTorch, in micro-batches where these
  are faster. What of a step it leaves is all that an implementation can save with the same products.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from swin_lessons.profiling.memory import saved_for_backward
from swin_lessons.profiling.peers import LIBRARIES, SwinSpec, build, reference_model
from swin_lessons.profiling.products import linear_products, products_step
from swin_lessons.profiling.steps import DTYPES, Contestant, check_equal, images_and_labels
from swin_lessons.profiling.suites import BenchOptions, Show
from swin_lessons.profiling.timing import Comparison, compare
from swin_lessons.profiling.trace import KINDS, by_kind, profile_step

__all__ = ["LESSON_SPECS", "Case", "measure", "plan", "run", "summary"]

LARGE = 32  # from this batch on, micro-batches compete
PRODUCTS = "linear layers alone"
CHECKED = 8  # images whose gradients are compared before training is timed

# 28-pixel Fashion-MNIST padded to 32, patches of 4: the models that the lessons train
LESSON_SPECS = {
    "swin_lesson_c48": SwinSpec("swin_lesson_c48", 1, 32, 4, 48, (2, 2), 3, 1, 10),
    "swin_lesson_c64": SwinSpec("swin_lesson_c64", 1, 32, 4, 64, (2, 2), 2, 1, 10),
    "swinv2_lesson_c64": SwinSpec("swinv2_lesson_c64", 2, 32, 4, 64, (2, 2), 2, 1, 10),
}
MODELS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", *LESSON_SPECS)


@dataclass(frozen=True)
class Case:
    """One table: a model, a discipline, a precision, a batch."""

    spec: SwinSpec
    mode: str
    dtype: str
    batch: int

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.spec.name} {self.mode} {self.dtype} batch {self.batch}"

    @property
    def large(self) -> bool:
        """Do micro-batches make sense? The lesson-size models fit the cache as they are."""
        return self.batch >= LARGE and self.spec.img_size > 64


def run(options: BenchOptions, show: Show) -> dict[str, Any]:
    """Every case of the plan: {"options", "rows", "saved_for_backward", "tables"}."""
    rows: list[dict[str, Any]] = []
    saved: list[dict[str, Any]] = []
    cases = plan(options)
    for spec in dict.fromkeys(case.spec for case in cases):
        models = Models(spec, options)
        for case in (c for c in cases if c.spec == spec):
            rows += measure(case, models, options, show)
        if "train" in options.modes:
            saved += saved_rows(models, show)
        del models
        gc.collect()
    tables = {mode: wide([r for r in rows if r["mode"] == mode]) for mode in options.modes}
    tables["profiles"] = profile_table(rows)
    return {"options": asdict(options), "rows": rows, "saved_for_backward": saved, "tables": tables}


def plan(options: BenchOptions) -> list[Case]:
    """The cases, model by model. `quick` keeps the first model and one lesson-size model, at their smallest."""
    names = options.models or MODELS
    if options.quick and not options.models:
        names = (MODELS[0], "swin_lesson_c48")
    cases = [
        Case(spec, mode, dtype, batch)
        for spec in map(find_spec, names)
        for mode in options.modes
        for dtype in options.dtypes or ("fp32",)
        for batch in options.batches or default_batches(spec, mode, options.quick)
    ]
    if not cases:
        raise ValueError(f"nothing to measure for models={','.join(names)}: give --batch")
    return cases


def find_spec(name: str) -> SwinSpec:
    """A lesson-size model or timm's name of a variant."""
    return LESSON_SPECS.get(name) or SwinSpec.from_name(name)


def default_batches(spec: SwinSpec, mode: str, quick: bool) -> tuple[int, ...]:
    """The batches of the bars."""
    if spec.name in LESSON_SPECS:
        batches: tuple[int, ...] = (64, 128) if mode == "train" else ()
    else:
        batches = (1, 8, 32) if mode == "infer" else (8, 32)
    return batches[:1] if quick else batches


class Models:
    """The contestants' models of one spec, each built once."""

    def __init__(self, spec: SwinSpec, options: BenchOptions) -> None:
        self.spec = spec
        self.libraries = ("ours", *options.against)
        weights = reference_model(spec).state_dict()
        self.models = {library: build(library, spec, weights) for library in self.libraries}
        self.optimizers: dict[str, Any] = {}
        if "timm" in self.models and spec.version == 1:
            self.models["timm fused"] = fused_timm(build("timm", spec, weights))

    def contestant(self, name: str, case: Case, micro_batch: int = 0) -> Contestant:
        """One that shares its model, and in training its optimiser, with the others of this name."""
        label = f"{name}, micro-batches" if micro_batch else name
        library = name.split()[0]
        entry = Contestant(label, library, self.models[name], case.mode, case.dtype, micro_batch)
        entry.optimizer = self.optimizers.get(name)
        return entry

    def products(self, case: Case, x: Tensor, options: BenchOptions) -> Callable[[], Any]:
        """The linear layers alone, in equal micro-batches where the case has micro-batches."""
        most = options.micro_batch if case.large else case.batch
        size = next(n for n in range(min(most, case.batch), 0, -1) if case.batch % n == 0)
        dtype = DTYPES[case.dtype]
        return products_step(
            linear_products(self.models[self.libraries[0]], x[:size], dtype), case.mode, case.batch // size
        )


def fused_timm(model: nn.Module) -> nn.Module:
    """timm's experimental switch for Swin, set on the model instead of the whole process."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # type: ignore[assignment]
    return model


def line_up(case: Case, models: Models, options: BenchOptions) -> list[Contestant]:
    """Who competes; the first is the baseline. Long training cases have the rows that the bars need, unless `full`."""
    names = ["timm", "ours", "timm fused", "torchvision", "transformers"]
    names = [name for name in names if name in models.models]
    if not case.large:
        return [models.contestant(name, case) for name in names]
    pieces = [models.contestant("timm", case, options.micro_batch)] if "timm" in names else []
    if case.mode == "infer":
        whole = [n for n in names if options.full or n != "timm fused"]
    else:
        pieces.append(models.contestant("ours", case, options.micro_batch))
        whole = names if options.full else names[:1]
    return [models.contestant(name, case) for name in whole] + pieces


def measure(case: Case, models: Models, options: BenchOptions, show: Show) -> list[dict[str, Any]]:
    """Check that all compute the same, then time them: a row a contestant."""
    x, y = images_and_labels(case.batch, case.spec.in_chans, case.spec.img_size, case.spec.num_classes)
    contestants = line_up(case, models, options)
    samples = len(contestants) * (options.rounds + 1) + options.rounds
    with show.section(case.title, samples) as progress:
        few = CHECKED if case.mode == "train" else case.batch
        differences = check(contestants, case, x[:few], y[:few], progress)
        steps = {c.name: c.step(x, y) for c in contestants} | {PRODUCTS: models.products(case, x, options)}
        models.optimizers |= {c.name.split(",")[0]: c.optimizer for c in contestants}
        warmup = 1 if case.spec.name in LESSON_SPECS else 0  # the check has warmed up the others
        result = compare(steps, rounds=options.rounds, warmup=warmup, progress=progress)
    show.text(f"{case.title}\n{result.table()}\n")
    rows = [row(case, c, result, differences[c.name]) for c in contestants]
    explain_misses(rows, steps)
    return [*rows, timing_row(case, PRODUCTS, result)]


def check(
    contestants: list[Contestant], case: Case, x: Tensor, y: Tensor, progress: Callable[[str], Any]
) -> dict[str, float]:
    """Relative difference of logits (inference) or of all gradients (training) from the baseline's."""
    differences = {}
    expected: dict[str, Tensor] = {}
    for c in contestants:
        values = outputs(c, x, y)
        if c is contestants[0]:
            expected = values
        convert = LIBRARIES[c.library][1] if case.mode == "train" else lambda values, spec: values
        differences[c.name] = check_equal(c.name, values, convert(expected, case.spec), case.dtype)
        progress(c.name)
    return differences


def outputs(c: Contestant, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What must be equal between contestants."""
    if c.mode == "train":
        return c.gradients(x, y)
    c.model.eval()
    return {"logits": c.logits(x)}


def row(case: Case, c: Contestant, result: Comparison, difference: float) -> dict[str, Any]:
    """One line of the table, for JSON, with its bar where it has one."""
    return timing_row(case, c.name, result) | {
        "micro_batch": c.micro_batch or None,
        "relative_difference": difference,
        **verdict(bar_for(case, c), result.speedup(c.name)),
    }


def timing_row(case: Case, name: str, result: Comparison) -> dict[str, Any]:
    """What was measured. Times in seconds a call; ratios are time over the baseline's."""
    timing = result.to_dict()["timings"][name]
    return {
        "model": case.spec.name,
        "mode": case.mode,
        "dtype": case.dtype,
        "batch": case.batch,
        "contestant": name,
        "baseline": result.baseline,
        "speedup": result.speedup(name),
        "images_per_second": case.batch / timing["median"],
        **timing,
    }


def explain_misses(rows: list[dict[str, Any]], steps: dict[str, Callable[[], Any]]) -> None:
    """Add a profile to the rows of ours that miss their bar, and to the baseline's."""
    missed = [r for r in rows if not r.get("met", True)]
    for r in [*rows[:1], *missed] if missed else []:
        ops = profile_step(steps[r["contestant"]])
        r["profile"] = {"seconds": by_kind(ops), "calls": sum(op.calls for op in ops)}


def profile_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For pages: a line a profile, milliseconds a step by kind of work."""
    lines = []
    for r in (r for r in rows if "profile" in r):
        profile = r["profile"]
        line = {"short": short_name(r["model"])} | {key: r[key] for key in ("mode", "batch", "contestant")}
        line |= {column_key(kind): 1e3 * profile["seconds"].get(kind, 0.0) for kind in (*KINDS, "other")}
        line["rest"] = sum(line[kind] for kind in ("norm", "elementwise", "optimizer", "other"))
        lines.append(line | {"calls": profile["calls"], "median": 1e3 * r["median"]})
    return lines


def wide(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For pages: a line a case. Images per second by contestant, None where it did not compete; the bar and ours."""
    keys = {r["contestant"]: column_key(r["contestant"]) for r in rows}
    cases: dict[tuple, dict[str, Any]] = {}
    for r in rows:
        case = {"short": short_name(r["model"])} | {key: r[key] for key in ("model", "dtype", "batch")}
        line = cases.setdefault(tuple(case.values()), case | dict.fromkeys(keys.values()))
        line[keys[r["contestant"]]] = r["images_per_second"]
        if "bar" in r:
            line |= {"speedup": r["speedup"], "bar": r["bar"], "verdict": "yes" if r["met"] else "no"}
    return [dict.fromkeys(("speedup", "bar", "verdict")) | line for line in cases.values()]


def short_name(model: str) -> str:
    """ "swinv2_tiny_window8_256" -> "SwinV2 tiny", "swin_lesson_c48" -> "Swin C48"."""
    family, size, *rest = model.split("_")
    return f"{family.replace('swin', 'Swin').replace('v2', 'V2')} {rest[0].upper() if size == 'lesson' else size}"


def column_key(contestant: str) -> str:
    """ "timm, micro-batches" -> "timm_micro_batches"."""
    return "_".join(contestant.replace(",", "").replace("-", " ").split())


def bar_for(case: Case, c: Contestant) -> float | None:
    """The speed-up over timm that this project asks of itself (fp32)."""
    if c.library != "ours" or case.dtype != "fp32":
        return None
    if case.spec.name in LESSON_SPECS:
        return 1.08 if case.mode == "train" and case.batch >= 64 else None
    if case.mode == "infer":
        return {1: 1.1, 8: 1.1, 32: 1.3}.get(case.batch)
    return {8: 1.0, 32: 1.25 if c.micro_batch else None}.get(case.batch)


def verdict(bar: float | None, value: float) -> dict[str, Any]:
    """Nothing where there is no bar."""
    return {} if bar is None else {"bar": bar, "met": value >= bar}


SAVED_BARS = {1: 0.95, 2: 0.75}  # of timm's bytes, by version


def saved_rows(models: Models, show: Show) -> list[dict[str, Any]]:
    """Bytes an image that each library keeps for the backward pass, fp32, batch 8."""
    spec = models.spec
    x, _ = images_and_labels(8, spec.in_chans, spec.img_size, spec.num_classes)
    saved = {name: saved_for_backward(models.models[name].train(), x).per_image for name in models.libraries}
    base = saved.get("timm", saved["ours"])
    show.text(
        "\n".join([f"{spec.name} saved for backward, an image", *map(saved_line(base), saved.items()), ""])
    )
    return [
        {"model": spec.name, "contestant": name, "bytes_per_image": size, "ratio": size / base}
        | saved_verdict(spec, name, size / base)
        for name, size in saved.items()
    ]


def saved_line(base: float) -> Callable[[tuple[str, float]], str]:
    """Formats (name, bytes)."""
    return lambda item: f"{item[0]:24s}{item[1] / 1e6:9.2f} MB{item[1] / base:8.3f}"


def saved_verdict(spec: SwinSpec, name: str, ratio: float) -> dict[str, Any]:
    """The bar holds for the full-size models."""
    if name != "ours" or spec.name in LESSON_SPECS:
        return {}
    bar = SAVED_BARS[spec.version]
    return {"bar": bar, "met": ratio <= bar}


def summary(result: dict[str, Any]) -> str:
    """The bars, one line each."""
    lines = [
        line(
            f"{r['model']} {r['mode']} {r['dtype']} batch {r['batch']}",
            r["contestant"],
            r["speedup"],
            r,
            "at least",
        )
        for r in result["rows"]
        if "bar" in r
    ]
    lines += [
        line(f"{r['model']} saved for backward", r["contestant"], r["ratio"], r, "at most")
        for r in result["saved_for_backward"]
        if "bar" in r
    ]
    return (
        "\n".join(["Bars: speed over timm's, and bytes over timm's", *lines])
        if lines
        else "No bar among these cases"
    )


def line(what: str, who: str, value: float, row: dict[str, Any], relation: str) -> str:
    """One bar."""
    mark = "ok" if row["met"] else "!!"
    return f"{mark}  {what:52s} {who:22s} {value:5.2f}  {relation} {row['bar']:.2f}"
