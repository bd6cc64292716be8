"""What is no layer of its own, quantised: attention and residual additions of this package's models.

A quantised copy of a model has these classes in place of the float ones; the float path knows nothing of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_lessons.models import vit
from swin_lessons.models.attention import WindowAttention, WindowAttentionV2, at_least_fp32
from swin_lessons.models.blocks import SwinBlock, SwinBlockV2
from swin_lessons.models.fast import unit_vectors
from swin_lessons.models.windows import Size

from .fake import Quantizer, quantized, quantized_product

ROLES = ("query", "key", "value", "scores", "probabilities")


class AttentionCore(nn.Module):
    """Attention with quantised queries, keys, values, scores and probabilities, each of which may be left out.

    `softmax(factor · q kᵀ + bias) v`; scores are quantised before the factor, which V2 has one of for each head.
    """

    query: Quantizer | None
    key: Quantizer | None
    value: Quantizer | None
    scores: Quantizer | None
    probabilities: Quantizer | None

    def __init__(self) -> None:
        super().__init__()
        for role in ROLES:
            self.register_module(role, None)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        factor: Tensor | float | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        drop: float = 0.0,
    ) -> Tensor:
        """Three `(n, num_heads, N, head_dim)` -> the same shape; bias and mask as in `models.attention.attend`.

        `factor` is 1 / √head_dim by default.
        """
        factor = q.shape[-1] ** -0.5 if factor is None else factor
        scores = quantized_product(q, self.query, k.transpose(-2, -1), self.key)
        scores = quantized(self.scores, scores) * factor
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        weights = scores.softmax(-1).to(v.dtype)
        if drop:
            return F.dropout(quantized(self.probabilities, weights), drop) @ quantized(self.value, v)
        return quantized_product(weights, self.probabilities, v, self.value)


class _QuantAttention(WindowAttention):
    core: AttentionCore

    def attend_windows(self, x: Tensor, window: Size, mask: Tensor | None = None) -> Tensor:
        n, N, C = x.shape
        qkv = self.project_qkv(x).reshape(n, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, num_heads, N, head_dim)
        q, k = self.normalise_qk(q, k)
        bias = self.current_bias(window).to(q.dtype)
        drop = self.attn_drop if self.training else 0.0
        x = self.core(q, k, v, self.logit_factor(), bias, mask, drop)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(n, N, C)))

    def normalise_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as they are multiplied: V1's own, V2's unit vectors."""
        return q, k


class QuantWindowAttention(_QuantAttention):
    """`WindowAttention` around an `AttentionCore`. It attends to all windows at once (no `window_chunk`)."""


class QuantWindowAttentionV2(_QuantAttention, WindowAttentionV2):
    """`WindowAttentionV2` around an `AttentionCore`: unit queries and keys are quantised, then multiplied."""

    def normalise_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return unit_vectors(at_least_fp32(q)).to(q.dtype), unit_vectors(at_least_fp32(k)).to(k.dtype)


class QuantAdd(nn.Module):
    """A residual addition with both addends quantised."""

    stream: Quantizer
    branch: Quantizer

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        """`stream + branch`, of any equal shapes."""
        return self.stream(stream) + self.branch(branch)


class QuantSwinBlock(SwinBlock):
    """`SwinBlock` with quantised additions."""

    add1: QuantAdd
    add2: QuantAdd

    def forward(self, x: Tensor) -> Tensor:
        x = self.add1(x, self.drop_path1(self.attn(self.norm1(x))))
        return self.add2(x, self.drop_path2(self.mlp(self.norm2(x))))


class QuantSwinBlockV2(SwinBlockV2):
    """`SwinBlockV2` with quantised additions."""

    add1: QuantAdd
    add2: QuantAdd

    def forward(self, x: Tensor) -> Tensor:
        x = self.add1(x, self.drop_path1(self.norm1(self.attn(x))))
        return self.norm3(self.add2(x, self.drop_path2(self.norm2(self.mlp(x)))))


class QuantViTBlock(vit.Block):
    """DeiT's block with quantised additions."""

    add1: QuantAdd
    add2: QuantAdd

    def forward(self, x: Tensor) -> Tensor:
        x = self.add1(x, self.drop_path(self.attn(self.norm1(x))))
        return self.add2(x, self.drop_path(self.mlp(self.norm2(x))))


BLOCKS: dict[type, type] = {
    SwinBlock: QuantSwinBlock,
    SwinBlockV2: QuantSwinBlockV2,
    vit.Block: QuantViTBlock,
}
ATTENTIONS: dict[type, type] = {
    WindowAttention: QuantWindowAttention,
    WindowAttentionV2: QuantWindowAttentionV2,
    vit.Attention: vit.Attention,  # it calls whatever is its `attend`
}
