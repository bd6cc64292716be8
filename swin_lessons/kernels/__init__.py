"""Fused operations for training and inference, one file a kernel.

A file holds the maths in PyTorch, the Triton kernel, its autograd, what it moves, and its launch limits. `impl="auto"`
takes Triton on a GPU that it compiles for, PyTorch elsewhere.
"""

from .layer_norm import add_layer_norm, layer_norm
from .report import compile_report
from .window_attention import window_attention

__all__ = ["add_layer_norm", "compile_report", "layer_norm", "window_attention"]
