"""Weights & Biases: the settings, every step and the results, uploaded or kept in the run directory.

The run's id lies in the run directory, so that a run that goes on from a checkpoint is the same run there. The charts'
axis is our own ``step``: Weights & Biases drops what is logged under a step of its own that it has seen, but those
after a checkpoint are done again and may come out otherwise, so both are kept, the later one later. The process that
wandb starts beside this one reports to wandb's makers unless it is told not to, offline too: it is told not to, and
makes no request offline.

Left out: the source code, the state of git and the console's text, which stay where they are.
"""

import dataclasses
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import read_regular

from .config import WANDB_FOLDER, WandbMode
from .results import (
    RunResults,
)
from .step import StepMetrics
from .writer import (
    Beginning,
)

if TYPE_CHECKING:
    import wandb

LARGEST_ID_BYTES = 1024

ID_FILE = "run_id.txt"
"""In the run directory's ``wandb``."""

LONGEST_NAME = 128

INIT_TIMEOUT_SECONDS = 30.0
"""A server that does not answer in this time is done without: the other ranks wait."""

FINISH_TIMEOUT_SECONDS = 120.0
"""What is not uploaded so long after the end stays on the disk: the other ranks wait for this one."""


class WandbWriter:
    """Writes a run of Weights & Biases.

    Args:
        project: there; None for wandb's own choice.
        entity: user or team there; None for wandb's own choice.
        mode: online or offline.
    """

    label = "Weights & Biases"

    def __init__(self, project: str | None, entity: str | None, mode: WandbMode) -> None:
        self._project, self._entity, self._mode = project, entity, mode
        self._run: wandb.Run | None = None
        self._finished = False

    def start(self, beginning: Beginning) -> None:
        """Begin the run, or go on with that of which the run directory has the id."""
        # Read when wandb is imported and when its process on the side starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # seconds

        run_id, goes_on = _claim_id(beginning.run_dir / WANDB_FOLDER, beginning.done)
        settings: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "disable_job_creation": True,
            "init_timeout": INIT_TIMEOUT_SECONDS,
            "finish_timeout": FINISH_TIMEOUT_SECONDS,
        }
        known = wandb.Settings.model_fields
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode.value,
            id=run_id,
            # A resume that is offline is said by the id alone.
            resume="allow" if goes_on and self._mode is WandbMode.online else None,
            name=str(beginning.run_dir)[-LONGEST_NAME:],
            dir=str(beginning.run_dir),
            config={"title": beginning.title, **beginning.config_tree, "environment": beginning.environment},
            allow_val_change=True,
            settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under its names."""
        assert self._run is not None
        self._run.log(metrics.numbers())

    def flush(self) -> None:
        """Nothing: the process on the side has every step already, and outlives this one."""

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results into the run's summary; the charts are Weights & Biases' own."""
        assert self._run is not None
        values: dict[str, Any] = dataclasses.asdict(results)
        for name in ("routing", "starts"):
            del values[name]
        known = {name: value for name, value in values.items() if value is not None}
        self._run.summary.update({"results": known, "stop_reason": stop_reason})
        self._finished = True

    def close(self) -> None:
        """End the run, as failed where it has not finished."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._finished else 1)


def _claim_id(folder: Path, done: int) -> tuple[str, bool]:
    """The id of the run, and whether it had one before."""
    path = folder / ID_FILE
    if done and path.exists() and (known := read_regular(path, LARGEST_ID_BYTES).decode().strip()):
        return known, True
    folder.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(4)
    write_atomically(path, f"{run_id}\n")
    return run_id, False
