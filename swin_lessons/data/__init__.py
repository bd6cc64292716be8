"""Data sets: `load_dataset("fashion-mnist")`, and batches that a resumed run repeats exactly.

>>> train = load_dataset("fashion-mnist", split="train", img_size=32)
>>> for x, y in TensorBatches(train, batch_size=256, seed=0, epoch=0, augment="light"): ...
"""

from swin_lessons.data.arrays import ImageArrays
from swin_lessons.data.batches import Augment, TensorBatches
from swin_lessons.data.catalogue import DataSpec, fetch, list_datasets, load_dataset
from swin_lessons.data.files import DataError
from swin_lessons.data.imagefolder import ImageFolder
from swin_lessons.data.loaders import LoaderBatches
from swin_lessons.data.loaders import LoaderBatches as loader_batches

__all__ = [
    "Augment",
    "DataError",
    "DataSpec",
    "ImageArrays",
    "ImageFolder",
    "LoaderBatches",
    "TensorBatches",
    "fetch",
    "list_datasets",
    "load_dataset",
    "loader_batches",
]
