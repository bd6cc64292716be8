"""A stage, block by block, on rows in window order: the eager fast path around the readable classes.

`run_stage` does what calling the blocks one after the other does, with the same parameters and the same numbers. It
calls the layers' functions from `fast` instead of the layers, so it steps aside whenever somebody might notice:
a hook, a replaced or watched layer, dropout, a tracer, or `attention="reference"`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .attention import WindowAttention, WindowAttentionV2
from .blocks import SwinBlock, SwinBlockV2
from .fast import chunk_length, fast_mlp, is_eager, is_plain, linear, row_chunks, window_attention
from .layers import DropPath, Mlp, PatchEmbed, PatchMerging
from .layout import RowLayout, RowOrder, Windows, kind_masks
from .windows import Size, fit_window

STANDARD = {
    *(SwinBlock, SwinBlockV2, WindowAttention, WindowAttentionV2, Mlp),
    *(nn.LayerNorm, nn.Linear, nn.GELU, nn.Dropout, DropPath),
}


def _standard(block: SwinBlock) -> bool:
    parts = _parts(block)
    if not all(type(m) in STANDARD for m in parts) or not is_plain(*parts):
        return False
    attn, mlp = block.attn, block.mlp
    dropout = (attn.attn_drop and attn.training) or any(
        d.p and d.training for d in (attn.proj_drop, mlp.drop)
    )
    readable = attn.attention in ("reference", "triton")
    return not readable and mlp.act.approximate == "none" and not dropout


def _parts(block: SwinBlock) -> list[nn.Module]:
    """All that the fast path stands in for, or calls with rows instead of maps."""
    inside = {**block._modules, **block.attn._modules, **block.mlp._modules}
    inside.pop("cpb_mlp", None)  # both paths call it
    if type(inside.get("norm3")) is nn.Identity:
        inside.pop("norm3")
    return [block, *(m for m in inside.values() if m is not None)]


def rows_allowed(x: Tensor, blocks: Sequence[SwinBlock]) -> bool:
    """May `run_stage` stand in for these blocks on the map `x`?"""
    if not (is_eager(x) and x.numel()):
        return False
    window = blocks[0].attn.window_size
    return all(_standard(block) and block.attn.window_size == window for block in blocks)


def run_stage(x: Tensor, blocks: Sequence[SwinBlock], run: Callable) -> Tensor:
    """All blocks of a stage on `(B, H, W, C)`; `run(function, *args)` calls a block, or checkpoints it."""
    size = (x.shape[1], x.shape[2])
    plan = [fit_window(size, b.attn.window_size, b.attn.shift_size) for b in blocks]
    order = RowOrder(x.shape[0], size, plan[0][0], x.device)
    rows = order.from_map(x, plan[0][1])
    for block, (window, shift) in zip(blocks, plan, strict=True):
        rows = order.to_shift(rows, shift)
        rows = run(block_rows, block, rows, order.layout(), window, shift)
    return order.to_map(rows)


def block_rows(block: SwinBlock, rows: Tensor, layout: RowLayout, window: Size, shift: Size) -> Tensor:
    """One block on `(M, C)` rows that lie in the order of `layout`; without gradients, the rows are overwritten."""
    bias = kind_bias(block.attn.current_bias(window), window, shift)
    if torch.is_grad_enabled() or _drops(block):
        rows = rows + drop_rows(block.drop_path1, attention_branch(block, rows, bias, layout), layout)
        rows = rows + drop_rows(block.drop_path2, mlp_branch(block, rows), layout)
    else:
        add_branches(block, rows, bias, layout)
    return block.norm3(rows) if isinstance(block, SwinBlockV2) else rows


def add_branches(block: SwinBlock, rows: Tensor, bias: Tensor, layout: RowLayout) -> None:
    """Add both branches to the rows in place, run by run: what lies between two layers never leaves the cache."""
    N, C = bias.shape[-1], rows.shape[1]
    step = chunk_length(rows, N * 3 * C)  # windows whose queries, keys and values make a chunk
    for part, windows in layout.runs(step, N):
        rows[part].add_(attention_branch(block, rows[part], bias, windows))
    for part in row_chunks(rows, block.mlp.fc1.out_features):
        rows[part].add_(mlp_branch(block, rows[part]))


def attention_branch(block: SwinBlock, rows: Tensor, bias: Tensor, windows: Windows) -> Tensor:
    """What attention adds to the rows: V1 normalises what goes in, V2 what comes out."""
    if isinstance(block, SwinBlockV2):
        return block.norm1(attention_rows(block.attn, zero_pads(rows, windows), bias, windows))
    return attention_rows(block.attn, zero_pads(block.norm1(rows), windows), bias, windows)


def mlp_branch(block: SwinBlock, rows: Tensor) -> Tensor:
    """What the MLP adds to the rows."""
    if isinstance(block, SwinBlockV2):
        return block.norm2(mlp_rows(block.mlp, rows))
    return mlp_rows(block.mlp, block.norm2(rows))


def attention_rows(attn: WindowAttention, rows: Tensor, bias: Tensor, windows: Windows) -> Tensor:
    """`WindowAttention.forward` on rows; `bias` has the masks in it (see `kind_bias`)."""
    qkv = linear(rows, attn.qkv.weight, attn.joint_qkv_bias())
    out = window_attention(qkv, bias, attn.logit_factor(), windows.groups, attn.num_heads)
    return attn.proj_drop(linear(out, attn.proj.weight, attn.proj.bias))


def kind_bias(bias: Tensor, window: Size, shift: Size) -> Tensor:
    """`(num_heads, N, N)` -> `(1 or 4, num_heads, N, N)`: the bias with the mask of each kind of window in it."""
    if shift == (0, 0):
        return bias[None]
    across = kind_masks(window, shift, bias.device)  # (4, N, N)
    return bias.expand(4, -1, -1, -1).masked_fill(across[:, None], -torch.inf)


def mlp_rows(mlp: Mlp, rows: Tensor) -> Tensor:
    """`Mlp.forward` on rows."""
    return fast_mlp(rows, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias)


def zero_pads(rows: Tensor, windows: Windows) -> Tensor:
    """Attention sees zeros where a window hangs over the map's edge."""
    return rows if windows.pad is None else rows.masked_fill(windows.pad, 0.0)


def _drops(block: SwinBlock) -> bool:
    return any(d.rate > 0.0 and d.training for d in (block.drop_path1, block.drop_path2))


def drop_rows(drop_path: DropPath, rows: Tensor, layout: RowLayout) -> Tensor:
    """`DropPath` for rows: one decision an image of the batch."""
    if drop_path.rate == 0.0 or not drop_path.training:
        return rows
    B = len(layout.image) // (layout.padded[0] * layout.padded[1])
    return rows * drop_path.keep(B, rows)[layout.image, None]


def embed_patches(embed: PatchEmbed, x: Tensor) -> Tensor:
    """`PatchEmbed.forward` with its convolution run as what it is: one linear layer on flattened patches."""
    standard = type(embed) is PatchEmbed and type(embed.proj) is nn.Conv2d
    if not (is_eager(x) and standard and is_plain(embed, embed.proj)):
        return embed(x)
    x, p = embed.pad(x), embed.patch_size
    B, channels, H, W = x.shape
    patches = x.reshape(B, channels, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5)
    rows = linear(patches.reshape(-1, channels * p * p), embed.proj.weight.flatten(1), embed.proj.bias)
    return embed.norm(rows.view(B, H // p, W // p, -1))


def merge_patches(merging: PatchMerging | nn.Identity, x: Tensor) -> Tensor:
    """`PatchMerging.forward` with the faster linear layer."""
    if type(merging) is not PatchMerging or not is_eager(x):
        return merging(x)
    if type(merging.reduction) is not nn.Linear or not is_plain(merging, merging.reduction):
        return merging(x)
    x = merging.concatenate(x)
    x = x if merging.post_norm else merging.norm(x)
    x = linear(x.flatten(0, 2), merging.reduction.weight).view(*x.shape[:3], -1)
    return merging.norm(x) if merging.post_norm else x
