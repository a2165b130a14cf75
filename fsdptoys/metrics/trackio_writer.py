"""Writes steps and settings to Trackio, a tracker that keeps runs in a local database.

The database is in ``writers.trackio.folder``, in TRACKIO_DIR, or in ``trackio`` of the run
directory; ``TRACKIO_DIR=… trackio show`` shows it. Nothing is sent: TRACKIO_SPACE_ID and
TRACKIO_SERVER_URL are ignored. A resumed run continues the same one; repeated steps appear twice.
Trackio reports its own errors as warnings, and prints its greetings, which are left out here.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fsdptoys.utils.options import Effect, option

from .config import TRACKIO_FOLDER
from .step import StepMetrics
from .writer import RunStart, Writer, WriterConfig

if TYPE_CHECKING:
    import trackio

LONGEST_NAME = 128
REMOTE = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_BUCKET_ID",
    "TRACKIO_WEBHOOK_URL",
)
"""Variables that would send the run somewhere."""


@dataclass
class TrackioConfig(WriterConfig):
    """Trackio: a local database that its dashboard shows."""

    name: ClassVar[str] = "trackio"
    package: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    project: str = option("fsdptoys", effect=Effect.none)
    """Project that the run belongs to."""
    folder: str | None = option(None, effect=Effect.none)
    """Folder of the database; null for TRACKIO_DIR or, if unset, ``trackio`` in the run
    directory."""

    def build(self) -> Writer:
        """Construct the writer."""
        return TrackioWriter(self)


class TrackioWriter(Writer):
    """A run of Trackio."""

    label = "Trackio"

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: trackio.Run | None = None

    def start(self, run: RunStart) -> None:
        """Start a run, or resume the one of the run directory's name."""
        folder = self._config.folder or os.environ.get("TRACKIO_DIR")
        chosen = Path(folder).expanduser() if folder else run.run_dir / TRACKIO_FOLDER
        chosen = chosen.absolute()
        os.environ["TRACKIO_DIR"] = str(chosen)  # read when trackio is imported
        with _alone():
            import trackio
            from trackio.utils import TRACKIO_DIR

            if chosen != TRACKIO_DIR:
                raise RuntimeError(
                    f"this process has opened {TRACKIO_DIR}, and Trackio keeps one folder a "
                    "process; set writers.trackio.folder for all runs"
                )
            self._run = trackio.init(
                project=self._config.project,
                name=str(run.run_dir)[-LONGEST_NAME:],
                config={
                    "title": run.title,
                    **run.config_tree,
                    "environment": run.environment,
                },
                resume="allow" if run.resumed_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under the same names."""
        assert self._run is not None
        numbers = metrics.numbers()
        del numbers["step"]
        self._run.log(numbers, step=metrics.step)

    def close(self) -> None:
        """Write what is waiting, and end the run."""
        if self._run is not None:
            self._run = None
            with _alone():
                import trackio

                trackio.finish()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hide the variables that would send the run somewhere, and what is printed."""
    hidden = {name: os.environ.pop(name) for name in REMOTE if name in os.environ}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.environ.update(hidden)
