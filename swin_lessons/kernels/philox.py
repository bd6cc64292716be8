"""Dropout by seed: the numbers of Triton's `tl.rand`, worked out by PyTorch.

A counter-based generator needs no state: the same seed and offset give the same number on any device, so a backward
pass throws the dice of the forward pass again instead of storing what they showed. Source: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011), Philox-4x32 with 10 rounds.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_RAISE = (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, offset: Tensor) -> Tensor:
    """One 32-bit word for each `offset` (int64): the first of the four that the generator makes."""
    key = [seed & _WORD, seed >> 32 & _WORD]
    c0, c1 = offset & _WORD, offset >> 32
    c2 = c3 = torch.zeros_like(offset)
    for _ in range(10):
        high, low = _product(c0, _MULTIPLY[0])
        other_high, other_low = _product(c2, _MULTIPLY[1])
        c0, c1, c2, c3 = other_high ^ c1 ^ key[0], other_low, high ^ c3 ^ key[1], low
        key = [(k + raised) & _WORD for k, raised in zip(key, _RAISE, strict=True)]
    return c0


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a product of two 32-bit words, which need not fit the 63 bits of an int64."""
    high = (factor * (x >> 16) + (factor * (x & 0xFFFF) >> 16)) >> 16
    return high, (factor * x) & _WORD


def uniform(seed: int, offset: Tensor) -> Tensor:
    """Numbers in [0, 1), fp32, as `tl.rand(seed, offset)` gives them."""
    word = philox(seed, offset)
    return torch.where(word > _WORD >> 1, _WORD - word, word).float() * 4.6566127342e-10
