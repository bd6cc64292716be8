"""Autocast and loss scaling by one word: fp32, bf16 or fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Context in which matrix products run in `precision`; does nothing for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


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
