"""What a run tells about itself: lines on the console and the files of its run directory.

Rank 0 alone makes a ``Recorder``; nothing here knows of other ranks. Each step becomes one ``StepMetrics``, which the
console shows and ``metrics.jsonl`` keeps; at the end the same numbers become ``loss.png`` and ``summary.md``.
"""

from .config import COLLECTIVES_FILE, PROFILE_FOLDER, Console, MetricsConfig, run_dir_path
from .loss_spikes import SpikeDetector
from .prediction import forecast_line
from .preflight import check_run_dir
from .recorder import Recorder
from .resume_log import Resumed
from .run_directory import RunDirectory, lock_run_dir, new_run_dir
from .run_environment import environment
from .step import StepMetrics, step_metrics

__all__ = [
    "COLLECTIVES_FILE",
    "PROFILE_FOLDER",
    "Console",
    "MetricsConfig",
    "Recorder",
    "Resumed",
    "RunDirectory",
    "SpikeDetector",
    "StepMetrics",
    "check_run_dir",
    "environment",
    "forecast_line",
    "lock_run_dir",
    "new_run_dir",
    "run_dir_path",
    "step_metrics",
]
