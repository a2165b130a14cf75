"""Read a run while it is being written: new metrics lines, and whether ranks are still running.

Nothing is written, locks are held only while testing them, and incomplete lines are left for the
next poll. When a run resumes from a checkpoint its metrics file is truncated and grows again, maybe
past the old offset: each poll compares the last line read with the file, and reads the whole file
again if it changed.
"""

import contextlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fsdptoys.config.saved import read_tree
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.config import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PREDICTION_FILE,
    RESUMES_FILE,
    SUMMARY_FILE,
    MetricsConfig,
)
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.metrics.results import RunResults, summarize
from fsdptoys.metrics.resume_log import Resume, read_resumes, starts
from fsdptoys.train.heartbeat import Heartbeat
from fsdptoys.train.recorded_run import (
    MOST_RANKS,
    is_written,
    newest_heartbeats,
    read_warmup,
)
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.regular_file import open_regular

LONGEST_LINE_BYTES = 2**26
MOST_STEPS = 2**53
# A rank is late if it stays behind the others for this long and for three step times
LATE_SECONDS = 5.0


class State(Enum):
    """State of a run."""

    starting = "starting"
    running = "running"
    ended = "ended"
    gone = "ended without a summary"  # Killed or failed


@dataclass(frozen=True)
class Settings:
    """Displayed contents of the files that each start of a run writes once."""

    title: str
    planned_steps: int | None
    warmup_steps: int
    log_every: int
    world_size: int | None
    device: str | None
    prediction: Prediction | None


class FollowedRun:
    """Recorded steps, resumes and settings of a run; :meth:`poll` updates them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[StepMetrics] = []
        self.resumes: list[Resume] = []
        self.settings = _read_settings(path)
        self._versions: dict[str, tuple[int, int] | None] = {}
        self._offset = 0
        self._last_line = b""

    def poll(self) -> None:
        """Read new lines, or all after the run resumed from an earlier step."""
        self._read_steps()
        # After the steps: a run writes its settings first, so these steps never appear with older
        # settings.
        names = (CONFIG_FILE, ENVIRONMENT_FILE, PREDICTION_FILE, RESUMES_FILE)
        versions = {name: _version(self.path / name) for name in names}
        if versions != self._versions:
            self._versions = versions
            self.settings = _read_settings(self.path)
            self.resumes = []
            # Something else than a file, as for the steps
            with contextlib.suppress(OSError):
                self.resumes = read_resumes(self.path / RESUMES_FILE)

    def _read_steps(self) -> None:
        steps = self.steps
        offset = self._offset
        last_line = self._last_line
        self.steps = []
        self._offset = 0
        self._last_line = b""
        # Missing, or moved aside by a new start
        with (
            contextlib.suppress(OSError),
            open_regular(self.path / METRICS_FILE) as file,
        ):
            file.seek(offset - len(last_line))
            if file.read(len(last_line)) == last_line:
                self.steps = steps.copy()
                self._offset = offset
                self._last_line = last_line
            file.seek(self._offset)
            for line in iter(lambda: file.readline(LONGEST_LINE_BYTES), b""):
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._last_line = line
                with contextlib.suppress(ValueError):
                    self.steps.append(StepMetrics.from_json(line.decode()))

    def state(self) -> State:
        """Current state of the run."""
        if is_written(self.path):
            return State.running if self.steps else State.starting
        return State.ended if (self.path / SUMMARY_FILE).exists() else State.gone

    def signs(self) -> dict[int, Heartbeat]:
        """Latest heartbeat of each rank of the newest start."""
        return newest_heartbeats(self.path)

    def results(self) -> RunResults:
        """Summary of the steps so far."""
        return summarize(self.steps, self.settings.warmup_steps, starts(self.resumes))

    def seconds_left(self) -> float | None:
        """Time of the remaining steps at the median of the last 50; excludes evaluations and
        checkpoints."""
        planned = self.settings.planned_steps
        if planned is None or not self.steps:
            return None
        times = sorted(metrics.step_time_seconds for metrics in self.steps[-50:])
        return max(0, planned - self.steps[-1].step) * times[len(times) // 2]

    def late_ranks(self, signs: dict[int, Heartbeat], now: float) -> dict[object, str]:
        """Describe each rank that has ended, is stopped, or is late.

        The key identifies the event, so that it is printed once; the sentence includes its age.
        """
        if not signs:
            return {}
        patience = (
            max(LATE_SECONDS, 3 * self.steps[-1].step_time_seconds)
            if self.steps
            else LATE_SECONDS
        )
        foremost = max(sign.progress for sign in signs.values())
        late: dict[object, str] = {}
        for rank, sign in signs.items():
            state = sign.state()
            if state is not None:
                late[rank, state] = (
                    f"rank {rank} {state}; its last heartbeat is of {sign.describe(now)}"
                )
            elif sign.progress < foremost and now - sign.time > patience:
                late[rank, sign.progress] = (
                    f"rank {rank} is late; its last heartbeat is of {sign.describe(now)}"
                )
        return late


def _read_settings(path: Path) -> Settings:
    """Read settings from files that may be missing or half written; the next poll reads changed
    files again."""
    config = _read_tree(path / CONFIG_FILE)
    environment = _read_tree(path / ENVIRONMENT_FILE)
    names = [look_up(config, "model.name"), look_up(config, "parallel.name")]
    prediction = None
    device = look_up(environment, "device.name")
    with contextlib.suppress(ValueError):  # another version, or missing
        prediction = Prediction.from_dict(read_tree(path / PREDICTION_FILE))
    return Settings(
        title="-".join(str(name) for name in names if name) or path.name,
        planned_steps=_number(look_up(config, "train.steps")),
        warmup_steps=read_warmup(config),
        log_every=_number(look_up(config, "metrics.log_every"))
        or MetricsConfig().log_every,
        world_size=_number(environment.get("world_size"), MOST_RANKS),
        device=device if isinstance(device, str) else None,
        prediction=prediction,
    )


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        return read_tree(path)
    except ConfigError:
        return {}


def _number(value: Any, most: int = MOST_STEPS) -> int | None:
    return value if type(value) is int and 0 < value <= most else None


def _version(path: Path) -> tuple[int, int] | None:
    """Modification time in nanoseconds and size in bytes; None if the file is missing."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
