"""The same Swin Transformer from four libraries, with the same weights.

timm's model is the reference: it is drawn at random (with V2's norm gains and logit scales randomised, since at
initialisation V2's blocks are the identity and nothing would be compared), and the others get copies of its weights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LIBRARIES", "SwinSpec", "build", "reference_model"]

SIZES = {  # embed_dim, depths, heads of the first stage
    "tiny": (96, (2, 2, 6, 2), 3),
    "small": (96, (2, 2, 18, 2), 3),
    "base": (128, (2, 2, 18, 2), 4),
    "large": (192, (2, 2, 18, 2), 6),
}
StateDict = dict[str, Tensor]


@dataclass(frozen=True)
class SwinSpec:
    """A Swin Transformer that every library can build: square images and windows, no DropPath."""

    name: str
    version: int
    img_size: int
    window_size: int
    embed_dim: int
    depths: tuple[int, ...]
    heads: int  # of the first stage; each stage doubles them
    in_chans: int = 3
    num_classes: int = 1000

    @classmethod
    def from_name(cls, name: str) -> SwinSpec:
        """From timm's name of the variant, such as swin_tiny_patch4_window7_224 or swinv2_base_window16_256.

        Raises:
            ValueError: the name is not of this form.
        """
        found = re.fullmatch(r"swin(v2)?_(tiny|small|base|large)_(?:patch4_)?window(\d+)_(\d+)", name)
        if not found:
            raise ValueError(
                f"{name!r} is not a model that all libraries share: "
                "use a name such as swin_tiny_patch4_window7_224 or swinv2_tiny_window8_256"
            )
        v2, size, window, img = found.groups()
        return cls(name, 2 if v2 else 1, int(img), int(window), *SIZES[size])

    @property
    def num_heads(self) -> tuple[int, ...]:
        """Heads of each stage."""
        return tuple(self.heads << i for i in range(len(self.depths)))


def reference_model(spec: SwinSpec, seed: int = 0) -> nn.Module:
    """timm's model with every parameter random, at values a trained network could have."""
    model = _timm(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(_random_value(name, noise))
    return model


def _random_value(name: str, noise: Tensor) -> Tensor:
    if name.endswith("logit_scale"):
        return 2.3 + 0.3 * noise  # initialised at ln 10
    if name.endswith("relative_position_bias_table") or "cpb_mlp" in name:
        return 0.5 * noise if noise.ndim > 1 else 0.1 * noise
    if noise.ndim == 1:
        return (1.0 if re.search(r"norm\d?\.weight$", name) else 0.0) + 0.1 * noise
    return noise / noise[0].numel() ** 0.5


def build(library: str, spec: SwinSpec, weights: StateDict) -> nn.Module:
    """The model of "ours", "timm", "torchvision" or "transformers" with timm's `weights`.

    Raises:
        ValueError: unknown library, or weights that do not fit.
        ImportError: the library is not installed; the message says how to get it.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library={library!r} is unknown: use {', '.join(LIBRARIES)}")
    make, convert = LIBRARIES[library]
    model = make(spec)
    missing, unexpected = model.load_state_dict(convert(weights, spec), strict=False)
    missing = [name for name in missing if not name.endswith(("relative_position_index", "coords_table"))]
    if missing or unexpected:
        raise ValueError(f"{library}: weights do not fit; missing {missing[:3]}, unexpected {unexpected[:3]}")
    return model


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f'{name} is not installed: pip install "swin-lessons[peers]"') from error


# ----------------------------------------------------------------------------------------------------
# Models


def _ours(spec: SwinSpec) -> nn.Module:
    from swin_lessons.models import SwinConfig, SwinTransformer

    config = SwinConfig(
        version=spec.version,
        img_size=(spec.img_size, spec.img_size),
        in_chans=spec.in_chans,
        num_classes=spec.num_classes,
        embed_dim=spec.embed_dim,
        depths=spec.depths,
        num_heads=spec.num_heads,
        window_size=(spec.window_size, spec.window_size),
        pretrained_window_sizes=(0,) * len(spec.depths),
    )
    return SwinTransformer(config)


def _timm(spec: SwinSpec) -> nn.Module:
    if spec.version == 1:
        cls = _require("timm.models.swin_transformer").SwinTransformer
    else:
        cls = _require("timm.models.swin_transformer_v2").SwinTransformerV2
    return cls(
        img_size=spec.img_size,
        window_size=spec.window_size,
        embed_dim=spec.embed_dim,
        depths=spec.depths,
        num_heads=spec.num_heads,
        in_chans=spec.in_chans,
        num_classes=spec.num_classes,
        drop_path_rate=0.0,
    )


def _torchvision(spec: SwinSpec) -> nn.Module:
    swin = _require("torchvision.models.swin_transformer")
    v2 = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    model = swin.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=spec.embed_dim,
        depths=list(spec.depths),
        num_heads=list(spec.num_heads),
        window_size=[spec.window_size] * 2,
        stochastic_depth_prob=0.0,
        num_classes=spec.num_classes,
        **(v2 if spec.version == 2 else {}),
    )
    if spec.in_chans != 3:
        model.features[0][0] = nn.Conv2d(spec.in_chans, spec.embed_dim, 4, stride=4)
    return model


def _transformers(spec: SwinSpec) -> nn.Module:
    transformers = _require("transformers")
    name = "Swin" if spec.version == 1 else "Swinv2"
    config = getattr(transformers, f"{name}Config")(
        image_size=spec.img_size,
        patch_size=4,
        num_channels=spec.in_chans,
        embed_dim=spec.embed_dim,
        depths=list(spec.depths),
        num_heads=list(spec.num_heads),
        window_size=spec.window_size,
        num_labels=spec.num_classes,
        drop_path_rate=0.0,
    )
    return getattr(transformers, f"{name}ForImageClassification")(config)


# ----------------------------------------------------------------------------------------------------
# Weights


def _same(weights: StateDict, spec: SwinSpec) -> StateDict:
    return weights


def _rename(weights: StateDict, rules: list[tuple[str, Any]]) -> StateDict:
    renamed = {}
    for name, value in weights.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def _to_torchvision(weights: StateDict, spec: SwinSpec) -> StateDict:
    out = dict(weights)
    for name in [n for n in weights if n.endswith("q_bias")]:  # V2: one bias, with zeros for the keys
        prefix = name.removesuffix("q_bias")
        q, v = out.pop(name), out.pop(f"{prefix}v_bias")
        out[f"{prefix}qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    return _rename(
        out,
        [
            (r"^patch_embed\.proj", "features.0.0"),
            (r"^patch_embed\.norm", "features.0.2"),
            (r"^layers\.(\d+)\.downsample", lambda m: f"features.{2 * int(m[1])}"),
            (r"^layers\.(\d+)\.blocks", lambda m: f"features.{2 * int(m[1]) + 1}"),
            (r"mlp\.fc1", "mlp.0"),
            (r"mlp\.fc2", "mlp.3"),
            (r"^head\.fc", "head"),
        ],
    )


def _to_transformers(weights: StateDict, spec: SwinSpec) -> StateDict:
    names = TRANSFORMERS_NAMES[spec.version]
    trunk = "swin" if spec.version == 1 else "swinv2"
    common = [
        (r"^patch_embed\.proj", f"{trunk}.embeddings.patch_embeddings.projection"),
        (r"^patch_embed\.norm", f"{trunk}.embeddings.norm"),
        (r"^layers\.(\d+)\.downsample", lambda m: f"{trunk}.encoder.layers.{int(m[1]) - 1}.downsample"),
        (r"^layers\.", f"{trunk}.encoder.layers."),
        (r"^norm\.", f"{trunk}.layernorm."),
        (r"\.norm1\.", ".layernorm_before."),
        (r"\.norm2\.", ".layernorm_after."),
        (r"^head\.fc", "classifier"),
    ]
    return _rename(_split_qkv(weights), common + names)


def _split_qkv(weights: StateDict) -> StateDict:
    """qkv -> q, k, v; names end in attn.{q,k,v}.{weight,bias}."""
    out = {}
    for name, value in weights.items():
        if ".qkv." in name:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                out[name.replace(".qkv.", f".{part}.")] = piece
        else:
            out[re.sub(r"\.([qv])_bias$", r".\1.bias", name)] = value
    return out


TRANSFORMERS_NAMES: dict[int, list[tuple[str, Any]]] = {
    1: [
        (r"attn\.([qkv])\.", r"attention.\1_proj."),
        (r"attn\.proj\.", "attention.o_proj."),
        (r"attn\.(relative_position_bias_table)", r"attention.relative_position_bias.\1"),
    ],
    2: [
        (r"attn\.q\.", "attention.self.query."),
        (r"attn\.k\.", "attention.self.key."),
        (r"attn\.v\.", "attention.self.value."),
        (r"attn\.proj\.", "attention.output.dense."),
        (r"attn\.cpb_mlp", "attention.self.continuous_position_bias_mlp"),
        (r"attn\.logit_scale", "attention.self.logit_scale"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    ],
}

LIBRARIES: dict[str, tuple[Callable[[SwinSpec], nn.Module], Callable[[StateDict, SwinSpec], StateDict]]] = {
    "ours": (_ours, _same),
    "timm": (_timm, _same),
    "torchvision": (_torchvision, _to_torchvision),
    "transformers": (_transformers, _to_transformers),
}
