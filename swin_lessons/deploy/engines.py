"""One callable whatever runs the model: ONNX Runtime, OpenVINO, or a model in PyTorch.

`load("model.onnx", engine="openvino")` gives an `Engine`; call it with images `(B, C, H, W)`, get logits. `fastest`
times what is installed and keeps the quickest engine whose outputs are near enough to a reference.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_lessons.profiling.timing import compare

__all__ = ["Choice", "Engine", "available", "candidates", "fastest", "load"]

BATCHES = 4  # batch sizes for which OpenVINO keeps a compiled model


class Engine(ABC):
    """A loaded model: `engine(images)` takes fp32 `(B, C, H, W)` on the CPU and returns fp32 logits `(B, classes)`.

    Attributes:
        name: "onnxruntime" or "openvino".
        precision: the floating-point type it computes in; integers are the file's business.
        threads: processor threads it may use.
    """

    name: str
    package: str
    precisions: tuple[str, ...] = ("fp32",)

    def __init__(self, path: Path, precision: str, threads: int) -> None:
        if precision not in self.precisions:
            raise ValueError(
                f"precision={precision!r}: {self.name} runs a model in {' or '.join(self.precisions)}"
            )
        self.path, self.precision, self.threads = path, precision, threads
        self.runtime = _package(self.package)
        try:
            self._open()
        except Exception as error:
            raise ValueError(f"{path}: {self.name} cannot load it: {_first_line(error)}") from error

    @abstractmethod
    def _open(self) -> None:
        """Read the file."""

    @abstractmethod
    def _run(self, images: np.ndarray) -> np.ndarray:
        """Logits of contiguous fp32 images."""

    def __call__(self, images: Tensor | np.ndarray) -> Tensor:
        """`(B, C, H, W)` -> `(B, classes)`.

        Raises:
            ValueError: images of another shape than the file's.
        """
        array = np.ascontiguousarray(torch.as_tensor(images).detach().to("cpu", torch.float32).numpy())
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(f"expected images (B, C, H, W), got a tensor of shape {array.shape}")
        try:
            return torch.from_numpy(self._run(array))
        except Exception as error:
            raise ValueError(
                f"{self.path}: {self.name} refuses images {array.shape}: {_first_line(error)}"
            ) from error

    def __repr__(self) -> str:
        return f"{self.name}({str(self.path)!r}, {self.precision}, threads={self.threads})"


class OnnxRuntime(Engine):
    """ONNX Runtime on the CPU."""

    name = package = "onnxruntime"

    def _open(self) -> None:
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3  # errors alone
        self.session = self.runtime.InferenceSession(
            os.fspath(self.path), options, providers=["CPUExecutionProvider"]
        )
        self.input = self.session.get_inputs()[0].name
        self.output = self.session.get_outputs()[0].name

    def _run(self, images: np.ndarray) -> np.ndarray:
        return self.session.run([self.output], {self.input: images})[0]


class OpenVino(Engine):
    """OpenVINO on the CPU. It gets shapes that are fixed, so it compiles the model anew for each batch size."""

    name = package = "openvino"
    precisions = ("fp32", "bf16")

    def _open(self) -> None:
        self.core = self.runtime.Core()
        self.model = self.core.read_model(os.fspath(self.path))
        self.requests: dict[tuple[int, ...], Any] = {}

    def _run(self, images: np.ndarray) -> np.ndarray:
        request = self.requests.get(images.shape) or self._compile(images.shape)
        request.infer([images])
        return np.array(request.get_output_tensor(0).data, dtype=np.float32)

    def _compile(self, shape: tuple[int, ...]) -> Any:
        if len(self.requests) >= BATCHES:
            self.requests.pop(next(iter(self.requests)))
        model = self.model.clone()
        model.reshape(list(shape))
        settings = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[self.precision],
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.requests[shape] = self.core.compile_model(model, "CPU", settings).create_infer_request()
        return self.requests[shape]


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (OnnxRuntime, OpenVino)}


def available() -> list[str]:
    """Names of the engines whose packages are installed."""
    return [name for name, engine in ENGINES.items() if find_spec(engine.package)]


def load(
    path: str | os.PathLike[str],
    engine: str = "onnxruntime",
    *,
    precision: str = "fp32",
    threads: int | None = None,
) -> Engine:
    """Load an ONNX file, such as `export_onnx` writes, into an engine.

    Args:
        path: of the file.
        engine: "onnxruntime" or "openvino".
        precision: what floating-point parts are computed in: "fp32"; OpenVINO also knows "bf16".
        threads: processor threads; those of PyTorch when None.

    Raises:
        ValueError: an engine or precision that there is not, or a file that the engine cannot read.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the engine is not installed.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: choose {' or '.join(map(repr, ENGINES))}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: give at least 1, or None for PyTorch's number")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: write one by deploy.export_onnx(model, path, ...)")
    return ENGINES[engine](path, precision, threads or torch.get_num_threads())


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{name} is missing: pip install "swin-lessons[deploy]"') from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- the chooser


@dataclass(frozen=True)
class Choice:
    """What `fastest` chose, and why."""

    name: str
    run: Callable[[Tensor], Tensor]
    seconds: Mapping[str, float]  # median seconds a call of each candidate that was near enough
    errors: Mapping[str, float]  # of every candidate: largest difference over the reference's largest number
    refused: tuple[str, ...]  # candidates that were not near enough

    def __str__(self) -> str:
        timed = [f"{n}: {1e3 * s:.1f} ms, error {self.errors[n]:.1e}" for n, s in self.seconds.items()]
        out = [f"{n}: error {self.errors[n]:.1e}, too large" for n in self.refused]
        return "\n".join([f"fastest: {self.name}", *timed, *out])


def fastest(
    candidates: Mapping[str, Callable[[Tensor], Tensor]],
    images: Tensor,
    reference: Tensor,
    *,
    tolerance: float = 0.05,
    rounds: int = 7,
) -> Choice:
    """Time candidates in turns and choose the fastest that keeps the outputs.

    Args:
        candidates: engines, prepared models or anything else that maps images to logits, by name.
        images: `(B, C, H, W)`, real ones: noise says little about rounding.
        reference: the logits that the float model gives for them.
        tolerance: how far logits may lie off, relative to the largest of `reference`.
        rounds: of timing.

    Raises:
        ValueError: no candidate is near enough; the message has their errors.
    """
    if not candidates:
        raise ValueError("no candidates to choose from")
    errors = {name: _error(run(images), reference) for name, run in candidates.items()}
    good = {name: run for name, run in candidates.items() if errors[name] <= tolerance}
    if not good:
        worst = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        raise ValueError(f"no candidate is within tolerance={tolerance} of the reference: {worst}")
    race = compare({name: _call(run, images) for name, run in good.items()}, rounds=rounds)
    seconds = {name: timing.median for name, timing in race.timings.items()}
    best = min(seconds, key=seconds.__getitem__)
    refused = tuple(name for name in candidates if name not in good)
    return Choice(best, candidates[best], seconds, errors, refused)


def _call(run: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[], Tensor]:
    return lambda: run(images)


def _error(found: Tensor, reference: Tensor) -> float:
    """Largest difference over the reference's largest number; infinite where something is not finite."""
    if found.shape != reference.shape:
        raise ValueError(
            f"outputs {tuple(found.shape)} do not compare with a reference {tuple(reference.shape)}"
        )
    error = ((found - reference).abs().max() / reference.abs().max().clamp_min(1e-12)).item()
    return error if error == error else float("inf")


def candidates(
    path: str | os.PathLike[str], names: Sequence[str] | None = None, **options: Any
) -> dict[str, Engine]:
    """The file in every installed engine and precision, by name, as candidates for `fastest`.

    Args:
        path: of an ONNX file.
        names: of engines; those that are installed when None.
        options: of `load`.
    """
    chosen = available() if names is None else names
    return {
        f"{name} {precision}": load(path, name, precision=precision, **options)
        for name in chosen
        for precision in ENGINES[name].precisions
    }
