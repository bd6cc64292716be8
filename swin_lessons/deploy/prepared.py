"""A Swin Transformer in its inference form: the same numbers, with all that can be worked out beforehand worked out.

What `prepare` does once, so that no forward pass does it again:

* weights are cast and packed for the matrix library;
* V1: the scale of the queries, and the gain and bias of each LayerNorm before a linear layer, go into that layer;
* the relative position bias (V2: its small network too) becomes one table per kind of window, with the mask in it;
* the final norm's gain and bias go into the classifier, as a mean of `g x + b` is `g` times a mean plus `b`;
* dropout and DropPath are gone. The patch embedding is a product of rows.

What a product is followed by (bias, GELU, residual, requantisation) happens inside the product: see `products`.
Tokens stay rows in window order through a stage, as in `models.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.models.attention import WindowAttention
from swin_lessons.models.blocks import SwinBlock, SwinBlockV2
from swin_lessons.models.fast import window_attention
from swin_lessons.models.layers import PatchEmbed, PatchMerging
from swin_lessons.models.layout import RowLayout, RowOrder
from swin_lessons.models.rows import kind_bias
from swin_lessons.models.swin import MICRO_BATCH_BYTES, SwinStage, SwinTransformer, check_images
from swin_lessons.models.windows import Size, fit_window
from swin_lessons.quantization.modules import IntConv2d, IntLinear

from .products import Product

Layer = nn.Linear | nn.Conv2d | IntLinear | IntConv2d
TABLES = 8  # sizes of map whose bias tables an attention remembers


class Packer(Protocol):
    """What makes the products: it decides the precision, and whether a norm may be folded into a weight."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows between products."""

    @property
    def folds(self) -> bool:
        """May a LayerNorm's gain and bias go into the weight that reads it?"""

    def product(
        self, layer: Layer, bias: Tensor | None, gain: Tensor | None = None, scale: Tensor | None = None
    ) -> Product:
        """`layer` with this bias; `gain` `(K,)` multiplies what comes in, `scale` `(O,)` what comes out."""


@dataclass(frozen=True)
class Norm:
    """LayerNorm over the last axis; without gain and bias where these went into the next layer."""

    channels: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.channels,), self.weight, self.bias, self.eps)


def norm_of(norm: nn.Module, dtype: torch.dtype, folded: bool = False) -> Callable[[Tensor], Tensor]:
    """A `nn.LayerNorm`, cast; without gain and bias where they are `folded` into the next layer."""
    if not isinstance(norm, nn.LayerNorm):
        return nn.Identity()
    weight, bias = (None, None) if folded else (norm.weight.to(dtype), norm.bias.to(dtype))
    return Norm(norm.normalized_shape[0], weight, bias, norm.eps)


def after_norm(
    norm: nn.LayerNorm, layer: nn.Linear, bias: Tensor | None, pack: Packer, scale: Tensor | None = None
) -> Product:
    """The product of a linear layer that reads a LayerNorm; where `pack` folds, its gain and bias are in it."""
    if not pack.folds:
        return pack.product(layer, bias, scale=scale)
    shift = layer.weight @ norm.bias
    return pack.product(layer, shift if bias is None else bias + shift, gain=norm.weight, scale=scale)


class PreparedAttention:
    """Window attention on rows: `qkv`, attention in each window, `proj`."""

    def __init__(self, attn: WindowAttention, qkv: Product, proj: Product) -> None:
        self.qkv, self.proj, self.num_heads = qkv, proj, attn.num_heads
        self.window_size, self.shift_size = attn.window_size, attn.shift_size
        self.attn = attn
        self.tables: dict[tuple[Size, Size], Tensor] = {}
        factor, bias = attn.logit_factor(), attn.joint_qkv_bias()
        self.of_zero = torch.zeros(qkv.out_features) if bias is None else bias.clone()
        self.cosine_scale: Tensor | None = None
        if isinstance(factor, Tensor):
            self.cosine_scale = torch.stack([factor.view(-1, 1), torch.ones(attn.num_heads, 1)])
        else:
            self.of_zero[: qkv.out_features // 3] *= factor  # as in the product
        del attn.qkv, attn.proj  # their weights live in the products now

    def bias(self, window: Size, shift: Size) -> Tensor:
        """`(kinds, num_heads, N, N)`, worked out once for each size."""
        if (window, shift) not in self.tables:
            if len(self.tables) >= TABLES:
                self.tables.pop(next(iter(self.tables)))
            self.tables[window, shift] = kind_bias(self.attn.current_bias(window), window, shift)
        return self.tables[window, shift]

    def __call__(self, x: Tensor, layout: RowLayout, window: Size, shift: Size) -> Tensor:
        """Rows as `qkv` takes them -> rows as `proj` takes them."""
        qkv = self.qkv(x)
        if layout.pad is not None:  # attention sees zeros where a window hangs over the map's edge
            qkv = torch.where(layout.pad, self.of_zero.to(qkv.dtype), qkv)
        if self.cosine_scale is not None:
            to_cosines(qkv, self.cosine_scale)
        out = window_attention(qkv, self.bias(window, shift), 1.0, layout.groups, self.num_heads)
        return self.proj.take(out)


def to_cosines(qkv: Tensor, scale: Tensor) -> None:
    """V2: make the queries and keys in `(M, 3C)` rows unit vectors times `scale` `(2, num_heads, 1)`, in place."""
    heads = qkv.view(len(qkv), 3, scale.shape[1], -1)[:, :2]  # (M, 2, num_heads, head_dim)
    length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=torch.float32)
    heads *= (scale / length.masked_fill_(length == 0, torch.inf)).to(qkv.dtype)


class PreparedBlock:
    """`SwinBlock` on rows `(M, C)`, which it overwrites."""

    def __init__(self, block: SwinBlock, pack: Packer) -> None:
        attn, mlp = block.attn, block.mlp
        self.norm1, self.norm2 = (norm_of(n, pack.dtype, pack.folds) for n in (block.norm1, block.norm2))
        scale = torch.ones(attn.qkv.out_features)
        scale[: attn.qkv.in_features] = attn.scale  # of the queries
        qkv = after_norm(block.norm1, attn.qkv, attn.joint_qkv_bias(), pack, scale)
        self.attn = PreparedAttention(attn, qkv, pack.product(attn.proj, attn.proj.bias))
        self.fc1 = after_norm(block.norm2, mlp.fc1, mlp.fc1.bias, pack)
        self.fc2 = pack.product(mlp.fc2, mlp.fc2.bias)

    def __call__(self, rows: Tensor, layout: RowLayout, window: Size, shift: Size) -> Tensor:
        x = self.attn.qkv.take(self.norm1(rows))
        rows = self.attn.proj.add_to(rows, self.attn(x, layout, window, shift))
        x = self.fc1.take(self.norm2(rows))
        return self.fc2.add_to(rows, self.fc1(x, gelu=True, then=self.fc2))


class PreparedBlockV2(PreparedBlock):
    """`SwinBlockV2` on rows: norms follow the products, so nothing is folded into them."""

    def __init__(self, block: SwinBlockV2, pack: Packer) -> None:
        attn, mlp = block.attn, block.mlp
        self.norm1, self.norm2, self.norm3 = (
            norm_of(n, pack.dtype) for n in (block.norm1, block.norm2, block.norm3)
        )
        qkv = pack.product(attn.qkv, attn.joint_qkv_bias())
        self.attn = PreparedAttention(attn, qkv, pack.product(attn.proj, attn.proj.bias))
        self.fc1, self.fc2 = pack.product(mlp.fc1, mlp.fc1.bias), pack.product(mlp.fc2, mlp.fc2.bias)

    def __call__(self, rows: Tensor, layout: RowLayout, window: Size, shift: Size) -> Tensor:
        out = self.attn(self.attn.qkv.take(rows), layout, window, shift)
        rows += self.norm1(self.attn.proj(out))
        hidden = self.fc1(self.fc1.take(rows), gelu=True, then=self.fc2)
        rows += self.norm2(self.fc2(hidden))
        return self.norm3(rows)


class PreparedMerging:
    """`PatchMerging` on maps."""

    def __init__(self, merging: PatchMerging, pack: Packer) -> None:
        self.concatenate, self.post_norm = merging.concatenate, merging.post_norm
        folded = pack.folds and not merging.post_norm
        self.norm = norm_of(merging.norm, pack.dtype, folded)
        self.product = (
            pack.product(merging.reduction, None)
            if merging.post_norm
            else after_norm(merging.norm, merging.reduction, None, pack)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`(B, H, W, C)` -> `(B, H/2, W/2, 2C)`."""
        x = self.concatenate(x)
        rows = x.view(-1, x.shape[-1])
        if self.post_norm:
            rows = self.norm(self.product(self.product.take(rows)))
        else:
            rows = self.product(self.product.take(self.norm(rows)))
        return rows.view(*x.shape[:3], -1)


def _prepared(block: SwinBlock, pack: Packer) -> PreparedBlock:
    return PreparedBlockV2(block, pack) if isinstance(block, SwinBlockV2) else PreparedBlock(block, pack)


class PreparedStage:
    """Patch merging and blocks: `(B, H, W, C)` -> `(B, H, W, C)`."""

    def __init__(self, stage: SwinStage, pack: Packer) -> None:
        first = stage.downsample
        self.merging = PreparedMerging(first, pack) if isinstance(first, PatchMerging) else nn.Identity()
        self.blocks = [_prepared(block, pack) for block in stage.all_blocks()]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.merging(x)
        size = (x.shape[1], x.shape[2])
        plan = [fit_window(size, b.attn.window_size, b.attn.shift_size) for b in self.blocks]
        order = RowOrder(len(x), size, plan[0][0], x.device)
        rows = order.from_map(x, plan[0][1])
        for block, (window, shift) in zip(self.blocks, plan, strict=True):
            rows = order.to_shift(rows, shift)
            rows = block(rows, order.layout(), window, shift)
        return order.to_map(rows)


class PreparedSwin(nn.Module):
    """A Swin Transformer for inference alone; made by `prepare`.

    Takes fp32 images `(B, in_chans, H, W)` of any size and returns fp32 logits `(B, num_classes)`, or with
    `features_only` a list of maps `(B, C, H, W)`. It has no parameters: a later change of the model that it was made
    from does not reach it, and it cannot be trained or moved.

    Attributes:
        precision: "fp32", "bf16" or "int8".
    """

    def __init__(self, model: SwinTransformer, pack: Packer, precision: str) -> None:
        super().__init__()
        self.config, self.precision, self.dtype = model.config, precision, pack.dtype
        self.embed = PatchRows(model.patch_embed, pack)
        position = model.absolute_pos_embed
        self.position = None if position is None else position.detach().to(pack.dtype)
        self.position_map = model._position_map
        self.stages = [PreparedStage(stage, pack) for stage in model.all_stages()]
        self.out_indices = model.out_indices
        norms = model.out_norms.items() if model.features_only else ()
        self.out_norms = {name: norm_of(norm, pack.dtype) for name, norm in norms}
        self.head = None if model.features_only else PreparedHead(model, pack)
        self.eval()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """`(B, in_chans, H, W)` -> logits `(B, num_classes)`, or a list of maps `(B, C, H, W)`."""
        check_images(x, self.config.in_chans)
        parts = [self._forward(part) for part in x.split(self.micro_batch_size(x))]
        if self.head is None:
            return [torch.cat(maps) for maps in zip(*parts, strict=True)]
        return torch.cat(parts)

    def micro_batch_size(self, x: Tensor) -> int:
        """How many images keep the widest hidden layer within a CPU's cache."""
        tokens = x.shape[-2] * x.shape[-1] / self.config.patch_size**2
        width = 1 if self.precision == "int8" else self.dtype.itemsize
        hidden = tokens * self.config.embed_dim * self.config.mlp_ratio * width
        return max(1, int(MICRO_BATCH_BYTES / max(hidden, 1)))

    def _forward(self, x: Tensor) -> Any:
        x = self.embed(x.to(self.dtype))
        if self.position is not None:
            x = x + self.position_map(x, self.position)
        maps = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.out_indices:
                maps.append(self._channels_first(x, i))
        return maps if self.head is None else self.head(x)

    def _channels_first(self, x: Tensor, stage: int) -> Tensor:
        norm = self.out_norms.get(f"norm{stage}", nn.Identity())
        return norm(x).permute(0, 3, 1, 2).contiguous().float()

    def train(self, mode: bool = True) -> PreparedSwin:
        """Refused: the weights are packed."""
        if mode:
            raise RuntimeError("a prepared model cannot be trained: train the model, then prepare it again")
        return super().train(False)

    def extra_repr(self) -> str:
        return f"precision={self.precision!r}"


class PatchRows:
    """`PatchEmbed` as what it is, one product of flattened patches: `(B, in_chans, H, W)` -> `(B, H/p, W/p, C)`."""

    def __init__(self, embed: PatchEmbed, pack: Packer) -> None:
        self.pad, self.patch_size = embed.pad, embed.patch_size
        self.product = pack.product(embed.proj, embed.proj.bias)
        self.norm = norm_of(embed.norm, pack.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        x, p = self.pad(x), self.patch_size
        B, channels, H, W = x.shape
        patches = x.reshape(B, channels, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5)
        rows = self.product(self.product.take(patches.reshape(-1, channels * p * p)))
        return self.norm(rows).view(B, H // p, W // p, -1)


class PreparedHead:
    """Final norm, mean over the map, classifier: `(B, H, W, C)` -> `(B, num_classes)`, fp32."""

    def __init__(self, model: SwinTransformer, pack: Packer) -> None:
        fc = cast(nn.Linear, model.head.fc)
        classifies = not isinstance(fc, nn.Identity)
        self.norm = norm_of(model.norm, pack.dtype, folded=pack.folds and classifies)
        self.product = after_norm(model.norm, fc, fc.bias, pack) if classifies else None

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm(x).mean(dim=(1, 2))
        return (x if self.product is None else self.product(self.product.take(x))).float()
