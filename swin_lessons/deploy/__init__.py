"""Take a model out of PyTorch: ONNX files for ONNX Runtime, on a server or in a browser."""

from .onnx import export_onnx

__all__ = ["export_onnx"]
