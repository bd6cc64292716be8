"""The small parts around attention: patch embedding, patch merging, MLP, drop path, classifier head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .windows import windows_along


class PatchEmbed(nn.Module):
    """Cut an image into `patch_size` squares and project each to a token: `(B, in_chans, H, W)` -> `(B, H/p, W/p, C)`.

    Images that are no multiple of the patch are padded with zeros below and on the right.
    """

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, norm: bool = True):
        super().__init__()
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(embed_dim) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.pad(x))  # (B, C, H/p, W/p)
        return self.norm(x.permute(0, 2, 3, 1))

    def pad(self, x: Tensor) -> Tensor:
        """Zeros below and on the right, up to whole patches."""
        (H, W), p = x.shape[-2:], self.patch_size
        return F.pad(x, (0, windows_along(W, p) * p - W, 0, windows_along(H, p) * p - H))


class PatchMerging(nn.Module):
    """Halve the map and double the channels: `(B, H, W, C)` -> `(B, H/2, W/2, 2C)`.

    The four neighbours of each 2 x 2 cell are concatenated column by column. V1 normalises before the linear
    layer, V2 after it (`post_norm`). Odd sizes are padded with a zero row or column.
    """

    def __init__(self, dim: int, post_norm: bool = False):
        super().__init__()
        self.post_norm = post_norm
        self.norm = nn.LayerNorm(2 * dim if post_norm else 4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.concatenate(x)
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))

    def concatenate(self, x: Tensor) -> Tensor:
        """`(B, H, W, C)` -> `(B, H/2, W/2, 4C)`: each cell's (row, column) 00, 10, 01, 11."""
        B, H, W, C = x.shape
        h, w = (H + 1) // 2, (W + 1) // 2
        x = F.pad(x, (0, 0, 0, 2 * w - W, 0, 2 * h - H))
        x = x.reshape(B, h, 2, w, 2, C).permute(0, 1, 3, 4, 2, 5)  # (B, H/2, W/2, column, row, C)
        return x.reshape(B, h, w, 4 * C)


class Mlp(nn.Module):
    """Two linear layers with a GELU between: `(..., C)` -> `(..., mlp_ratio * C)` -> `(..., C)`."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class DropPath(nn.Module):
    """Drop a residual branch for whole images, with probability `rate`, and scale the others by 1/(1-rate).

    Stochastic depth (arXiv:1603.09382). It does nothing in evaluation.
    """

    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.rate = rate

    def keep(self, B: int, like: Tensor) -> Tensor:
        """One factor an image, `(B,)`: 0 or 1/(1-rate)."""
        kept = 1.0 - self.rate
        keep = torch.empty(B, dtype=like.dtype, device=like.device).bernoulli_(kept)
        return keep / kept if kept > 0 else keep

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        return x * self.keep(x.shape[0], x).view(-1, *[1] * (x.ndim - 1))

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class ClassifierHead(nn.Module):
    """Mean over the map, dropout, linear: `(B, H, W, C)` -> `(B, num_classes)`; `num_classes=0` stops at `(B, C)`."""

    def __init__(self, dim: int, num_classes: int, drop: float = 0.0):
        super().__init__()
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(dim, num_classes) if num_classes > 0 else nn.Identity()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.drop(x.mean(dim=(1, 2)))
        return x if pre_logits else self.fc(x)
