"""Optional writers, TensorBoard and Weights & Biases, which receive the same numbers as ``metrics.jsonl``.

A writer that fails at its start or later (full disk, no network) is reported once and removed; the run continues.
The packages are optional dependencies, imported only on rank 0 and only if configured.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
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
        """Open the destination; the package is imported here."""

    def step(self, metrics: StepMetrics) -> None:
        """Write a step."""

    def flush(self) -> None:
        """Flush buffers to the system before a checkpoint, since earlier steps are not repeated."""

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results; ``picture`` is the path of ``loss.png``."""

    def close(self) -> None:
        """Close the destination, also after a crash or twice; without ``finish`` the run counts as failed."""


class Writers:
    """The writers of a run; each is removed when it fails.

    Args:
        writers: the configured writers.
        message: shows a message to the user.
        step: last step, for messages.
    """

    def __init__(self, writers: Sequence[Writer], message: Callable[[str], None], step: int) -> None:
        self._writers = list(writers)
        self._message = message
        self.last_step = step

    def each(self, call: Callable[[Writer], None]) -> None:
        """Call a method of all writers."""
        for writer in list(self._writers):
            try:
                call(writer)
            except Exception as error:  # no exception of an optional package may end the training
                self._writers.remove(writer)
                with suppress(Exception):
                    writer.close()
                reason = " ".join(str(error).split()) or type(error).__name__
                self._message(
                    f"{writer.label} failed after step {self.last_step} ({reason}) and is disabled; "
                    "metrics.jsonl has every step"
                )
