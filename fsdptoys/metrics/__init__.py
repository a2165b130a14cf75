"""Metrics of a run: console output and the files of the run directory.

Only rank 0 constructs a ``RunRecorder``; nothing here communicates with other ranks. Each step
becomes one ``StepMetrics``, shown on the console and appended to ``metrics.jsonl``. At the end of
the run, the same numbers are plotted in ``loss.png`` and summarized in ``summary.md``.
"""

from .config import (
    COLLECTIVES_FILE,
    PROFILE_FOLDER,
    Console,
    MetricsConfig,
    run_dir_path,
)
from .loss_spikes import SpikeDetector
from .prediction import prediction_line
from .preflight import check_run_dir
from .recorder import RunRecorder
from .registry import WRITERS
from .resume_log import ResumePoint
from .run_directory import RunDirectory, lock_run_dir, new_run_dir
from .run_environment import environment
from .step import StepMetrics, measure_memory, step_rates
from .writer import RunStart, Writer, WriterConfig

__all__ = [
    "COLLECTIVES_FILE",
    "PROFILE_FOLDER",
    "WRITERS",
    "Console",
    "MetricsConfig",
    "ResumePoint",
    "RunDirectory",
    "RunRecorder",
    "RunStart",
    "SpikeDetector",
    "StepMetrics",
    "Writer",
    "WriterConfig",
    "check_run_dir",
    "environment",
    "lock_run_dir",
    "measure_memory",
    "new_run_dir",
    "prediction_line",
    "run_dir_path",
    "step_rates",
]
