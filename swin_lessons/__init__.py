"""Swin Lessons: Swin Transformer V1 and V2, built, trained, profiled, made fast and made small."""

__version__ = "0.1.0"
