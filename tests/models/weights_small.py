"""Small models of ours and of the producers, all parameters random, for the tests of loading weights."""

from dataclasses import replace

import torch
from swin_cases import TINY
from torch import Tensor, nn

from swin_lessons.models.swin import SwinTransformer

SMALL = TINY


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, so that no test passes on zeros or ones; fp64, evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(0.3 * noise + (1.0 if param.ndim == 1 else 0.0))
    return model.double().eval()


def swin(
    version: int = 1, seed: int = 0, *, features_only=False, out_indices=None, out_norm=False, **changes
):
    config = replace(SMALL, version=version, **changes)
    model = SwinTransformer(config, features_only=features_only, out_indices=out_indices, out_norm=out_norm)
    return randomise(model, seed)


def images(B: int = 2, in_chans: int = 3, size: int = 32) -> Tensor:
    return torch.randn(
        B, in_chans, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def exact_coordinates(model: nn.Module) -> nn.Module:
    """The other libraries round V2's coordinates (window 4) to fp32: replace them by equation 4 in fp64."""
    offset = torch.arange(-3, 4, dtype=torch.float64)
    axis = torch.sign(offset) * torch.log2(1 + 8 * offset.abs() / 3) / 3
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1)[None]
    for module in model.modules():
        if hasattr(module, "relative_coords_table"):
            torch.testing.assert_close(module.relative_coords_table, grid, atol=1e-6, rtol=0)
            module.relative_coords_table = grid
    return model


def timm_swin(version: int = 1, **changes) -> nn.Module:
    from timm.models import swin_transformer, swin_transformer_v2

    kinds = swin_transformer.SwinTransformer, swin_transformer_v2.SwinTransformerV2
    kwargs = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
        "num_classes": 7,
    }
    return exact_coordinates(randomise(kinds[version - 1](**kwargs | changes), seed=3))


def torchvision_swin(version: int = 1) -> nn.Module:
    from torchvision.models import swin_transformer as tv

    parts = (
        {"block": tv.SwinTransformerBlock, "downsample_layer": tv.PatchMerging},
        {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2},
    )[version - 1]
    sizes = {
        "patch_size": [4, 4],
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [4, 4],
    }
    return exact_coordinates(randomise(tv.SwinTransformer(**sizes, num_classes=7, **parts), seed=3))


def transformers_swin(version: int = 1, kind: str = "{}ForImageClassification", **changes) -> nn.Module:
    import transformers

    name = ("Swin", "Swinv2")[version - 1]
    sizes = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    config = getattr(transformers, f"{name}Config")(**sizes, num_labels=7, **changes)
    return exact_coordinates(randomise(getattr(transformers, kind.format(name))(config), seed=3))


def official(model: SwinTransformer) -> dict[str, Tensor]:
    """Our parameters under Microsoft's names, with the buffers that its files carry."""
    state = {}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) - 1)
        if parts[:2] == ["head", "fc"]:
            parts.pop(1)
        state[".".join(parts)] = value.clone()
        if name.endswith("attn.proj.weight"):
            prefix = name.removesuffix("proj.weight")
            state[prefix + "relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
            state[prefix + "relative_coords_table"] = torch.zeros(1, 7, 7, 2)
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    return state
