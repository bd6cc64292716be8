"""DeiT: the plain Vision Transformer that Swin is compared with (Touvron et al. 2021, arXiv:2012.12877).

One patch embedding, `depth` equal blocks with global attention, one head. The distilled variants carry a
second token and a second head. Parameter names equal timm's, so its weights load with strict=True.
Shapes: B batch, P prefix tokens (class, distillation), N patches, C embed_dim, h heads, d = C // h.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import check_numbers
from .layers import DropPath, Mlp

ATTENTION = ("auto", "reference", "sdpa")


@dataclass(frozen=True)
class ViTConfig:
    """Everything that shapes a VisionTransformer. Sizes are in pixels."""

    img_size: int | tuple[int, int] = 224
    patch_size: int = 16
    in_chans: int = 3
    num_classes: int = 1000  # 0: no head, the model returns the pooled features (B, C)
    embed_dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    distilled: bool = False
    drop_path_rate: float = 0.0  # rate of the last block; the rate grows linearly from 0
    features_only: bool = False
    out_indices: tuple[int, ...] | None = None  # blocks whose tokens are returned; None: four, evenly spaced
    checkpointing: bool = False
    attention: str = "auto"
    init: str = "trunc_normal"  # or "xavier", which learns faster at micro widths

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.attention not in ATTENTION:
            raise ValueError(f"attention={self.attention!r} is unknown to DeiT: choose one of {ATTENTION}")
        if self.init not in ("trunc_normal", "xavier"):
            raise ValueError(f"init={self.init!r} is unknown: choose 'trunc_normal' or 'xavier'")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim={self.embed_dim} does not split into num_heads={self.num_heads}: "
                "choose a multiple of num_heads"
            )
        if self.features_only and self.distilled:
            raise ValueError("features_only has no use for distilled=True: build the plain variant")
        self.grid_size  # noqa: B018  (raises early on a bad image size)

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width in pixels."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches along height and width."""
        height, width = self.image_hw
        if height < 1 or width < 1 or height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"img_size={self.img_size} does not split into patches of {self.patch_size} px: "
                f"choose multiples of {self.patch_size}"
            )
        return height // self.patch_size, width // self.patch_size

    @property
    def num_prefix_tokens(self) -> int:
        """1 (class) or 2 (class, distillation)."""
        return 2 if self.distilled else 1


_TINY = ViTConfig(embed_dim=192, num_heads=3)
_SMALL = ViTConfig(embed_dim=384, num_heads=6)
_BASE = ViTConfig(embed_dim=768, num_heads=12)

VIT_VARIANTS: dict[str, ViTConfig] = {
    "deit_tiny_patch16_224": _TINY,
    "deit_small_patch16_224": _SMALL,
    "deit_base_patch16_224": _BASE,
    "deit_base_patch16_384": replace(_BASE, img_size=384),
    "deit_tiny_distilled_patch16_224": replace(_TINY, distilled=True),
    "deit_small_distilled_patch16_224": replace(_SMALL, distilled=True),
    "deit_base_distilled_patch16_224": replace(_BASE, distilled=True),
    "deit_base_distilled_patch16_384": replace(_BASE, distilled=True, img_size=384),
    # lesson size: Fashion-MNIST, 28 px padded to 32
    "deit_micro_fmnist": ViTConfig(
        img_size=32,
        patch_size=4,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=5,
        num_heads=2,
        init="xavier",
    ),
}


def resample_pos_embed(
    pos_embed: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Resize position embeddings (1, P + N, C) to a new patch grid: bicubic, antialiased, in fp32 or wider.

    Prefix tokens have no place on the grid and are kept as they are.
    """
    if old_grid == new_grid:
        return pos_embed
    prefix, grid = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    wide = torch.promote_types(grid.dtype, torch.float32)
    grid = grid.to(wide).reshape(1, *old_grid, -1).permute(0, 3, 1, 2)  # (1, C, H, W)
    grid = F.interpolate(grid, size=new_grid, mode="bicubic", antialias=True)
    grid = grid.flatten(2).transpose(1, 2).to(pos_embed.dtype)  # (1, N, C)
    return torch.cat([prefix, grid], dim=1)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v, written out. q, k, v and the result: (B, h, P + N, d)."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return logits.softmax(dim=-1) @ v


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each to C numbers: (B, in_chans, H, W) -> (B, N, C)."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention over all tokens: (B, P + N, C) -> (B, P + N, C)."""

    def __init__(self, dim: int, num_heads: int, attention: str = "auto") -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attend = reference_attention if attention == "reference" else F.scaled_dot_product_attention
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, h, N, d)
        x = self.attend(q, k, v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    """Pre-norm Transformer block: x + attention(LN x), then x + MLP(LN x)."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        dim = config.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, config.num_heads, config.attention)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """DeiT. Images (B, in_chans, H, W) -> logits (B, num_classes).

    Distilled models average their two heads; with `distilled_training` set they return both while training:
    (class logits, distillation logits). `features_only` models return a list of (B, C, H/p, W/p), the patch
    tokens after the blocks in `out_indices`, before the final norm (as timm's do).

    Raises:
        ValueError: an image of another size (call `set_input_size`) or another channel count.
    """

    pos_embed: nn.Parameter
    dist_token: nn.Parameter | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.features_only = config.features_only
        self.num_classes = 0 if config.features_only else config.num_classes
        self.distilled_training = False
        self.out_indices = _out_indices(config)
        dim, P = config.embed_dim, config.num_prefix_tokens
        height, width = config.grid_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, P + height * width, dim))
        self.dist_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.distilled else None
        self.patch_embed = PatchEmbed(config.patch_size, config.in_chans, dim)
        # features-only: no block, norm or head that gets no gradient
        depth = max(self.out_indices) + 1 if config.features_only else config.depth
        rates = [config.drop_path_rate * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.Sequential(*(Block(config, rates[i]) for i in range(depth)))
        self.norm = nn.Identity() if config.features_only else nn.LayerNorm(dim, eps=1e-6)
        self.head = self._new_head()
        self.head_dist = self._new_head() if config.distilled else None
        self.reset_parameters()

    def _new_head(self) -> nn.Module:
        return nn.Linear(self.config.embed_dim, self.num_classes) if self.num_classes else nn.Identity()

    def reset_parameters(self) -> None:
        """Fresh weights: trunc_normal(0.02) as DeiT, or Xavier; zero biases."""
        self.patch_embed.proj.reset_parameters()
        for param in (self.cls_token, self.pos_embed, self.dist_token):
            if param is not None:
                nn.init.trunc_normal_(param, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                self._init_linear(module)

    def _init_linear(self, linear: nn.Linear) -> None:
        if self.config.init == "xavier":
            nn.init.xavier_uniform_(linear.weight)
        else:
            nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)

    # --- forward ---

    def embed(self, x: Tensor) -> Tensor:
        """Images to tokens with prefix and position: (B, in_chans, H, W) -> (B, P + N, C)."""
        _check_input(x.shape, self.config.in_chans, self.config.image_hw)
        x = self.patch_embed(x)
        prefix = [self.cls_token] if self.dist_token is None else [self.cls_token, self.dist_token]
        tokens = [token.expand(x.shape[0], -1, -1) for token in prefix]
        return torch.cat([*tokens, x], dim=1) + self.pos_embed

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """One block, recomputed in backward when `config.checkpointing`."""
        if self.config.checkpointing and self.training:
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def forward_tokens(self, x: Tensor) -> Tensor:
        """Every token after the final norm, prefix first: (B, P + N, C)."""
        x = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.norm(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Patch tokens after the final norm, on their grid: (B, H/p, W/p, C)."""
        return self._to_grid(self.forward_tokens(x))

    def forward_head(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Prefix tokens of (B, P + N, C) to logits (B, num_classes)."""
        logits = self.head(tokens[:, 0])
        if self.head_dist is None:
            return logits
        logits_dist = self.head_dist(tokens[:, 1])
        if self.distilled_training and self.training:
            return logits, logits_dist
        return (logits + logits_dist) / 2

    def forward_pyramid(self, x: Tensor) -> list[Tensor]:
        """Patch tokens after each block of `out_indices`: a list of (B, C, H/p, W/p)."""
        x = self.embed(x)
        features = []
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, x)
            if i in self.out_indices:
                features.append(self._to_grid(x).permute(0, 3, 1, 2))
        return features

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor] | list[Tensor]:
        if self.features_only:
            return self.forward_pyramid(x)
        return self.forward_head(self.forward_tokens(x))

    def _to_grid(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.config.num_prefix_tokens :].unflatten(1, self.config.grid_size)

    # --- what a user changes after building ---

    @torch.no_grad()
    def set_input_size(self, img_size: int | tuple[int, int], window_size: None = None) -> None:
        """Take images of another size (pixels): position embeddings are resized, all else stays.

        A no-op at the current size. `window_size` is there for Swin's signature: DeiT has no windows.
        """
        if window_size is not None:
            raise ValueError(f"window_size={window_size}: DeiT has no windows, leave it out")
        new = replace(self.config, img_size=img_size)
        resized = resample_pos_embed(
            self.pos_embed, self.config.grid_size, new.grid_size, new.num_prefix_tokens
        )
        if resized is not self.pos_embed:
            self.pos_embed = nn.Parameter(resized, requires_grad=self.pos_embed.requires_grad)
        self.config = new

    def reset_classifier(self, num_classes: int) -> None:
        """Fresh head(s) for `num_classes` classes, on the same device and dtype; 0 removes them."""
        if self.features_only:
            raise ValueError("a features_only model has no classifier: build it with features_only=False")
        self.num_classes = num_classes
        self.config = replace(self.config, num_classes=num_classes)
        for name in ("head", "head_dist") if self.config.distilled else ("head",):
            head = self._new_head().to(self.pos_embed)
            if isinstance(head, nn.Linear):
                self._init_linear(head)
            setattr(self, name, head)

    # --- what an optimiser asks ---

    def no_weight_decay(self) -> set[str]:
        """Parameters to leave out of weight decay, beside all one-dimensional ones."""
        embeddings = {"cls_token", "dist_token", "pos_embed"}
        return embeddings & dict(self.named_parameters()).keys()

    @property
    def num_layers(self) -> int:
        """Blocks in all: `layer_id` runs from 0 (stem) to `num_layers + 1` (norm and heads)."""
        return self.config.depth

    def layer_id(self, name: str) -> int:
        """Depth of a parameter for layer-wise learning-rate decay: 0 stem, then blocks, then heads."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        if name.split(".")[0] in ("norm", "head", "head_dist"):
            return self.num_layers + 1
        return 0

    @property
    def feature_info(self) -> list[dict[str, int]]:
        """Channels and stride (pixels) of every map that a features-only model returns."""
        info = {"num_chs": self.config.embed_dim, "reduction": self.config.patch_size}
        return [dict(info, index=i) for i in self.out_indices]


def _out_indices(config: ViTConfig) -> tuple[int, ...]:
    """Blocks to return, ascending; negative indices count from the last block."""
    depth = config.depth
    if config.out_indices is None:
        return tuple(sorted({max(depth * k // 4 - 1, 0) for k in (1, 2, 3, 4)}))
    bad = [i for i in config.out_indices if not -depth <= i < depth]
    if bad or not config.out_indices:
        raise ValueError(
            f"out_indices={config.out_indices}: of {depth} blocks, choose from {-depth} to {depth - 1}"
        )
    return tuple(sorted({i % depth for i in config.out_indices}))


@torch.fx.wrap
def _check_input(shape: torch.Size, in_chans: int, image_hw: tuple[int, int]) -> None:
    """Refuse a wrong shape early. A leaf for FX, so that tracing does not meet the comparison."""
    if len(shape) != 4 or shape[1] != in_chans:
        raise ValueError(
            f"images of shape {tuple(shape)}: expected (B, {in_chans}, H, W). "
            "For another channel count build the model with in_chans=..."
        )
    if (shape[2], shape[3]) != image_hw:
        raise ValueError(
            f"images of {shape[2]}x{shape[3]} px, but the model is set to {image_hw[0]}x{image_hw[1]} px: "
            f"call model.set_input_size(({shape[2]}, {shape[3]})) or resize the images"
        )
