"""Swin Transformer V1 and V2, DeiT, and the weights to fill them with."""

from .registry import create_model, list_models
from .swin import SwinBlock, SwinBlockV2, SwinConfig, SwinStage, SwinTransformer
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
