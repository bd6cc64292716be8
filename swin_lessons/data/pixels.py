"""Pixels to model input: channels, size, normalisation. All on (..., C, H, W) tensors of values 0..255."""

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_lessons.data.files import DataError

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, the weights of PIL's "L" mode
MAX_MARGIN = 2  # px a side that are filled with zeros instead of resizing


def to_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """An image size as (H, W), whether given as one number or two; refuses sizes below 1."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, Integral) and side > 0 for side in pair):
        raise DataError(f"img_size={size!r} must be one positive number of pixels, or (height, width)")
    return int(pair[0]), int(pair[1])


def to_channels(images: Tensor, in_chans: int) -> Tensor:
    """Convert uint8 images (N, C, H, W) to `in_chans` channels.

    Equal counts pass. Grey (1) is repeated; RGB (3) becomes grey by its luma (BT.601).

    Raises:
        DataError: any other pair of counts.
    """
    channels = images.shape[-3]
    if channels == in_chans:
        return images
    if channels == 1 and in_chans > 0:
        return images.expand(*images.shape[:-3], in_chans, *images.shape[-2:])
    if (channels, in_chans) == (3, 1):
        luma = torch.tensor(LUMA, device=images.device).view(3, 1, 1)
        return (images * luma).sum(-3, keepdim=True).round().to(torch.uint8)
    raise DataError(f"images with {channels} channels cannot become in_chans={in_chans}; use 1 or {channels}")


def stats_to_channels(stats: tuple[float, ...], in_chans: int) -> tuple[float, ...]:
    """A per-channel mean or standard deviation after `to_channels`.

    For RGB to grey the mean is exact and the deviation an upper bound (exact where channels agree).
    """
    if len(stats) == in_chans:
        return stats
    if len(stats) == 1:
        return stats * in_chans
    return (sum(weight * value for weight, value in zip(LUMA, stats, strict=True)),)


def fit_size(images: Tensor, img_size: tuple[int, int]) -> Tensor:
    """Bring images (N, C, h, w) to (N, C, H, W): zeros around if at most 2 px a side lack, else bilinear.

    28-px Fashion-MNIST at 32 px keeps its pixels exact this way. Resizing antialiases when it shrinks, and
    returns float32 in the same 0..255; padding keeps the dtype.
    """
    height, width = images.shape[-2:]
    top, left = img_size[0] - height, img_size[1] - width
    if top == left == 0:
        return images
    if 0 <= top <= 2 * MAX_MARGIN and 0 <= left <= 2 * MAX_MARGIN:
        return F.pad(images, (left // 2, left - left // 2, top // 2, top - top // 2))
    return F.interpolate(images.float(), img_size, mode="bilinear", antialias=True)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Values 0..255 to float32 (x / 255 − mean) / std; mean and std are (C,), in units of 0..1."""
    scale = (1 / (255 * std)).view(-1, 1, 1)
    shift = (mean / std).view(-1, 1, 1)
    return images.to(scale.dtype) * scale - shift
