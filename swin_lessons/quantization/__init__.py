"""INT8 and INT4: calibration, quantisation-aware training, integer layers, and where rounding hurts."""

from .config import KINDS as KINDS
from .config import QuantConfig
from .exact import exact_product, integer_product, pack_int4, unpack_int4
from .fake import DynamicQuantize, FakeQuantize, Place, Quantizer, quantizers, switch
from .files import load, save
from .grid import Grid, scale_and_zero_point
from .modules import IntConv2d, IntLinear, QuantConv2d, QuantLinear
from .observers import (
    EntropyObserver,
    HistogramObserver,
    MovingAverageObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
    make_observer,
)
from .points import Plan, Point, find_points
from .ptq import calibrate, convert, ptq
from .qat import conversion_gap, prepare_qat, qat_loss, train_qat
from .sensitivity import Budgeted, Sensitivity, budgeted, select, sensitivity

__all__ = [
    "Budgeted",
    "DynamicQuantize",
    "EntropyObserver",
    "FakeQuantize",
    "Grid",
    "HistogramObserver",
    "IntConv2d",
    "IntLinear",
    "MSEObserver",
    "MovingAverageObserver",
    "Observer",
    "PercentileObserver",
    "Place",
    "Plan",
    "Point",
    "QuantConfig",
    "QuantConv2d",
    "QuantLinear",
    "Quantizer",
    "Sensitivity",
    "budgeted",
    "calibrate",
    "conversion_gap",
    "convert",
    "exact_product",
    "find_points",
    "integer_product",
    "load",
    "make_observer",
    "pack_int4",
    "prepare_qat",
    "ptq",
    "qat_loss",
    "quantizers",
    "save",
    "scale_and_zero_point",
    "select",
    "sensitivity",
    "switch",
    "train_qat",
    "unpack_int4",
]
