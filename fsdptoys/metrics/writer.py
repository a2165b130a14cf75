"""TODO."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .results import RunResults
from .step import StepMetrics


@dataclass(frozen=True)
class Beginning:
    """What a writer is told before the first step."""

    title: str
    config_tree: dict[str, Any]
    """Every setting, as plain values."""
    environment: dict[str, Any]
    """Versions, machine and command line."""
    run_dir: Path
    done: int
    """Steps that the run goes on after; what was written of later ones is no longer true."""


class Writer(Protocol):
    """One more place for a run's steps."""

    label: str
    """For people."""

    def start(self, beginning: Beginning) -> None:
        """Open what is written to."""

    def step(self, metrics: StepMetrics) -> None:
        """Write a step."""

    def flush(self) -> None:
        """Hand what was written to the system, since steps before a checkpoint do not come again."""

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write what the run adds up to; ``picture`` is its ``loss.png``."""

    def close(self) -> None:
        """Close what was opened, after a crash too; without ``finish`` the run counts as failed."""
