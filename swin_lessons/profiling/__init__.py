"""Measure before you optimise: MACs, memory and time of any model, and the machine they were measured on."""

from swin_lessons.profiling.machine import cpu_features, machine_info
from swin_lessons.profiling.macs import LayerMacs, MacReport, count_macs

__all__ = ["LayerMacs", "MacReport", "count_macs", "cpu_features", "machine_info"]
