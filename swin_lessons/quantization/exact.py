"""Products of integers without rounding, whatever the device has: the arithmetic behind the INT8 layers.

fp32 holds every whole number up to 2^24. A sum of products of 8-bit codes passes that after some 1,000 terms, so longer
sums are cut into pieces and added in fp64. int32 holds them all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # up to here, every whole number has its own value
LONGEST = (1 << 31) // (256 * 128)  # terms of a sum in int32: codes are 8 bits, distances from a zero point 9


def exact_product(a: Tensor, b: Tensor, reach: int) -> Tensor:
    """`a @ b` of whole numbers in fp32 or fp64: the exact sum, rounded once to the dtype of `a`.

    Args:
        a, b: `(..., M, K)` and `(..., K, N)`, as `torch.matmul` takes them.
        reach: no |a| · |b| is larger.
    """
    step = max(1, EXACT[a.dtype] // reach)
    if a.shape[-1] <= step:
        return a @ b
    pieces = zip(a.split(step, -1), b.split(step, -2), strict=True)
    return torch.stack([(x @ y).double() for x, y in pieces]).sum(0).to(a.dtype)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 `(M, K)` and `(O, K)` -> int32 `(M, O)`: `x @ weight.T`.

    By `torch._int_mm` where the device multiplies int8 natively and rightly (a CPU with VNNI, a CUDA device), else by
    exact sums in floats.
    """
    M, K = x.shape
    if not (M and K and len(weight)):
        return torch.zeros(M, len(weight), dtype=torch.int32, device=x.device)
    if x.device.type == "cuda":
        return cuda_product(x, weight)
    if x.device.type == "cpu" and torch.cpu._is_vnni_supported():
        if K == 1:  # torch 2.14 then leaves the result unwritten
            x, weight = F.pad(x, (0, 1)), F.pad(weight, (0, 1))
        return torch._int_mm(x, weight.t())
    return _float_product(x, weight)


def _float_product(x: Tensor, weight: Tensor) -> Tensor:
    step = EXACT[torch.float32] // (128 * 128)
    pieces = zip(x.split(step, 1), weight.split(step, 1), strict=True)
    return sum((a.float() @ b.float().t()).int() for a, b in pieces)


def cuda_product(x: Tensor, weight: Tensor) -> Tensor:
    """`torch._int_mm` within cuBLASLt's limits: more than 16 rows, K and O multiples of 8; zeros fill up."""
    (M, K), outputs = x.shape, len(weight)
    rows, depth, columns = max(0, 17 - M), -K % 8, -outputs % 8
    x, weight = F.pad(x, (0, depth, 0, rows)), F.pad(weight, (0, depth, 0, columns))
    return torch._int_mm(x.contiguous(), weight.contiguous().t())[:M, :outputs]


def check_depth(K: int, name: str) -> None:
    """Raise ValueError where a sum of `K` products could pass the range of int32."""
    if K > LONGEST:
        raise ValueError(f"{name} sums {K:,} products: int32 holds {LONGEST:,}; leave it in float (skip)")


# --- INT4 in bytes


def pack_int4(codes: Tensor) -> Tensor:
    """Signed 4-bit codes int8 `(..., K)` -> uint8 `(..., ceil(K / 2))`: the first of two in the low half, as in ONNX.

    An odd K is filled up with a zero.

    Raises:
        ValueError: a code outside -8..7.
    """
    if codes.numel() and (int(codes.min()) < -8 or int(codes.max()) > 7):
        raise ValueError(
            f"codes run from {int(codes.min())} to {int(codes.max())}: 4 bits hold -8 to 7; quantise to 4 bits"
        )
    pairs = F.pad(codes, (0, codes.shape[-1] % 2)).view(torch.uint8).unflatten(-1, (-1, 2)) & 15
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_int4(packed: Tensor, K: int) -> Tensor:
    """Inverse of `pack_int4`: uint8 `(..., ceil(K / 2))` -> int8 `(..., K)`."""
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :K]
    return (halves.view(torch.int8) ^ 8) - 8  # the fourth bit is the sign
