"""What the matrix products of a run compute in, by one word: fp32, tf32, bf16 or fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Context in which matrix products run in bf16 or fp16; does nothing for fp32 and tf32.

    What sums over many values stays in fp32: the statistics of LayerNorm, softmax, cosines, the loss.
    """
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """What fp32 matrix products and convolutions are within: TF32 for "tf32", true fp32 for every other word.

    TF32 rounds the factors to 10 bits of mantissa. CUDA devices have it from Ampere (8.0) on; elsewhere "tf32"
    computes in fp32. Both settings of PyTorch, which are global, are as before at the end.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def grad_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """Loss scaler, on for fp16 alone: bf16 has the exponent range of fp32."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def best_precision(device: torch.device) -> str:
    """bf16 where the hardware multiplies it natively, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    if device.type == "cpu" and _cpu_has_bf16():
        return "bf16"
    return "fp32"


def _cpu_has_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)
