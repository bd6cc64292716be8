"""Swin Transformer V1 and V2, DeiT, and the weights to fill them with."""

from .blocks import SwinBlock, SwinBlockV2
from .config import SwinConfig
from .registry import create_model, list_models
from .swin import SwinStage, SwinTransformer
from .vit import VisionTransformer, ViTConfig
from .weights import LoadReport, load_weights, save_weights

__all__ = [
    "LoadReport",
    "SwinBlock",
    "SwinBlockV2",
    "SwinConfig",
    "SwinStage",
    "SwinTransformer",
    "ViTConfig",
    "VisionTransformer",
    "create_model",
    "list_models",
    "load_weights",
    "save_weights",
]
