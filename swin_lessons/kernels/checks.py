"""What every operation asks of its arguments, in one wording, before anything is launched.

A kernel gets addresses: it cannot tell that a tensor lies elsewhere, nor that its numbers are whole.
"""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NUMBERS: tuple[Any, ...] = (
    Real,
    torch.SymFloat,
    torch.SymInt,
)  # the last two stand for numbers while PyTorch traces
WHOLE: tuple[Any, ...] = (Integral, torch.SymInt, Tensor)  # what `torch.jit.trace` takes sizes for


def check_tensors(**named: Any) -> None:
    """Refuse what is no dense tensor of floating point, and tensors on several devices.

    Raises:
        ValueError: names the argument, and its type, dtype, layout or device.
    """
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is {x!r:.40}: a tensor is needed")
        if x.dtype not in FLOATING:
            raise ValueError(f"{name} is {x.dtype}: floating point of 16, 32 or 64 bits is needed; cast it")
        if x.layout != torch.strided:
            raise ValueError(f"{name} is {x.layout}: a dense tensor is needed; call to_dense()")
    if len({x.device for x in named.values()}) > 1:
        places = ", ".join(f"{name} on {x.device}" for name, x in named.items())
        raise ValueError(f"{places}: all must be on one device; move them with .to(device)")


def check_number(
    name: str, value: Any, least: float, below: float = float("inf"), *, words: str = ""
) -> None:
    """Refuse what is no number of `least` or more and less than `below`; `words` say what it is.

    Raises:
        ValueError: names the number.
    """
    if not isinstance(value, NUMBERS) or not least <= value < below:  # NaN is not
        limit = "finite" if below == float("inf") else f"less than {below:g}"
        raise ValueError(
            f"{name}={value!r}: {words or 'a number'}, at least {least:g} and {limit}, is needed"
        )


def check_pair(name: str, value: Any, least: int | None = None) -> None:
    """Refuse what is no pair of whole numbers, of `least` or more.

    Raises:
        ValueError: names the value.
    """
    two = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, WHOLE) for v in value)
    if not two or (least is not None and min(value) < least):
        limit = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}={value!r}: two numbers{limit} are needed, whole ones, as (height, width)")


def check_dtype(dtype: Any) -> None:
    """Refuse a dtype of a result that is not of floating point; None is the operation's choice.

    Raises:
        ValueError: names the dtype.
    """
    if dtype is not None and dtype not in FLOATING:
        raise ValueError(f"dtype={dtype!r}: floating point of 16, 32 or 64 bits is needed")
