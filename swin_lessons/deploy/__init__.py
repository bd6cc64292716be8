"""Take a model out of training: an inference form in PyTorch, ONNX files, and the engines that run them."""

from .engines import Choice, Engine, available, candidates, fastest, load
from .onnx import export_onnx
from .prepare import prepare
from .prepared import PreparedSwin

__all__ = [
    "Choice",
    "Engine",
    "PreparedSwin",
    "available",
    "candidates",
    "export_onnx",
    "fastest",
    "load",
    "prepare",
]
