"""What a run tells about itself: lines on the console and the files of its run directory.

Rank 0 alone makes a ``Recorder``; nothing here knows of other ranks. Each step becomes one ``StepMetrics``, which the
console shows and ``metrics.jsonl`` keeps; at the end the same numbers become ``loss.png`` and ``summary.md``.
"""

from .config import PROFILE_FOLDER, Console, MetricsConfig, check_run_dir
from .provenance import environment
from .recorder import Recorder
from .run_directory import RunDirectory
from .step import StepMetrics, step_metrics

__all__ = [
    "PROFILE_FOLDER",
    "Console",
    "MetricsConfig",
    "Recorder",
    "RunDirectory",
    "StepMetrics",
    "check_run_dir",
    "environment",
    "step_metrics",
]
