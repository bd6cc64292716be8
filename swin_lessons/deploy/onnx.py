"""A model as one ONNX file, with its attention as further outputs if asked."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_lessons.models.attention_maps import attention_inputs, attention_map
from swin_lessons.training.files import atomic_write, naming_remedy

from .qdq import with_qdq

INPUT, LOGITS = "images", "logits"


class WithAttention(nn.Module):
    """A model that also returns the attention of each of its window blocks: `(logits, map, map, ...)`.

    Maps are `(B, num_heads, HW, HW)`, as in `attention_maps`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with attention_inputs(self.model) as seen:
            logits = self.model(x)
        return logits, *(attention_map(attn, given).weights for attn, given in seen)


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    input_size: tuple[int, int, int],
    attention: bool = False,
) -> Path:
    """Write `model`, in evaluation mode, as one ONNX file whose batch size is free.

    The input is called "images", `(B, C, H, W)`; outputs are "logits" and, with `attention`, "attention_1",
    "attention_2", ... for each window block.

    Args:
        model: on the CPU; its mode and parameters stay as they are.
        path: of the file; it is written whole or not at all.
        input_size: (C, H, W).
        attention: return the weights of all blocks, too. Windows must tile every map.

    Raises:
        ModuleNotFoundError: the packages of the extra `deploy` are missing.
        ValueError: an input size that is none, or that the model refuses.
        OSError: the file cannot be written; the message says what to do.
    """
    check_packages()
    if len(input_size) != 3 or any(n < 1 for n in input_size):
        raise ValueError(f"input_size={input_size}: give (channels, height, width)")
    path, modes = Path(path), [(m, m.training) for m in model.modules()]
    module = with_qdq(model.eval()) if hasattr(model, "quantization") else model.eval()
    module = WithAttention(module).eval() if attention else module
    try:
        program = _program(module, torch.zeros(2, *input_size))
    finally:
        for layer, training in modes:
            layer.training = training
    _forget_origins(program.model)
    with naming_remedy(path), atomic_write(path) as part:
        program.save(part, external_data=False)
    return path


@torch.no_grad()
def _program(module: nn.Module, x: Tensor) -> Any:
    outputs = module(x)  # a wrong size is the model's own error, not the exporter's
    count = len(outputs) - 1 if isinstance(outputs, tuple) else 0
    return torch.onnx.export(
        module,
        (x,),
        dynamo=True,
        input_names=[INPUT],
        output_names=[LOGITS, *(f"attention_{i}" for i in range(1, count + 1))],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},),
        verbose=False,
    )


def _forget_origins(model: Any) -> None:
    """Drop the exporter's notes: call stacks, full of this machine's paths, that are half of a small file."""
    for graph in (model.graph, *model.functions.values()):
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.metadata_props.clear()
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *graph.outputs, *getattr(graph, "initializers", {}).values()):
            value.metadata_props.clear()


def check_packages() -> None:
    """Raise ModuleNotFoundError, with the extra's name, where the exporter's packages are missing."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f'{missing[0]} is missing: pip install "swin-lessons[deploy]"')
