"""Measure before you optimise: MACs, memory and time of any model, and the machine they were measured on."""

from swin_lessons.profiling.machine import cpu_features, machine_info
from swin_lessons.profiling.macs import LayerMacs, MacReport, count_macs
from swin_lessons.profiling.memory import MemoryLedger, SavedTensors, memory_ledger, saved_for_backward
from swin_lessons.profiling.peak import PeakMemory, peak_memory
from swin_lessons.profiling.timing import Comparison, Timer, Timing, compare

__all__ = [
    "Comparison",
    "LayerMacs",
    "MacReport",
    "MemoryLedger",
    "PeakMemory",
    "SavedTensors",
    "Timer",
    "Timing",
    "compare",
    "count_macs",
    "cpu_features",
    "machine_info",
    "memory_ledger",
    "peak_memory",
    "saved_for_backward",
]
