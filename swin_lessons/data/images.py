"""One image file to one 8-bit image with the wanted channels, or a clear refusal."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swin_lessons.data.files import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # in_chans to Pillow's mode
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
UNCONVERTIBLE = {"F": "floating-point pixels have no stated range", "LAB": "LAB needs a colour profile"}
WHITE = (255, 255, 255, 255)


class BadImage(DataError):
    """An image file that cannot be used; the message says which and why."""


def pillow():
    """The Pillow package, imported when first needed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise DataError('image files need Pillow: pip install "swin-lessons[vision]"') from error
    return PIL


def check_in_chans(in_chans: int) -> None:
    """Refuse channel counts that an image file cannot give."""
    if in_chans not in MODES:
        raise DataError(f"in_chans={in_chans}: image files give 1 (grey), 3 (RGB) or 4 (RGB and alpha)")


def read_image(path: Path, in_chans: int = 3, min_size: int = 1) -> "Image":
    """Read a whole image file, upright, as 8-bit grey, RGB or RGBA.

    Grey becomes RGB by repetition, colour becomes grey by its luma, palettes are looked up, transparency is
    laid over white (unless in_chans is 4), 16-bit values are divided by 257, and the camera's orientation is
    applied. Of an animation the first picture counts.

    Args:
        path: the file.
        in_chans: 1, 3 or 4.
        min_size: shortest side accepted, px.

    Raises:
        BadImage: cut short, not an image, larger than Pillow's limit, too small, or not convertible.
    """
    pil = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pil.Image.DecompressionBombWarning)
            with pil.Image.open(path) as image:
                _check_size(image.size, min_size)
                image.load()
                return convert(pil.ImageOps.exif_transpose(image), in_chans)
    except BadImage as error:
        raise BadImage(f"{path}: {error}") from error
    except (pil.Image.DecompressionBombError, pil.Image.DecompressionBombWarning) as error:
        raise BadImage(f"{path}: too many pixels: {error}") from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, MemoryError) as error:
        # Pillow's decoders raise any of these on damaged files
        raise BadImage(f"{path}: cannot be read: {error}") from error


def _check_size(size: tuple[int, int], min_size: int) -> None:
    if min(size) < min_size:
        raise BadImage(
            f"{size[0]} × {size[1]} px is too small; the shorter side must have {min_size} px (min_size)"
        )


def convert(image: "Image", in_chans: int) -> "Image":
    """Change an image of any Pillow mode to 8-bit with 1, 3 or 4 channels; rules in `read_image`."""
    check_in_chans(in_chans)
    if image.mode in UNCONVERTIBLE:
        raise BadImage(f"mode {image.mode}: {UNCONVERTIBLE[image.mode]}; save it as 8-bit RGB")
    if image.mode in SIXTEEN_BIT:
        image = _to_8_bit(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if in_chans != 4:
            image = pillow().Image.alpha_composite(pillow().Image.new("RGBA", image.size, WHITE), image)
    return image if image.mode == MODES[in_chans] else image.convert(MODES[in_chans])


def _to_8_bit(image: "Image") -> "Image":
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImage(f"values {values.min()}..{values.max()} exceed 16 bits; save it as 8-bit RGB")
    return pillow().Image.fromarray(np.round(values / 257).astype(np.uint8))
