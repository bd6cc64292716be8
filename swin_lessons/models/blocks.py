"""The Swin block of V1 and V2, as the papers draw it: a map goes in, a map comes out."""

from torch import Tensor, nn

from .attention import WindowAttention, WindowAttentionV2
from .config import SwinConfig, pair
from .layers import DropPath, Mlp


class SwinBlock(nn.Module):
    """V1: `x + attn(norm1(x))`, then `x + mlp(norm2(x))`. `(B, H, W, C)` -> `(B, H, W, C)`."""

    def __init__(self, config: SwinConfig, dim: int, attn: WindowAttention, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio), config.proj_drop_rate)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class SwinBlockV2(SwinBlock):
    """V2: `x + norm1(attn(x))`, then `x + norm2(mlp(x))` (res-post-norm); `norm3` only in the largest models."""

    def __init__(
        self,
        config: SwinConfig,
        dim: int,
        attn: WindowAttention,
        drop_path: float,
        extra_norm: bool = False,
    ):
        super().__init__(config, dim, attn, drop_path)
        self.norm3 = nn.LayerNorm(dim) if extra_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.norm1(self.attn(x)))
        return self.norm3(x + self.drop_path2(self.norm2(self.mlp(x))))


def make_attention(config: SwinConfig, stage: int, shift: bool) -> WindowAttention:
    """The attention of one block: windows as the stage has them, shifted by half a window or not."""
    kind = WindowAttention if config.version == 1 else WindowAttentionV2
    return kind(
        config.dims[stage],
        config.num_heads[stage],
        window_size=config.window_size,
        shift_size=pair([w // 2 if shift else 0 for w in config.window_size]),
        pretrained_window_size=pair(config.pretrained_window_sizes[stage]),
        qkv_bias=config.qkv_bias,
        attn_drop=config.attn_drop_rate,
        proj_drop=config.proj_drop_rate,
        attention=config.attention,
        window_chunk=config.window_chunk,
    )


def make_block(config: SwinConfig, stage: int, i: int, drop_path: float) -> SwinBlock:
    """Block `i` of a stage; odd blocks shift their windows."""
    dim, attn = config.dims[stage], make_attention(config, stage, shift=i % 2 == 1)
    if config.version == 1:
        return SwinBlock(config, dim, attn, drop_path)
    every = config.extra_norm_every
    return SwinBlockV2(config, dim, attn, drop_path, extra_norm=every > 0 and (i + 1) % every == 0)
