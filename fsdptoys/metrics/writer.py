"""Interface of the optional writers of steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .results import RunResults
from .step import StepMetrics


@dataclass(frozen=True)
class RunStart:
    """Facts of a run for its writers before the first step."""

    title: str
    config_tree: dict[str, Any]
    """All settings, as plain values."""
    environment: dict[str, Any]
    """Versions, hardware and command line."""
    run_dir: Path
    done: int
    """Step from which the run resumes; data written for later steps is obsolete."""


class Writer(Protocol):
    """An additional destination of a run's steps."""

    label: str
    """Name for messages."""

    def start(self, run: RunStart) -> None:
        """Open the destination."""

    def step(self, metrics: StepMetrics) -> None:
        """Write a step."""

    def flush(self) -> None:
        """Flush buffers to the system before a checkpoint, since earlier steps are not repeated."""

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results; ``picture`` is the path of ``loss.png``."""

    def close(self) -> None:
        """Close the destination, also after a crash; without ``finish`` the run counts as failed."""
