"""Read a run directory: configuration, environment, step metrics and prediction of a run.

Unfinished and killed runs are read as far as they got. Whether a process is writing the directory
now follows from its lock, and, on file systems without shared locks, from the ranks' heartbeats.
"""

import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptoys.config.saved import read_config, read_tree
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.config import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PREDICTION_FILE,
    RESULT_FILE,
    RESUMES_FILE,
    SUMMARY_FILE,
    MetricsConfig,
)
from fsdptoys.metrics.prediction import Prediction, PredictionError
from fsdptoys.metrics.results import (
    RunResult,
    RunResults,
    prediction_errors,
    read_result,
    summarize,
)
from fsdptoys.metrics.resume_log import read_resumes, read_steps, starts
from fsdptoys.utils.file_lock import is_locked
from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.from_tree import convert, look_up
from fsdptoys.utils.text import one_line

from .heartbeat import HEARTBEATS_FOLDER, Heartbeat, read_heartbeats

FRESH_SECONDS = 120.0
"""Without a visible lock, a run counts as running if a rank's last heartbeat is at most this
old."""


def is_written(path: Path) -> bool:
    """Whether a run is writing this directory, as far as this machine can see."""
    now = time.time()
    return is_locked(path) or any(
        abs(now - beat.time) < FRESH_SECONDS and beat.state() != "has ended"
        for beat in newest_heartbeats(path).values()
    )


def newest_heartbeats(path: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of each rank of the newest start in a run directory."""
    signs = read_heartbeats(path / HEARTBEATS_FOLDER)
    newest = max(signs.values(), key=lambda beat: beat.time, default=None)
    return {
        rank: beat
        for rank, beat in signs.items()
        if newest is not None and beat.start == newest.start
    }


LARGEST_LINES_BYTES = 2**29
"""Limit for ``metrics.jsonl``: about a million steps."""

MOST_RANKS = 2**20
MOST_STEPS = 2**53


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run directory."""

    path: Path
    tree: dict[str, Any]
    """Every setting, as in ``config.yaml``."""
    environment: dict[str, Any]
    """Versions, machine and command, as in ``environment.json``."""
    world_size: int
    device_type: str
    device_name: str
    steps: list[StepMetrics]
    results: RunResults
    """Summary of the steps after the warm-up."""
    prediction: Prediction | None
    """The prediction made before the run, if any."""
    result: RunResult | None = None
    """``result.json``; None for runs that were killed or recorded without it."""
    notes: tuple[str, ...] = ()
    """Sentences about parts that could not be read."""

    @property
    def finished(self) -> bool:
        """Whether the run ended in order and wrote its summary, possibly before its last step."""
        return (self.path / SUMMARY_FILE).exists()

    @property
    def running(self) -> bool:
        """Whether a process is writing it now, as far as this machine can see."""
        return is_written(self.path)

    def config(self) -> Config:
        """The configuration, not validated, as far as it affects step time; see
        :func:`read_config`."""
        return read_config(self.tree, str(self.path / CONFIG_FILE))

    def prediction_errors(self) -> list[PredictionError]:
        """Predicted and measured values; empty without a prediction."""
        return (
            prediction_errors(self.prediction, self.results)
            if self.prediction is not None
            else []
        )


def is_run_dir(path: Path) -> bool:
    """Whether a run has started to write into this folder."""
    return (path / CONFIG_FILE).is_file() and (path / METRICS_FILE).is_file()


def read_recorded_run(path: Path) -> RecordedRun:
    """Read a run directory; ConfigError if it is none, or a file in it cannot be read."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no run directory; give one that fsdptoys train has written, as runs/NAME"
        )
    environment = read_tree(path / ENVIRONMENT_FILE)
    try:
        world_size: int = convert(int, environment.get("world_size"), "world_size")
        device: dict[str, Any] = convert(
            dict[str, Any], environment.get("device"), "device"
        )
        if not 1 <= world_size <= MOST_RANKS:
            raise ForeignError(f"world_size is {world_size}")
        device_type, device_name = (
            convert(str, device.get(key), f"device.{key}") for key in ("type", "name")
        )
    except ForeignError as mistake:
        raise ConfigError(
            f"{path / ENVIRONMENT_FILE} does not describe the machine of the run ({mistake}); "
            f"leave {path} out"
        ) from mistake
    tree = read_tree(path / CONFIG_FILE)
    for name in (METRICS_FILE, RESUMES_FILE):
        _check_file(path / name)
    steps, notes = read_steps(path / METRICS_FILE)
    results = summarize(
        steps, read_warmup(tree), starts(read_resumes(path / RESUMES_FILE))
    )
    prediction = None
    if (path / PREDICTION_FILE).exists():
        try:
            prediction = Prediction.from_dict(read_tree(path / PREDICTION_FILE))
        except ConfigError as mistake:
            notes.append(str(mistake))
        except ForeignError:
            notes.append(
                f"{path / PREDICTION_FILE} was written by another version and is left out"
            )
    result = None
    try:
        result = read_result(path)
    except ForeignError as mistake:
        notes.append(f"{path / RESULT_FILE} cannot be read ({mistake}) and is left out")
    return RecordedRun(
        path,
        tree,
        environment,
        world_size,
        device_type,
        device_name,
        steps,
        results,
        prediction,
        result,
        tuple(notes),
    )


def read_warmup(tree: Mapping[str, Any]) -> int:
    """``metrics.warmup_steps`` of a run's settings, or its default if missing or invalid."""
    warmup = look_up(tree, "metrics.warmup_steps")
    return (
        warmup
        if type(warmup) is int and 0 <= warmup <= MOST_STEPS
        else MetricsConfig().warmup_steps
    )


def _check_file(path: Path) -> None:
    """Refuse pipes and devices, on which a read could block, and files larger than any run
    writes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ForeignError("it is not a regular file")
        if status.st_size > LARGEST_LINES_BYTES:
            raise ForeignError(f"it is longer than {LARGEST_LINES_BYTES} bytes")
    except FileNotFoundError:
        return
    except (OSError, ForeignError) as mistake:
        raise ConfigError(
            f"{path} cannot be read ({one_line(mistake)}); use the file that the run wrote"
        ) from mistake
