"""Weights & Biases: the settings, every step and the results, uploaded or written to the run directory.

The run directory keeps wandb's run id, so that a resumed run continues the same run there. The x-axis of the charts is
our own ``step``, since wandb drops values logged again for its built-in step. A resumed run repeats the steps after the
checkpoint, maybe with other results; this way, both are kept in order. wandb's service process sends error reports to
its vendor, even offline; they are disabled here, so offline mode makes no request.

Source code, git state and console output are not uploaded.
"""

import dataclasses
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import read_regular

from .config import WANDB_FOLDER, WandbMode
from .results import RunResults
from .step import StepMetrics
from .writers import RunStart

if TYPE_CHECKING:
    import wandb

LARGEST_ID_BYTES = 1024

ID_FILE = "run_id.txt"
"""Name of the file with the run id, in ``wandb/`` of the run directory."""

LONGEST_NAME = 128

INIT_TIMEOUT_SECONDS = 30.0
"""Timeout of the start, after which the run continues without wandb; the other ranks wait meanwhile."""

FINISH_TIMEOUT_SECONDS = 120.0
"""Timeout of the final upload, after which the rest stays on the disk; the other ranks wait meanwhile."""


class WandbWriter:
    """Writes steps and results to Weights & Biases.

    Args:
        project: project of the run; None for wandb's default.
        entity: user or team; None for wandb's default.
        mode: online or offline.
    """

    label = "Weights & Biases"

    def __init__(self, project: str | None, entity: str | None, mode: WandbMode) -> None:
        self._project, self._entity, self._mode = project, entity, mode
        self._run: wandb.Run | None = None
        self._finished = False

    def start(self, run: RunStart) -> None:
        """Start a wandb run, or resume the one whose id is in the run directory."""
        # Read when wandb is imported and when its service process starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # takes seconds

        run_id, resumes = _claim_id(run.run_dir / WANDB_FOLDER, run.done)
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
            # Offline, the id alone identifies the resumed run.
            resume="allow" if resumes and self._mode is WandbMode.online else None,
            name=str(run.run_dir)[-LONGEST_NAME:],
            dir=str(run.run_dir),
            config={"title": run.title, **run.config_tree, "environment": run.environment},
            allow_val_change=True,
            settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: StepMetrics) -> None:
        """Log the numbers of ``metrics.jsonl``, under the same names."""
        assert self._run is not None
        self._run.log(metrics.numbers())

    def flush(self) -> None:
        """Do nothing: wandb's service process has every step already, and outlives this process."""

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results into the run's summary; wandb draws its own charts instead of ``picture``."""
        assert self._run is not None
        values: dict[str, Any] = dataclasses.asdict(results)
        for name in ("routing", "starts"):
            del values[name]
        known = {name: value for name, value in values.items() if value is not None}
        self._run.summary.update({"results": known, "stop_reason": stop_reason})
        self._finished = True

    def close(self) -> None:
        """End the wandb run, as failed unless ``finish`` was called."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._finished else 1)


def _claim_id(folder: Path, done: int) -> tuple[str, bool]:
    """The run id, and whether it existed before."""
    path = folder / ID_FILE
    if done and path.exists() and (known := read_regular(path, LARGEST_ID_BYTES).decode().strip()):
        return known, True
    folder.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(4)
    write_atomically(path, f"{run_id}\n")
    return run_id, False
