"""The writers of a run, which receive the same numbers as ``metrics.jsonl``; among them TensorBoard
and Weights & Biases.

A writer that fails at its start or later (full disk, no network) is reported once and removed; the
run continues. The packages are optional dependencies, imported only on rank 0 and only if
configured.

Weights & Biases: the run directory keeps wandb's run id, so that a resumed run continues the same
run there. The x-axis of the charts is our own ``step``, since wandb drops values logged again for
its built-in step. A resumed run repeats the steps after the checkpoint, maybe with other results;
this way, both are kept in order. wandb's service process sends error reports to its vendor, even
offline; they are disabled here, so offline mode makes no request. Source code, git state and
console output are not uploaded.
"""

import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import read_regular

from .config import TENSORBOARD_FOLDER, WANDB_FOLDER, WandbMode
from .results import RunResults
from .step import StepMetrics
from .writer import RunStart, Writer, WriterConfig

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

LARGEST_ID_BYTES = 1024

ID_FILE = "run_id.txt"
"""Name of the file with the run id, in ``wandb/`` of the run directory."""

LONGEST_NAME = 128

INIT_TIMEOUT_SECONDS = 30.0
"""Timeout of the start, after which the run continues without wandb; the other ranks wait
meanwhile."""

FINISH_TIMEOUT_SECONDS = 120.0
"""Timeout of the final upload, after which the rest stays on the disk; the other ranks wait
meanwhile."""


class Writers:
    """The writers of a run; each is removed when it fails, with a ``message`` to the user on the
    ``last_step``."""

    def __init__(
        self, writers: Sequence[Writer], message: Callable[[str], None], last_step: int
    ) -> None:
        self._writers = list(writers)
        self._message = message
        self.last_step = last_step

    def call(self, method: Callable[[Writer], None]) -> None:
        """Call a method of all writers."""
        for writer in list(self._writers):
            try:
                method(writer)
            except Exception as error:
                # no exception of an optional package may end the training
                self._writers.remove(writer)
                with suppress(Exception):
                    writer.close()
                reason = " ".join(str(error).split()) or type(error).__name__
                self._message(
                    f"{writer.label} failed after step {self.last_step} ({reason}) and is "
                    "disabled; metrics.jsonl has every step"
                )


@dataclass
class TensorBoardConfig(WriterConfig):
    """TensorBoard: event files in the run directory."""

    name: ClassVar[str] = TENSORBOARD_FOLDER
    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    def build(self) -> Writer:
        """Construct the writer."""
        return TensorBoardWriter()


@dataclass
class WandbConfig(WriterConfig):
    """Weights & Biases; its options are ``metrics.wandb_…``."""

    name: ClassVar[str] = WANDB_FOLDER
    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def build(self) -> Writer:
        """Construct the writer with the defaults of ``metrics``; see ``build_writers``."""
        return WandbWriter(None, None, WandbMode.online)


class TensorBoardWriter(Writer):
    """Writes event files into ``tensorboard/``: scalars of each step, the settings as text, and the
    plot of the loss.

    ``purge_step`` makes TensorBoard discard the repeated steps of a resumed run from older event
    files.
    """

    label = "TensorBoard"

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, run: RunStart) -> None:
        """Open an event file, and write the settings and the environment as text."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        resumed_step = run.resumed_step
        self._writer = SummaryWriter(
            run.run_dir / TENSORBOARD_FOLDER,
            purge_step=resumed_step + 1 if resumed_step else None,
        )
        for tag, tree in (
            ("config", run.config_tree),
            ("environment", run.environment),
        ):
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
            # In Markdown, lines with four leading spaces are a code block.
            self._writer.add_text(
                tag,
                "".join(f"    {line}\n" for line in text.splitlines()),
                resumed_step,
            )

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under the same names."""
        assert self._writer is not None
        for name, value in metrics.numbers().items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def flush(self) -> None:
        """Flush all events to the system."""
        assert self._writer is not None
        self._writer.flush()

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the stop reason and the plot of the loss."""
        from matplotlib.image import imread

        assert self._writer is not None
        self._writer.add_text("ended", stop_reason, results.steps)
        self._writer.add_image(
            "loss_curve", imread(picture)[..., :3], results.steps, dataformats="HWC"
        )
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbWriter(Writer):
    """Writes steps and results to Weights & Biases; ``project`` and ``entity`` are None for wandb's
    defaults."""

    label = "Weights & Biases"

    def __init__(
        self, project: str | None, entity: str | None, mode: WandbMode
    ) -> None:
        self._project = project
        self._entity = entity
        self._mode = mode
        self._run: wandb.Run | None = None
        self._finished = False

    def start(self, run: RunStart) -> None:
        """Start a wandb run, or resume the one of the id in the run directory."""
        # Read when wandb is imported and when its service process starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # takes seconds

        run_id, resumes = _claim_id(run.run_dir / WANDB_FOLDER, run.resumed_step)
        settings: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "disable_job_creation": True,
            "init_timeout": INIT_TIMEOUT_SECONDS,
            "finish_timeout": FINISH_TIMEOUT_SECONDS,
        }
        names = wandb.Settings.model_fields
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode.value,
            id=run_id,
            # Offline, the id alone identifies the resumed run.
            resume="allow" if resumes and self._mode is WandbMode.online else None,
            name=str(run.run_dir)[-LONGEST_NAME:],
            dir=str(run.run_dir),
            config={
                "title": run.title,
                **run.config_tree,
                "environment": run.environment,
            },
            allow_val_change=True,
            settings=wandb.Settings(
                **{name: value for name, value in settings.items() if name in names}
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: StepMetrics) -> None:
        """Log the numbers of ``metrics.jsonl``, under the same names."""
        assert self._run is not None
        self._run.log(metrics.numbers())

    def flush(self) -> None:
        """Do nothing: wandb's service process has every step already, and outlives this process."""

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results into the run's summary; wandb draws its own charts instead of
        ``picture``."""
        assert self._run is not None
        values: dict[str, Any] = dataclasses.asdict(results)
        for name in ("routing", "starts"):
            del values[name]
        measurements = {
            name: value for name, value in values.items() if value is not None
        }
        self._run.summary.update({"results": measurements, "stop_reason": stop_reason})
        self._finished = True

    def close(self) -> None:
        """End the wandb run, as failed unless ``finish`` was called."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._finished else 1)


def _claim_id(folder: Path, resumed_step: int) -> tuple[str, bool]:
    """The run id, and whether it existed before."""
    path = folder / ID_FILE
    if (
        resumed_step
        and path.exists()
        and (run_id := read_regular(path, LARGEST_ID_BYTES).decode().strip())
    ):
        return run_id, True
    folder.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(4)
    write_atomically(path, f"{run_id}\n")
    return run_id, False
