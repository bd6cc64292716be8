"""Take a model out of training: an inference form in PyTorch, ONNX files for other engines."""

from .onnx import export_onnx
from .prepare import prepare

__all__ = ["export_onnx", "prepare"]
