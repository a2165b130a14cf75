"""Settings of the metrics, and names of the files in a run directory."""

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.register import registered
from fsdptoys.utils.bounds import MOST_STEPS, at_least
from fsdptoys.utils.named_items import check_names
from fsdptoys.utils.options import Effect, check_options, option

RUNS_FOLDER = Path("runs")
"""Parent of run directories that the configuration does not name, below the current directory."""

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"
ROUTING_FILE = "routing.jsonl"
RESUMES_FILE = "resumes.jsonl"
LOSS_FILE = "loss.png"
EXPERTS_FILE = "experts.png"
RESULT_FILE = "result.json"
SUMMARY_FILE = "summary.md"
PREDICTION_FILE = "prediction.json"
PROFILE_FOLDER = "profile"
COLLECTIVES_FILE = "collectives.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
MLFLOW_FOLDER = "mlflow"
TRACKIO_FOLDER = "trackio"

RUN_FILES = {
    METRICS_FILE: "metrics of each step, one JSON object per line",
    CSV_FILE: "metrics of each step, one row per line",
    ROUTING_FILE: "tokens per MoE layer and expert, one JSON object per recorded step",
    CONFIG_FILE: "all settings of the run",
    ENVIRONMENT_FILE: "versions, hardware and command line",
    RESUMES_FILE: "one JSON object per resume: checkpoint, number of ranks, changed settings",
    PREDICTION_FILE: "prediction before the first step of the last start",
    LOSS_FILE: "loss and gradient norm over the steps",
    EXPERTS_FILE: "load of each expert in the last step, and the balance over the steps",
    PROFILE_FOLDER: "traces and memory snapshots of the profiled ranks",
    COLLECTIVES_FILE: "collectives of one step on rank 0, one JSON object per line",
    TENSORBOARD_FOLDER: (
        "metrics of each step for TensorBoard (`tensorboard --logdir` with this folder or a parent)"
    ),
    WANDB_FOLDER: (
        "files of Weights & Biases; `wandb sync` with an `offline-run-…` folder uploads that run"
    ),
    MLFLOW_FOLDER: (
        "run id of MLflow, and the run itself unless a server has it (`mlflow ui` with "
        "`--backend-store-uri` and this folder)"
    ),
    TRACKIO_FOLDER: "database of Trackio (`TRACKIO_DIR=… trackio show` with this folder)",
    RESULT_FILE: "all numbers of this page as JSON",
    SUMMARY_FILE: "this page",
}
"""File or folder of a run directory → its content, as listed in ``summary.md``."""

RUN_FOLDERS = (
    PROFILE_FOLDER,
    TENSORBOARD_FOLDER,
    WANDB_FOLDER,
    MLFLOW_FOLDER,
    TRACKIO_FOLDER,
)
"""Folders in ``RUN_FILES``, or links to one; the other entries are regular files."""

BUILT_IN_WRITERS = ("tensorboard", "wandb", "csv", "mlflow", "trackio")
"""Names of the optional writers; ``registry`` has their classes."""


class WandbMode(Enum):
    """How Weights & Biases records a run."""

    online = "online"
    """Upload during the run; needs an API key."""
    offline = "offline"
    """Write into the run directory without any request; ``wandb sync`` uploads it later."""
    disabled = "disabled"
    """Record nothing."""


class Console(Enum):
    """Console output of rank 0."""

    auto = "auto"
    """``rich`` on a terminal, ``plain`` elsewhere."""
    rich = "rich"
    """A progress bar over a table of the latest step; a file gets only the last state."""
    plain = "plain"
    """One line every ``log_every`` steps."""
    none = "none"
    """Nothing; the run directory is still written."""


@dataclass
class MetricsConfig:
    """Console output, run directory and optional writers of a run."""

    run_dir: str | None = option(
        None,
        effect=Effect.none,
        alias="output_dir out_dir save_dir log_dir logging_dir",
    )
    """Folder for the run's files, created if missing; null for ``runs/<date>-<time>-<title>``."""
    console: Console = option(Console.auto, effect=Effect.none)
    """Console output of rank 0."""
    log_every: int = option(
        10,
        at_least(1, MOST_STEPS),
        effect=Effect.none,
        alias="logging_steps log_interval log_freq print_every",
    )
    """Steps between lines of the plain console and of ``routing.jsonl``; the last step always has a
    line.

    With ``train.skip_nonfinite=false`` on an accelerator, also steps between reads of metrics and
    stop signals.
    """
    warmup_steps: int = option(2, at_least(0, MOST_STEPS), effect=Effect.none)
    """First steps of each start to exclude from the summary's medians; they include compilation."""
    spike_threshold: float = option(8.0, at_least(0), effect=Effect.none)
    """Robust standard deviations above the median of earlier losses that make a loss spike; 0 for
    never."""

    writers: list[str] = option([], effect=Effect.none)
    """Additional destinations of every step: tensorboard, wandb, csv, mlflow, trackio, or
    registered ones. Options of a writer are ``writers.NAME.KEY``."""
    wandb_project: str | None = option(
        None, effect=Effect.none, needs="metrics.writers=wandb"
    )
    """Project at Weights & Biases; null for WANDB_PROJECT or, if unset, wandb's default."""
    wandb_entity: str | None = option(
        None, effect=Effect.none, needs="metrics.writers=wandb"
    )
    """User or team at Weights & Biases; null for WANDB_ENTITY or, if unset, the user's own."""
    wandb_mode: WandbMode | None = option(
        None, effect=Effect.none, needs="metrics.writers=wandb"
    )
    """Whether to upload the run; null for WANDB_MODE or, if unset, online."""

    def __post_init__(self) -> None:
        """Check each value; ConfigError for one out of range, or a wandb setting without the wandb
        writer."""
        check_options("metrics", self)
        writer_names = (*BUILT_IN_WRITERS, *registered("writers"))
        check_names("metrics.writers", self.writers, writer_names)
        for key in ("wandb_project", "wandb_entity", "wandb_mode"):
            value = getattr(self, key)
            if isinstance(value, str) and not value.strip():
                raise ConfigError(
                    f"metrics.{key}={value!r} must not be empty; leave it out"
                )
        if self.run_dir is not None and not self.run_dir.strip():
            raise ConfigError(
                f"metrics.run_dir={self.run_dir!r} must name a folder; set metrics.run_dir=null "
                "for one named by time and title"
            )


def run_dir_path(run_dir: str) -> Path:
    """The folder named by ``metrics.run_dir``, with ``~`` expanded."""
    return Path(os.path.expanduser(run_dir))
