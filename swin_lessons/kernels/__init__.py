"""Fused operations for training and inference, one file a kernel.

A file holds the maths in PyTorch, the Triton kernel, its autograd, what it moves, and its launch limits. `impl="auto"`
takes Triton on a GPU that it compiles for, PyTorch elsewhere.
"""

from .adamw import FusedAdamW, adamw_
from .int8 import dequantize, quantize
from .int8_linear import int8_linear
from .int8_window_attention import int8_window_attention
from .layer_norm import add_layer_norm, layer_norm
from .layer_norm_quantize import layer_norm_quantize
from .linear import linear, linear_residual, qkv_linear
from .linear_gelu import linear_gelu
from .report import compile_report
from .reverse_unshift import reverse_unshift
from .shift_partition import shift_partition
from .window_attention import window_attention

__all__ = [
    "FusedAdamW",
    "adamw_",
    "add_layer_norm",
    "compile_report",
    "dequantize",
    "int8_linear",
    "int8_window_attention",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "linear_gelu",
    "linear_residual",
    "qkv_linear",
    "quantize",
    "reverse_unshift",
    "shift_partition",
    "window_attention",
]
