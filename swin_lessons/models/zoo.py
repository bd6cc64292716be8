"""Trained weights by name: the book's micro zoo on disk, timm's checkpoints over the network."""

import os
import sys
from pathlib import Path

from torch import nn

from .checkpoints.hub import fetch_pretrained
from .weights import load_weights

ENVIRONMENT = "SWIN_LESSONS_ZOO"


def zoo_folder() -> Path:
    """Where the micro zoo lies: `$SWIN_LESSONS_ZOO`, the checkout this package is in, or where pip put it."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    checkout = Path(__file__).parents[2] / "book" / "results" / "zoo"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "swin-lessons" / "zoo"


def load_pretrained(model: nn.Module, name: str) -> None:
    """Fill a freshly built model with the trained weights of its name.

    A classifier of another size keeps its fresh weights; everything else must fit.

    Raises:
        FileNotFoundError: the zoo's file of that name is not here.
        ConnectionError, ModuleNotFoundError: timm's weights cannot be fetched; the message says what to do.
    """
    if "_micro_" in name:
        path = zoo_folder() / f"{name}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(
                f"no weights {path}: install from a checkout of the book, set {ENVIRONMENT} to the folder that "
                f"holds {name}.safetensors, or train it with `swin-lessons zoo --train {name}`"
            )
    else:
        path = fetch_pretrained(name)
    load_weights(model, path)
