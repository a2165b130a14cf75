"""Profiling: traces of a few steps, memory snapshots, and out-of-memory reports."""

from .config import DebugConfig, NPULevel, ProfileConfig
from .live_bytes import LiveBytes, PlacedBytes, live_bytes
from .oom_advice import Saving, Switches
from .oom_report import (
    ExplainedOutOfMemoryError,
    Failure,
    OOMContext,
    explain_out_of_memory,
    is_out_of_memory,
    out_of_memory_report,
)
from .profiler import Profiler

__all__ = [
    "DebugConfig",
    "ExplainedOutOfMemoryError",
    "Failure",
    "LiveBytes",
    "NPULevel",
    "OOMContext",
    "PlacedBytes",
    "ProfileConfig",
    "Profiler",
    "Saving",
    "Switches",
    "explain_out_of_memory",
    "is_out_of_memory",
    "live_bytes",
    "out_of_memory_report",
]
