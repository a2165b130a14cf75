"""Optional writers, TensorBoard and Weights & Biases, which receive the same numbers as ``metrics.jsonl``.

A writer that fails at its start or later (full disk, no network) is reported once and removed; the run continues.
The packages are optional dependencies, imported only on rank 0 and only if configured.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .config import TENSORBOARD_FOLDER, WANDB_FOLDER, MetricsConfig, WandbMode
from .preflight import wandb_mode
from .results import RunResults
from .step import StepMetrics
from .writer import RunStart, Writer


class Writers:
    """The writers of a run; each is removed when it fails.

    Args:
        writers: the configured writers.
        message: shows a message to the user.
    """

    def __init__(self, writers: Sequence[Writer], message: Callable[[str], None]) -> None:
        self._writers = list(writers)
        self._message = message
        self._step = 0

    def start(self, run: RunStart) -> None:
        """Open all writers."""
        self._step = run.done
        self._each(lambda writer: writer.start(run))

    def step(self, metrics: StepMetrics) -> None:
        """Write a step to all writers."""
        self._step = metrics.step
        self._each(lambda writer: writer.step(metrics))

    def flush(self) -> None:
        """Flush all writers."""
        self._each(lambda writer: writer.flush())

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results and the stop reason to all writers."""
        self._each(lambda writer: writer.finish(results, stop_reason, picture))

    def close(self) -> None:
        """Close all writers; may be called twice."""
        self._each(lambda writer: writer.close())
        self._writers = []

    def _each(self, call: Callable[[Writer], None]) -> None:
        for writer in list(self._writers):
            try:
                call(writer)
            except Exception as error:  # no exception of an optional package may end the training
                self._writers.remove(writer)
                with suppress(Exception):
                    writer.close()
                reason = " ".join(str(error).split()) or type(error).__name__
                self._message(
                    f"{writer.label} failed after step {self._step} ({reason}) and is disabled; "
                    "metrics.jsonl has every step"
                )


def build_writers(config: MetricsConfig) -> list[Writer]:
    """Construct the configured writers; their packages are imported when they start."""
    found: list[Writer] = []
    if TENSORBOARD_FOLDER in config.writers:
        from .tensorboard_writer import TensorBoardWriter

        found.append(TensorBoardWriter())
    mode = wandb_mode(config, os.environ) if WANDB_FOLDER in config.writers else WandbMode.disabled
    if mode is not WandbMode.disabled:
        from .wandb_writer import WandbWriter

        found.append(WandbWriter(config.wandb_project, config.wandb_entity, mode))
    return found
