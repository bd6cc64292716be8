"""The published models as data: names as in timm where timm has the model.

Sources: arXiv:2103.14030 table 1 and section 3.3; arXiv:2111.09883 section 3.6; the authors' configuration files.
"""

from typing import Any

from .config import SwinConfig, pair

SIZES = {  # embed_dim, depths, num_heads
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "large": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
    "huge": (352, (2, 2, 18, 2), (11, 22, 44, 88)),
    "giant": (512, (2, 2, 42, 4), (16, 32, 64, 128)),
}
PRETRAINED_12 = (12, 12, 12, 6)  # at 192 px the last stage's map is 6 x 6, and so was its window


def _config(size: str, version: int, img_size: int, window: int, **more) -> SwinConfig:
    embed_dim, depths, num_heads = SIZES[size]
    return SwinConfig(
        version=version,
        img_size=pair(img_size),
        window_size=pair(window),
        embed_dim=embed_dim,
        depths=depths,
        num_heads=num_heads,
        **more,
    )


def _v1() -> dict[str, SwinConfig]:
    variants = {
        f"swin_{size}_patch4_window{window}_{img_size}": _config(size, 1, img_size, window)
        for size in ("tiny", "small", "base", "large")
        for img_size, window in ((224, 7), (384, 12))
    }
    variants["swin_tiny_c24_patch4_window8_256"] = SwinConfig(
        img_size=(256, 256), window_size=(8, 8), num_heads=(4, 8, 16, 32)
    )
    return variants


def _v2() -> dict[str, SwinConfig]:
    variants = {
        f"swinv2_{size}_window{window}_256": _config(size, 2, 256, window)
        for size in ("tiny", "small", "base")
        for window in (8, 16)
    }
    for size in ("base", "large"):
        variants[f"swinv2_{size}_window12_192"] = _config(size, 2, 192, 12)
        for window, img_size in ((16, 256), (24, 384)):
            name = f"swinv2_{size}_window12to{window}_192to{img_size}"
            variants[name] = _config(size, 2, img_size, window, pretrained_window_sizes=PRETRAINED_12)
    # The paper adds a LayerNorm to the main branch every six blocks of these two, without saying whether a stage or
    # the network is counted; no weights were published. `extra_norm_every=6` adds them, counted in each stage.
    for size in ("huge", "giant"):
        variants[f"swinv2_{size}_window12_192"] = _config(size, 2, 192, 12)
    return variants


def _micro() -> dict[str, SwinConfig]:
    """Small enough for a laptop: they start the lessons in seconds. Trained weights are in the zoo."""
    fmnist: dict[str, Any] = {
        "img_size": (32, 32),
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 64,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": (4, 4),
        "pretrained_window_sizes": (0, 0),
    }
    scenes = fmnist | {"img_size": (64, 64), "in_chans": 3, "num_classes": 8}
    return {
        "swin_micro_fmnist": SwinConfig(version=1, **fmnist),
        "swinv2_micro_fmnist": SwinConfig(version=2, **fmnist),
        "swin_micro_scenes": SwinConfig(version=1, **scenes),
    }


SWIN_VARIANTS: dict[str, SwinConfig] = {**_v1(), **_v2(), **_micro()}
