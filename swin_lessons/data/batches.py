"""Batches that depend on (seed, epoch, step) alone, so that a killed run resumes with the very next batch."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swin_lessons.data.files import DataError
from swin_lessons.data.pixels import fit_size, normalise

ORDER, AUGMENT = 1, 2  # keep the random streams of the order and of the pixels apart


def random_stream(purpose: int, *key: int) -> np.random.Generator:
    """A generator that depends on its whole key (NumPy's SeedSequence mixes it)."""
    if min(key) < 0:
        raise DataError(f"seed, epoch and step must not be negative: {key}")
    return np.random.default_rng([purpose, *key])


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Order of `length` items in an epoch: (length,) int64."""
    return random_stream(ORDER, seed, epoch).permutation(length) if shuffle else np.arange(length)


@dataclass(frozen=True)
class Share:
    """The images of each batch that one of several processes takes: part number `part` of `parts` equal ones.

    Mixing joins the images at equal distance from both ends of a batch. A process takes both of such a pair where
    it takes an even number of images, so that no image has to be read by two.
    """

    part: int = 0
    parts: int = 1

    def rows(self, total: int) -> np.ndarray:
        """Which of a batch's `total` images are this process's: (total / parts,) int64.

        Raises:
            DataError: they cannot be shared equally.
        """
        size, rest = divmod(total, self.parts)
        if rest:
            raise DataError(
                f"{self.parts} processes cannot share a batch of {total} images equally: use a batch size "
                f"that {self.parts} divides"
            )
        if size % 2 or self.parts == 1:
            return np.arange(self.part * size, (self.part + 1) * size)
        front = np.arange(self.part * size // 2, (self.part + 1) * size // 2)
        return np.concatenate([front, total - 1 - front[::-1]])

    def each(self, draw: Callable[[int], np.ndarray], count: int) -> np.ndarray:
        """What `draw` gives for each image of the batch, of which the `count` of this process: (..., count)."""
        return (
            draw(count) if self.parts == 1 else draw(count * self.parts)[..., self.rows(count * self.parts)]
        )


WHOLE = Share()


@dataclass(frozen=True)
class Augment:
    """Random changes to a batch of images; every default is "off".

    Attributes:
        shift: pad with zeros by this many px, then crop at random: moves the image up to `shift` px each way.
        crop_area: smallest and largest part of the image that a random crop keeps (image folders).
        rand_augment: timm's RandAugment, such as "rand-m9-mstd0.5-inc1" (image folders); empty is off.
        flip: probability of a left-right flip.
        erase: probability of random erasing (Zhong et al., 2017, arXiv:1708.04896), filled with the mean.
        erase_area: smallest and largest erased part of the image.
        mixup: Beta(α, α) parameter of mixup (Zhang et al., 2017, arXiv:1710.09412); 0 is off.
        cutmix: the same for CutMix (Yun et al., 2019, arXiv:1905.04899). With both on, each batch takes one
            of the two at random, as DeiT and Swin train.
    """

    shift: int = 0
    crop_area: tuple[float, float] = (0.35, 1.0)
    rand_augment: str = ""
    flip: float = 0.0
    erase: float = 0.0
    erase_area: tuple[float, float] = (0.02, 0.2)
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name, (valid, remedy) in _RULES.items():
            if not valid(getattr(self, name)):
                raise DataError(f"{name}={getattr(self, name)}: give {remedy}")

    @property
    def changes(self) -> bool:
        """Is anything switched on?"""
        return self != Augment()

    @property
    def mixes(self) -> bool:
        """Do batches carry soft targets, (B, num_classes), in place of labels, (B,)?"""
        return self.mixup > 0 or self.cutmix > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_probability(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_strength(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_area(value: Any) -> bool:
    pair = isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value))
    return pair and 0 < value[0] <= value[1] <= 1


# name -> (test, what to use instead)
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "shift": (lambda v: _is_strength(v) and isinstance(v, Integral), "a whole number of px, 0 or more"),
    "crop_area": (_is_area, "two parts of the image, the smaller first, above 0 and up to 1, such as 0.5:1"),
    "rand_augment": (lambda v: isinstance(v, str), "timm's words for it, such as rand-m9-mstd0.5-inc1"),
    "flip": (_is_probability, "a probability, 0 to 1"),
    "erase": (_is_probability, "a probability, 0 to 1"),
    "erase_area": (
        _is_area,
        "two parts of the image, the smaller first, above 0 and up to 1, such as 0.1:0.3",
    ),
    "mixup": (_is_strength, "a number, 0 or more"),
    "cutmix": (_is_strength, "a number, 0 or more"),
}

PRESETS = {
    "none": Augment(),
    "light": Augment(shift=2, flip=0.5),
    "medium": Augment(shift=3, flip=0.5, erase=0.25),
    "strong": Augment(shift=4, flip=0.5, erase=0.25, mixup=0.2, cutmix=1.0),
}


def augmentation(choice: Augment | str | None) -> Augment:
    """An `Augment` from itself, a preset's name ("none", "light", "medium", "strong") or None."""
    if isinstance(choice, Augment):
        return choice
    if choice is None or choice in PRESETS:
        return PRESETS[choice or "none"]
    raise DataError(f"augment={choice!r} is none of {', '.join(PRESETS)}, and no Augment(...)")


def parse_augment(text: str) -> Augment:
    """An `Augment` from a preset's name, or from fields: "shift=2,flip=0.5,crop_area=0.6:1".

    Raises:
        DataError: neither a preset nor known fields with values that they take.
    """
    if text in PRESETS:
        return PRESETS[text]
    try:
        return Augment(**dict(map(_field, text.split(","))))
    except DataError as error:
        raise DataError(f"augment={text!r}: {error}") from error


def _field(part: str) -> tuple[str, Any]:
    """("flip", 0.5) from "flip=0.5"."""
    name, _, value = (word.strip() for word in part.partition("="))
    if name not in _RULES:
        raise DataError(
            f"there is no {part.strip()!r}; write {', '.join(PRESETS)}, or values such as shift=2,flip=0.5 of "
            f"{', '.join(_RULES)}"
        )
    return name, _value(value)


def _value(text: str) -> Any:
    """A number, a pair "low:high" of numbers, or the text itself."""
    if ":" in text:
        return tuple(map(_value, text.split(":")))
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def check_shift(augment: Augment, size: tuple[int, int]) -> None:
    """Raise `DataError` where the augmentation moves images of a size, (H, W), out of the picture."""
    if augment.shift >= min(size):
        raise DataError(
            f"shift={augment.shift} moves the whole image out: give less than its side, {min(size)} px"
        )


class EpochBatches:
    """The batches of one epoch: which items each step gets. Subclasses say how items become a batch.

    Args:
        dataset: what the batches are made of.
        batch_size: images a batch; the last one may be smaller.
        shuffle: a new order each epoch, or the set's own.
        seed, epoch: with the step, all that a batch depends on.
        augment: an `Augment`, a preset's name ("light", ...), or None for evaluation.
        start_step: first step that iteration gives; to resume, the number of steps done.
        drop_last: leave out a last batch that is not full.
        share: which images of each batch to give, where several processes share it; random numbers are those of
            the whole batch.

    Iterating, or indexing with a step, gives x float32 (B, C, H, W), normalised, and y int64 (B,), or float32
    (B, num_classes) if the augmentation mixes. `len()` counts the whole epoch's steps.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        augment: Augment | str | None = None,
        start_step: int = 0,
        drop_last: bool = False,
        share: Share = WHOLE,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.augment = augmentation(augment)
        self.start_step = start_step
        self.drop_last = drop_last
        self.share = share
        share.rows(batch_size)  # raises where the batch cannot be shared
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch: new order, new augmentation."""
        self.epoch = epoch
        self.order = torch.from_numpy(epoch_order(len(self.dataset), self.shuffle, self.seed, epoch))

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def indices(self, step: int) -> Tensor:
        """The items of a step, of all processes: int64 (B,)."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch of {len(self)} steps")
        return self.order[step * self.batch_size : (step + 1) * self.batch_size]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.start_step, len(self)):
            yield self[step]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def stream(self, step: int) -> np.random.Generator:
        """Random numbers for the pixels of a step."""
        return random_stream(AUGMENT, self.seed, self.epoch, step)


class TensorBatches(EpochBatches):
    """Batches of an `ImageArrays`, by vectorised operations on whole batches, on the set's device."""

    def set_epoch(self, epoch: int) -> None:
        if not hasattr(self.dataset, "images"):
            raise DataError(f"{self.dataset} is not held in memory; use LoaderBatches for it")
        if self.augment.rand_augment:
            raise DataError("rand_augment works on image folders (LoaderBatches), not on sets held in memory")
        if self.augment.crop_area != Augment().crop_area:
            raise DataError("crop_area works on image folders (LoaderBatches), not on sets held in memory")
        check_shift(self.augment, self.dataset.size)
        super().set_epoch(epoch)
        self.order = self.order.to(self.dataset.images.device)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        x, labels = self._whole(step)
        if self.share == WHOLE:
            return x, labels
        rows = torch.from_numpy(self.share.rows(len(x))).to(x.device)
        return x[rows], labels[rows]

    def _whole(self, step: int) -> tuple[Tensor, Tensor]:
        data, augment, chosen = self.dataset, self.augment, self.indices(step)
        images, labels = data.images[chosen], data.labels[chosen]
        if not augment.changes:
            return data.prepare(images), labels
        rng = self.stream(step)
        x = fit_size(images, data.size)
        x = random_flip(random_shift(x, augment.shift, rng), augment.flip, rng)
        x = normalise(x, data.mean, data.std)
        return erase_and_mix(x, labels, data.num_classes, augment, rng)


def erase_and_mix(
    x: Tensor,
    labels: Tensor,
    num_classes: int,
    augment: Augment,
    rng: np.random.Generator,
    share: Share = WHOLE,
) -> tuple[Tensor, Tensor]:
    """The part of the augmentation that works on normalised images (B, C, H, W)."""
    x = random_erase(x, augment.erase, augment.erase_area, rng, share)
    return mix(x, labels, num_classes, augment, rng) if augment.mixes else (x, labels)


def random_shift(x: Tensor, shift: int, rng: np.random.Generator, share: Share = WHOLE) -> Tensor:
    """Move each image (B, C, H, W) by up to `shift` px each way; zeros come in at the edges."""
    if not shift:
        return x
    batch, _, height, width = x.shape
    rows, columns = share.each(lambda count: rng.integers(0, 2 * shift + 1, (2, count)), batch)
    padded = F.pad(x, (shift,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2s+1, 2s+1, H, W), a view
    return windows[np.arange(batch), :, rows, columns]


def random_flip(x: Tensor, probability: float, rng: np.random.Generator) -> Tensor:
    """Mirror each image (B, C, H, W) left to right with the given probability."""
    if not probability:
        return x
    chosen = torch.from_numpy(rng.random(len(x)) < probability).to(x.device)
    return torch.where(chosen.view(-1, 1, 1, 1), x.flip(-1), x)


def random_erase(
    x: Tensor, probability: float, area: tuple[float, float], rng: np.random.Generator, share: Share = WHOLE
) -> Tensor:
    """Set a random rectangle of some normalised images (B, C, H, W) to 0, which is the mean."""
    if not probability:
        return x
    batch = len(x)
    part = share.each(lambda count: rng.uniform(*area, count), batch)
    part = part * (share.each(rng.random, batch) < probability)
    aspect = np.exp(share.each(lambda count: rng.uniform(-1, 1, count), batch))  # height / width, 0.37 to 2.7
    return x.masked_fill(rectangles(x, part, aspect, rng, share), 0)


def rectangles(
    x: Tensor, part: np.ndarray, aspect: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
) -> Tensor:
    """One random rectangle an image as a boolean mask (B, 1, H, W), inside the image whole.

    `part` is its area over the image's, `aspect` its height over its width, both (B,).
    """
    height, width = x.shape[-2:]
    tall = np.minimum(np.round(height * np.sqrt(part * aspect)), height)
    wide = np.minimum(np.round(width * np.sqrt(part / aspect)), width)
    rows = _interval(height, tall, rng, x.device, share)
    columns = _interval(width, wide, rng, x.device, share)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def _interval(
    length: int, extent: np.ndarray, rng: np.random.Generator, device: torch.device, share: Share
) -> Tensor:
    """Boolean (B, length): a run of `extent` true values at a random place."""
    start = np.floor(share.each(rng.random, len(extent)) * (length - extent + 1))[:, None]
    at = np.arange(length)[None]
    return torch.from_numpy((at >= start) & (at < start + extent[:, None])).to(device)


def mix(
    x: Tensor, labels: Tensor, num_classes: int, augment: Augment, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix of a batch (B, C, H, W) with its own reverse; one ratio a batch.

    Returns:
        The mixed batch, and targets (B, num_classes): each image's share of the mixture; rows sum to 1.
    """
    targets = F.one_hot(labels, num_classes).to(x.dtype)
    cut = augment.cutmix > 0 and (augment.mixup == 0 or rng.random() < 0.5)
    alpha = augment.cutmix if cut else augment.mixup
    share = float(rng.beta(alpha, alpha))
    if cut:
        box = rectangles(x[:1], np.array([1 - share]), np.ones(1), rng)
        x, share = torch.where(box, x.flip(0), x), 1 - box.float().mean().item()
    else:
        x = torch.lerp(x.flip(0), x, share)
    return x, torch.lerp(targets.flip(0), targets, share)
