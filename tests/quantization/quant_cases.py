"""Small models and batches for the tests of quantisation."""

from functools import lru_cache

import torch
from swin_cases import images, scramble, swin
from torch import Tensor, nn

from swin_lessons.models.vit import VisionTransformer, ViTConfig
from swin_lessons.quantization import QuantConfig, ptq

KINDS = ("v1", "v2", "vit")


@lru_cache
def _model(kind: str) -> nn.Module:
    if kind == "vit":
        config = ViTConfig(img_size=32, patch_size=8, num_classes=7, embed_dim=24, depth=2, num_heads=2)
        return scramble(VisionTransformer(config), 3).eval()
    return swin(int(kind[1]), dtype=torch.float32).eval()


def model(kind: str = "v1") -> nn.Module:
    """A scrambled tiny model in fp32 and evaluation mode; shared, so tests must not change it."""
    return _model(kind)


def batches(count: int = 2, size: int = 3, seed: int = 10) -> list[Tensor]:
    """`count` batches of images (size, 3, 32, 32)."""
    return [images(size, 3, 32, 32, seed=seed + i, dtype=torch.float32) for i in range(count)]


def quantised(kind: str = "v1", preset: str = "linear", **changes) -> nn.Module:
    """A calibrated copy of a tiny model."""
    changes.setdefault("activation_observer", "minmax")
    return ptq(model(kind), batches(), QuantConfig.preset(preset, **changes))


@torch.no_grad()
def logits(model: nn.Module, x: Tensor | None = None) -> Tensor:
    return model(batches(1, seed=50)[0] if x is None else x)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
