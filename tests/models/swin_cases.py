"""Small Swins with every parameter random, and how the tests compare two of them."""

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from swin_lessons.models.attention import WindowAttention
from swin_lessons.models.config import SwinConfig
from swin_lessons.models.swin import SwinTransformer

TINY = SwinConfig(
    img_size=(32, 32),
    num_classes=7,
    embed_dim=24,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=(4, 4),
    pretrained_window_sizes=(0, 0),
)


def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random: norm gains near 1, cosine scales near 10, the others as wide as they need to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if "logit_scale" in name:
                p.copy_(math.log(10) + 0.5 * noise)
            elif "bias_table" in name or "absolute" in name:
                p.copy_(noise)
            elif p.ndim == 1:
                gain = name.endswith("weight")
                p.copy_(0.3 * noise + (1.0 if gain else 0.0))
            else:
                p.copy_(noise * p[0].numel() ** -0.5)
    return model


def swin(
    version: int = 1, seed: int = 0, dtype=torch.float64, features_only=False, out_indices=None, **changes
):
    """A scrambled TINY in training mode, in fp64."""
    stages = len(changes.get("depths", TINY.depths))
    changes = {"pretrained_window_sizes": (0,) * stages} | changes
    config = replace(TINY, version=version, **changes)
    model = SwinTransformer(config, features_only=features_only, out_indices=out_indices)
    return scramble(model, seed).to(dtype)


def images(*shape: int, seed: int = 1, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attentions(model: nn.Module) -> list[WindowAttention]:
    return [m for m in model.modules() if isinstance(m, WindowAttention)]


def readable(model: nn.Module) -> nn.Module:
    """A copy that takes the readable path with explicit attention."""
    model = copy.deepcopy(model)
    for attn in attentions(model):
        attn.attention = "reference"
    return model


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    """Largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape
    assert torch.isfinite(theirs).all()
    error = (ours - theirs).abs().max().item()
    assert error <= tolerance * theirs.abs().max().clamp_min(1e-6).item(), error


def exact_coordinates(model: nn.Module) -> nn.Module:
    """Other libraries round V2's coordinates to fp32 before they reach fp64: put the exact ones."""
    for module in model.modules():
        if hasattr(module, "relative_coords_table"):
            table = module.relative_coords_table
            trained = getattr(module, "pretrained_window_size", (0, 0))
            axes = [_axis(n // 2 + 1, before) for n, before in zip(table.shape[1:3], trained, strict=True)]
            exact = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)[None]
            torch.testing.assert_close(table.double(), exact, atol=1e-6, rtol=0)
            module.relative_coords_table = exact.to(next(model.parameters()).dtype)
    return model


def _axis(window: int, trained: int) -> Tensor:
    offsets = [8 * d / max((trained or window) - 1, 1) for d in range(1 - window, window)]
    return torch.tensor(
        [math.copysign(math.log(1 + abs(d)) / math.log(8), d) for d in offsets], dtype=torch.float64
    )
