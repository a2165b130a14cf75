"""Settings of the metrics room, and whether a run directory can be used, asked before anything starts."""

import math
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fsdptoys.errors import ConfigError

RUNS_FOLDER = Path("runs")
"""Where runs without a folder of their own go, below the current directory."""

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
ROUTING_FILE = "routing.jsonl"
RESUMES_FILE = "resumes.jsonl"
LOSS_FILE = "loss.png"
EXPERTS_FILE = "experts.png"
SUMMARY_FILE = "summary.md"
PREDICTION_FILE = "prediction.json"
PROFILE_FOLDER = "profile"

RUN_FILES = {
    METRICS_FILE: "one line of JSON a step",
    ROUTING_FILE: "tokens sent to each expert: one line of JSON every so many steps, a row a layer with experts",
    CONFIG_FILE: "every setting of the run",
    ENVIRONMENT_FILE: "versions, machine and command line",
    RESUMES_FILE: "one line of JSON each time the run went on: from where, on how many ranks, with what changed",
    PREDICTION_FILE: "what was predicted before the first step of the last start",
    LOSS_FILE: "loss and gradient norm against the step",
    EXPERTS_FILE: "load of each expert in the last step, and the balance against the step",
    PROFILE_FOLDER: "traces and memory snapshots of the chosen ranks",
    SUMMARY_FILE: "this page",
}
"""What a run writes → what it holds."""

EXPERT_FILES = (ROUTING_FILE, EXPERTS_FILE)
"""Those that only runs of models with experts write."""

LOCK_FILE = ".lock"
"""Held by the process that writes the run, and holds its number."""


class Console(Enum):
    """What rank 0 prints."""

    auto = "auto"
    """``rich`` on a terminal, ``plain`` elsewhere."""
    rich = "rich"
    """A progress bar over a table of the latest step; into a file only its last state is written."""
    plain = "plain"
    """One line every ``log_every`` steps."""
    none = "none"
    """Nothing; the run directory is written all the same."""


@dataclass
class MetricsConfig:
    """What a run tells about itself."""

    run_dir: str | None = None
    """Folder for the run's files, made if missing; null for ``runs/<date>-<time>-<title>``."""
    console: Console = Console.auto
    """What rank 0 prints."""
    log_every: int = 10
    """Steps between two lines of the plain console, and of ``routing.jsonl``; the last step has a line too."""
    warmup_steps: int = 2
    """First steps of each start left out of the summary's medians: they pay for allocation and compilation."""
    spike_threshold: float = 8.0
    """A loss so many robust standard deviations over the median of those before is told as a spike; 0 for none."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        if self.run_dir is not None and not self.run_dir.strip():
            raise ConfigError(
                f"metrics.run_dir={self.run_dir!r} must name a folder; set metrics.run_dir=null for one named by time "
                "and title"
            )
        if self.log_every < 1:
            raise ConfigError(f"metrics.log_every={self.log_every} must be at least 1; set metrics.log_every=1")
        if self.warmup_steps < 0:
            raise ConfigError(
                f"metrics.warmup_steps={self.warmup_steps} must be at least 0; set metrics.warmup_steps=0"
            )
        if not (math.isfinite(self.spike_threshold) and self.spike_threshold >= 0):
            raise ConfigError(
                f"metrics.spike_threshold={self.spike_threshold} must be at least 0; set metrics.spike_threshold=8, or "
                "0 for none"
            )


def run_dir_path(run_dir: str) -> Path:
    """The folder that ``metrics.run_dir`` names, with ``~`` as the home directory."""
    return Path(os.path.expanduser(run_dir))


def check_run_dir(config: MetricsConfig, resumes: bool = False) -> None:
    """Check that the run directory can be made or filled, without making it.

    Args:
        config: says which folder.
        resumes: whether an earlier run's files may be there, to be gone on with.

    Raises:
        ConfigError: if it is a file, holds files that a run would overwrite, or cannot be written.
    """
    path = RUNS_FOLDER if config.run_dir is None else run_dir_path(config.run_dir)
    key = f"metrics.run_dir={'null' if config.run_dir is None else config.run_dir}"
    if config.run_dir is not None and not resumes:
        for name in RUN_FILES:
            if os.path.lexists(path / name):
                raise ConfigError(already_holds(config.run_dir, name))
    nearest = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise ConfigError(f"{key} needs a folder at {nearest}, which is something else; set metrics.run_dir=runs/NAME")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key} needs to write into {nearest}, which this user may not; set metrics.run_dir to a folder that "
            "can be written"
        )


def already_holds(run_dir: object, name: str) -> str:
    """The sentence for a folder in which a run would overwrite a file."""
    return (
        f"metrics.run_dir={run_dir} already holds {name}, which a run would overwrite; set checkpoint.resume=auto to "
        "go on with it, or metrics.run_dir to a new folder (null for one named by time and title)"
    )
