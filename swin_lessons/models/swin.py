"""Swin Transformer V1 and V2, whole: stage and model.

Sources: arXiv:2103.14030 (V1), arXiv:2111.09883 (V2). Parameters are named as in timm, whose weights load with
`strict=True`. Every public tensor is `(B, H, W, C)`; feature pyramids are `(B, C, H, W)`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import WindowAttention, WindowAttentionV2
from .blocks import SwinBlock, make_block
from .config import SwinConfig, drop_path_rates, pair, stage_config
from .fast import is_eager, is_plain
from .fused import kernel_parts, runner
from .layers import ClassifierHead, PatchEmbed, PatchMerging
from .rows import embed_patches, merge_patches, rows_allowed, run_stage
from .windows import Size

MICRO_BATCH_BYTES = 24 << 20  # hidden activations of one pass at inference: about a CPU's cache


class SwinStage(nn.Module):
    """Patch merging (but in the first stage), then blocks of which every second one shifts its windows."""

    def __init__(self, config: SwinConfig, stage: int, drop_path: Sequence[float]):
        super().__init__()
        self.checkpointing = config.checkpointing
        self.fused_parts = kernel_parts(config.kernels)
        before = config.dims[stage] // 2
        self.downsample = PatchMerging(before, config.version == 2) if stage else nn.Identity()
        self.blocks = nn.ModuleList(make_block(config, stage, i, rate) for i, rate in enumerate(drop_path))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, H, W, C)` -> `(B, H, W, C)`, or `(B, H/2, W/2, 2C)` where the stage merges patches."""
        x = merge_patches(self.downsample, x)
        if not self.fused_parts and rows_allowed(x, self.all_blocks()):
            return run_stage(x, self.all_blocks(), self._run)
        for block in self.all_blocks():
            x = self._run(runner(block, self.fused_parts, x), x)
        return x

    def all_blocks(self) -> list[SwinBlock]:
        """The blocks, in order."""
        return cast(list[SwinBlock], list(self.blocks))

    def _run(self, function, *args):
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False)
        return function(*args)


class SwinTransformer(nn.Module):
    """A Swin Transformer that classifies `(B, in_chans, H, W)` images of any size, or returns its pyramid.

    Args:
        config: what to build. Windows larger than a stage's map at `config.img_size` are made smaller there.
        features_only: return the stages named by `out_indices` as `(B, C, H, W)`; later stages are not built.
        out_indices: stages to return, 0 to 3 or negative; all when None.
        out_norm: give each returned stage a LayerNorm of its own, as dense-prediction backbones have.
    """

    def __init__(
        self,
        config: SwinConfig,
        *,
        features_only: bool = False,
        out_indices: Sequence[int] | None = None,
        out_norm: bool = False,
    ):
        super().__init__()
        self.config = config
        self.features_only = features_only
        self.out_indices = _stage_indices(out_indices, len(config.depths)) if features_only else ()
        stages = max(self.out_indices) + 1 if features_only else len(config.depths)
        dims = config.dims
        self.num_features = dims[stages - 1]
        self.patch_embed = PatchEmbed(config.patch_size, config.in_chans, dims[0], config.patch_norm)
        self.absolute_pos_embed = None
        if config.absolute_pos_embed:
            grid = config.grids()[0]
            self.absolute_pos_embed = nn.Parameter(torch.zeros(1, grid[0] * grid[1], dims[0]))
        rates = drop_path_rates(config)
        self.layers = nn.ModuleList(SwinStage(stage_config(config, i), i, rates[i]) for i in range(stages))
        if features_only:
            out = self.out_indices if out_norm else ()
            self.out_norms = nn.ModuleDict({f"norm{i}": nn.LayerNorm(dims[i]) for i in out})
        else:
            self.norm = nn.LayerNorm(self.num_features)
            self.head = ClassifierHead(self.num_features, config.num_classes, config.drop_rate)
        self._place_input_sizes()
        self.reset_parameters()

    # --- forward ---

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """`(B, in_chans, H, W)` -> logits `(B, num_classes)`, or with `features_only` a list of `(B, C, H, W)`."""
        if self.features_only:
            return self.forward_pyramid(x)
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """`(B, in_chans, H, W)` -> the last stage's map after the final norm, `(B, H/32, W/32, C)`."""
        self._refuse_pyramid("forward_features")
        return self._micro_batched(self._features, x)

    def _refuse_pyramid(self, method: str) -> None:
        if self.features_only:
            raise ValueError(f"a features_only model has no classifier and no {method}; build it without")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """A map `(B, H, W, C)` -> logits `(B, num_classes)`; `pre_logits` stops at the mean, `(B, C)`."""
        return self.head(x, pre_logits)

    def forward_pyramid(self, x: Tensor) -> list[Tensor]:
        """`(B, in_chans, H, W)` -> a map `(B, C, H, W)` for each of `out_indices`, before merging."""
        maps = []
        x = self._embed(x)
        for i, stage in enumerate(self.layers):
            x = stage(x)
            if i in self.out_indices:
                y = self.out_norms[f"norm{i}"](x) if f"norm{i}" in self.out_norms else x
                maps.append(y.permute(0, 3, 1, 2).contiguous())
        return maps

    def _features(self, x: Tensor) -> Tensor:
        x = self._embed(x)
        for stage in self.layers:
            x = stage(x)
        return self.norm(x)

    def _embed(self, x: Tensor) -> Tensor:
        if is_eager(x):
            check_images(x, self.config.in_chans)
        x = embed_patches(self.patch_embed, x)
        if self.absolute_pos_embed is not None:
            x = x + self._position_map(x, self.absolute_pos_embed)
        return x

    def _position_map(self, x: Tensor, position: Tensor) -> Tensor:
        H, W = self.config.grids()[0]
        position = position.reshape(1, H, W, -1)
        if is_eager(x) and x.shape[1:3] != (H, W):
            maps = position.permute(0, 3, 1, 2)
            maps = nn.functional.interpolate(maps, x.shape[1:3], mode="bicubic", align_corners=False)
            position = maps.permute(0, 2, 3, 1)
        return position

    def _micro_batched(self, function, x: Tensor) -> Tensor:
        """On a CPU, inference goes faster in batches whose activations stay in cache. The numbers are the same."""
        if self.training or torch.is_grad_enabled() or not is_eager(x) or x.device.type != "cpu":
            return function(x)
        size = self.micro_batch_size(x)
        if size >= len(x) or not is_plain(*self._parts_inside()):  # a hook must see the whole batch
            return function(x)
        return torch.cat([function(part) for part in x.split(size)])

    def _parts_inside(self) -> list[nn.Module]:
        return list(self.modules())[1:]

    def micro_batch_size(self, x: Tensor) -> int:
        """How many images of `(B, in_chans, H, W)` keep the widest hidden layer within `MICRO_BATCH_BYTES`."""
        tokens = x.shape[-2] * x.shape[-1] / self.config.patch_size**2
        hidden = tokens * self.config.embed_dim * self.config.mlp_ratio * x.element_size()
        return max(1, int(MICRO_BATCH_BYTES / max(hidden, 1)))

    def all_stages(self) -> list[SwinStage]:
        """The stages, in order."""
        return cast(list[SwinStage], list(self.layers))

    # --- sizes ---

    @torch.no_grad()
    def set_input_size(
        self, img_size: int | Sequence[int], window_size: int | Sequence[int] | None = None
    ) -> None:
        """Make this the model for another image size, and another window if given.

        Windows that no longer fit a stage's map shrink, or grow back up to `window_size`. V1's bias tables are resized
        bicubically; V2's bias is continuous and needs nothing. Any size can be fed without this call: then maps
        are padded to the windows the model has.
        """
        window = self.config.window_size if window_size is None else pair(window_size)
        config = replace(self.config, img_size=pair(img_size), window_size=window)
        self._resize_absolute_position(config)
        self.config = config
        for i, stage in enumerate(self.all_stages()):
            for j, block in enumerate(stage.all_blocks()):
                own = stage_config(config, i).window_size
                set_window(block.attn, own, pair([w // 2 if j % 2 else 0 for w in own]))
        self._place_input_sizes()

    def _resize_absolute_position(self, config: SwinConfig) -> None:
        before, after = self.config.grids()[0], config.grids()[0]
        if self.absolute_pos_embed is not None and before != after:
            old = self.absolute_pos_embed
            maps = old.reshape(1, *before, -1).permute(0, 3, 1, 2)
            maps = nn.functional.interpolate(maps, after, mode="bicubic", align_corners=False)
            new = maps.flatten(2).transpose(1, 2).contiguous()
            self.absolute_pos_embed = nn.Parameter(new, requires_grad=old.requires_grad)

    def _place_input_sizes(self) -> None:
        for stage, grid in zip(self.all_stages(), self.config.grids(), strict=False):
            for block in stage.all_blocks():
                block.attn.input_size = grid

    # --- training ---

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay must not touch, beside biases and norms."""
        keys = ("absolute_pos_embed", "relative_position_bias_table", "cpb_mlp", "logit_scale")
        return {name for name, _ in self.named_parameters() if any(k in name for k in keys)}

    @property
    def num_layers(self) -> int:
        """Blocks in all: `layer_id` runs from 0 (stem) to `num_layers + 1` (head)."""
        return sum(len(stage.blocks) for stage in self.all_stages())

    def layer_id(self, name: str) -> int:
        """Depth of a parameter for layer-wise learning-rate decay: 0 stem, 1.. blocks, `num_layers + 1` head."""
        parts = name.split(".")
        if parts[0] in ("patch_embed", "absolute_pos_embed", "mask_token"):
            return 0
        if parts[0] != "layers":
            return self.num_layers + 1
        before = sum(len(stage.blocks) for stage in self.all_stages()[: int(parts[1])])
        return before + 1 + (int(parts[3]) if parts[2] == "blocks" else 0)

    def set_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for stage in self.all_stages():
            stage.checkpointing = enable

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a new one; 0 classes removes it."""
        self._refuse_pyramid("reset_classifier")
        self.config = replace(self.config, num_classes=num_classes)
        like = self.norm.weight
        self.head = ClassifierHead(self.num_features, num_classes, self.config.drop_rate).to(like)
        self.head.apply(init_module)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initialisation; also fills a model that was built on the meta device."""
        self.patch_embed.proj.reset_parameters()
        if self.absolute_pos_embed is not None:
            nn.init.trunc_normal_(self.absolute_pos_embed, std=0.02)
        self.apply(init_module)
        for module in self.modules():
            if isinstance(module, WindowAttention):
                _reset_attention(module)
        if self.config.version == 2:
            _zero_res_post_norms(self)


def init_module(module: nn.Module) -> None:
    """Linear layers: normal with std 0.02 and zero bias. LayerNorms: one and zero. For `Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def _reset_attention(attn: WindowAttention) -> None:
    attn.reset_position()
    if isinstance(attn, WindowAttentionV2):
        attn.logit_scale.fill_(math.log(10))
        for bias in (attn.q_bias, attn.v_bias):
            if bias is not None:
                bias.zero_()


def _zero_res_post_norms(model: "SwinTransformer") -> None:
    """V2's branches start at zero, so that each block starts as the identity."""
    for stage in model.all_stages():
        for block in stage.all_blocks():
            for norm in (block.norm1, block.norm2):
                nn.init.zeros_(norm.weight)
                nn.init.zeros_(norm.bias)


def set_window(attn: WindowAttention, window: Size, shift: Size) -> None:
    """Give an attention layer another window; V1's table is resized bicubically to fit."""
    if window != attn.window_size and not isinstance(attn, WindowAttentionV2):
        old = attn.relative_position_bias_table
        new = resize_bias_table(old.detach(), attn.window_size, window)
        attn.relative_position_bias_table = nn.Parameter(new, requires_grad=old.requires_grad)
    attn.window_size, attn.shift_size = window, shift
    attn.fold()


def resize_bias_table(table: Tensor, before: Size, after: Size) -> Tensor:
    """Bicubic resize of `((2h-1)(2w-1), num_heads)` from window `before` to window `after`."""
    (h, w), (new_h, new_w) = before, after
    maps = table.T.reshape(1, -1, 2 * h - 1, 2 * w - 1).to(torch.promote_types(table.dtype, torch.float32))
    maps = nn.functional.interpolate(
        maps, (2 * new_h - 1, 2 * new_w - 1), mode="bicubic", align_corners=False
    )
    return maps.flatten(2)[0].T.to(table.dtype).contiguous()


def _stage_indices(out_indices: Sequence[int] | None, stages: int) -> tuple[int, ...]:
    chosen = range(stages) if out_indices is None else out_indices
    if not isinstance(chosen, Sequence):
        raise ValueError(f"out_indices={out_indices!r}: give a list or tuple of stages")
    bad = [i for i in chosen if not -stages <= i < stages]
    if bad or not len(chosen):
        raise ValueError(f"out_indices={out_indices}: choose from 0 to {stages - 1}, or negative ones")
    return tuple(sorted({i % stages for i in chosen}))


def check_images(x: Tensor, in_chans: int) -> None:
    """A clear error for a batch that no Swin can take."""
    if x.ndim != 4:
        raise ValueError(f"expected images (B, {in_chans}, H, W), got a tensor of shape {tuple(x.shape)}")
    if x.shape[1] != in_chans:
        raise ValueError(
            f"the model takes {in_chans} channels, the images {tuple(x.shape)} have {x.shape[1]}; "
            f"build it with in_chans={x.shape[1]}, or convert the images"
        )
    if not x.is_floating_point():
        raise ValueError(f"images are {x.dtype}; convert them to float and normalise them first")
    if 0 in x.shape:
        raise ValueError(f"images of shape {tuple(x.shape)} are an empty batch; pass one image at least")
