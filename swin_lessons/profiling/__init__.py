"""Measure before you optimise: MACs, memory and time of any model, and the machine they were measured on."""

from swin_lessons.profiling.kinds import kind_ranges, nvtx_ranges
from swin_lessons.profiling.machine import cpu_features, machine_info
from swin_lessons.profiling.macs import LayerMacs, MacReport, count_macs
from swin_lessons.profiling.memory import (
    LayerMemory,
    MemoryLedger,
    SavedTensors,
    memory_ledger,
    saved_by_kind,
    saved_for_backward,
)
from swin_lessons.profiling.peak import PeakMemory, peak_allocated, peak_memory
from swin_lessons.profiling.report import KindRow, Profile, kind_table, profile_model
from swin_lessons.profiling.roof import Roofline, measure_roofline, roofline
from swin_lessons.profiling.timing import Comparison, Timer, Timing, cache_bytes, compare, rotating
from swin_lessons.profiling.trace import KindTime, OpTime, Trace, trace_step
from swin_lessons.profiling.work import Work, count_work

__all__ = [
    "Comparison",
    "KindRow",
    "KindTime",
    "LayerMacs",
    "LayerMemory",
    "MacReport",
    "MemoryLedger",
    "OpTime",
    "PeakMemory",
    "Profile",
    "Roofline",
    "SavedTensors",
    "Timer",
    "Timing",
    "Trace",
    "Work",
    "cache_bytes",
    "compare",
    "count_macs",
    "count_work",
    "cpu_features",
    "kind_ranges",
    "kind_table",
    "machine_info",
    "measure_roofline",
    "memory_ledger",
    "nvtx_ranges",
    "peak_allocated",
    "peak_memory",
    "profile_model",
    "roofline",
    "rotating",
    "saved_by_kind",
    "saved_for_backward",
    "trace_step",
]
