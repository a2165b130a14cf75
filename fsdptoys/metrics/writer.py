"""What a writer is: a destination of every step beside ``metrics.jsonl``.

A writer of your own is a config dataclass, whose fields are options, and a class::

    @register.writer("lines")
    class LinesConfig(WriterConfig):
        file: str = "lines.txt"  # writers.lines.file

        def build(self) -> Writer:
            return LinesWriter(self.file)


    class LinesWriter(Writer):
        label = "Lines"

        def __init__(self, file: str) -> None:
            self._file = file

        def start(self, run: RunStart) -> None:
            self._path = run.run_dir / self._file

        def step(self, metrics: StepMetrics) -> None:
            with self._path.open("a") as file:
                file.write(f"{metrics.step} {metrics.loss}\\n")

``metrics.writers=[lines]`` chooses it. Only rank 0 has writers. One that raises an exception is
reported once and removed, and the run continues: a writer must not change the training.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import check_bounds

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
    resumed_step: int
    """Step from which the run resumes; data written for later steps is obsolete."""


class Writer:
    """An additional destination of a run's steps. Override the hooks that you need."""

    label: str = "the writer"
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
        """Close the destination, also after a crash or twice; without ``finish`` the run counts as
        failed."""


@dataclass
class WriterConfig(ABC):
    """Settings of a writer, ``writers.NAME.KEY``."""

    name: ClassVar[str]
    """The word in ``metrics.writers``."""
    package: ClassVar[str] = ""
    """Module that it needs, if any."""
    extra: ClassVar[str] = ""
    """Extra of fsdptoys that installs this module."""

    def __post_init__(self) -> None:
        check_bounds(f"writers.{self.name}", self)

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise a ConfigError if the writer cannot start here, before the run starts."""
        if self.package and importlib.util.find_spec(self.package) is None:
            install = f"'.[{self.extra}]'" if self.extra else self.package
            editable = "-e " * bool(self.extra)
            raise ConfigError(
                f"metrics.writers=[{self.name}] needs the package {self.package}, which is not "
                f"installed; run pip install {editable}{install} or leave {self.name} out"
            )

    @abstractmethod
    def build(self) -> Writer:
        """Construct the writer; its package is imported when it starts."""
