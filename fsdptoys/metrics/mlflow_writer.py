"""Writes steps, settings and results to MLflow.

Without a tracking server (``writers.mlflow.tracking_uri`` or MLFLOW_TRACKING_URI) the run directory
gets a folder ``mlflow`` in MLflow's own format of files, and nothing is sent. ``mlflow-skinny``
suffices. MLflow's telemetry is disabled.

The folder keeps the id of the run, so that a resumed run continues the same one; repeated steps
then have several values. Metrics are sent in batches, at the latest before a checkpoint, since each
request would otherwise hold up a step.
"""

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.options import Effect, option
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import value_text

from .config import MLFLOW_FOLDER
from .results import RunResults
from .resume_log import flatten
from .step import StepMetrics
from .writer import RunStart, Writer, WriterConfig

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

ID_FILE = "run_id.txt"
LARGEST_ID_BYTES = 1024
LONGEST_PARAM = 500
PARAMS_AT_A_TIME = 100
"""Most parameters of a request."""
METRICS_AT_A_TIME = 900
"""Metrics that a request is sent with; MLflow takes at most 1000."""
SECONDS_BETWEEN_REQUESTS = 5.0
VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Set unless the user has set them: no telemetry, files without a server, and a server that does
not answer stops a step for about a minute at most."""


@dataclass
class MLflowConfig(WriterConfig):
    """MLflow: a tracking server, or files in the run directory."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    tracking_uri: str | None = option(None, effect=Effect.none)
    """Server or folder; null for MLFLOW_TRACKING_URI or, if unset, ``mlflow`` in the run
    directory."""
    experiment: str = option("fsdptoys", effect=Effect.none)
    """Experiment that the run belongs to, created if missing."""
    run_name: str | None = option(None, effect=Effect.none)
    """Name of the run; null for the run directory."""

    def build(self) -> Writer:
        """Construct the writer."""
        return MLflowWriter(self)


class MLflowWriter(Writer):
    """A run of MLflow."""

    label = "MLflow"

    def __init__(self, config: MLflowConfig) -> None:
        self._config = config
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._waiting: list[Metric] = []
        self._sent = time.monotonic()
        self._finished = False

    def start(self, run: RunStart) -> None:
        """Start a run, or resume the one of the id in the run directory."""
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient  # takes seconds

        folder = run.run_dir / MLFLOW_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        uri = (
            self._config.tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or folder.absolute().as_uri()
        )
        client = MlflowClient(tracking_uri=uri)
        path = folder / ID_FILE
        if run.resumed_step and path.exists():
            self._run_id = read_regular(path, LARGEST_ID_BYTES).decode().strip()
            client.update_run(self._run_id, status="RUNNING")
            client.set_tag(self._run_id, "resumed_step", str(run.resumed_step))
            self._client = client
            return
        name = self._config.experiment
        experiment = client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(name)
        )
        run_name = self._config.run_name or str(run.run_dir)
        created = client.create_run(experiment_id, run_name=run_name)
        self._run_id = created.info.run_id
        self._client = client
        write_atomically(path, f"{self._run_id}\n")
        params = [
            Param(key, value_text(value)[:LONGEST_PARAM])
            for key, value in flatten(run.config_tree)
        ]
        for first in range(0, len(params), PARAMS_AT_A_TIME):
            client.log_batch(
                self._run_id, params=params[first : first + PARAMS_AT_A_TIME]
            )
        tags = [
            RunTag(f"environment.{key}", value_text(value)[:LONGEST_PARAM])
            for key, value in flatten(run.environment)
        ]
        client.log_batch(
            self._run_id, tags=[RunTag("title", run.title), *tags[:PARAMS_AT_A_TIME]]
        )

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under the same names."""
        self._add(metrics.numbers(), metrics.step)
        is_due = time.monotonic() - self._sent > SECONDS_BETWEEN_REQUESTS
        if is_due or len(self._waiting) > METRICS_AT_A_TIME:
            self._send()

    def flush(self) -> None:
        """Send what is waiting."""
        self._send()

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the results as metrics, and the reason of the end as a tag."""
        assert self._client is not None
        values = {
            f"results.{name}": float(value)
            for name, value in dataclasses.asdict(results).items()
            if isinstance(value, (int, float))
        }
        self._add(values, results.steps)
        self._send()
        self._client.set_tag(self._run_id, "stop_reason", stop_reason)
        self._finished = True

    def close(self) -> None:
        """End the run, as failed unless ``finish`` was called."""
        if self._client is not None:
            client = self._client
            try:
                self._send()
            finally:
                self._client = None
                status = "FINISHED" if self._finished else "FAILED"
                client.set_terminated(self._run_id, status)

    def _add(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        self._waiting += [
            Metric(name, value, now, step)
            for name, value in values.items()
            if name != "step"
        ]

    def _send(self) -> None:
        assert self._client is not None
        while self._waiting:
            batch = self._waiting[:METRICS_AT_A_TIME]
            self._client.log_batch(self._run_id, metrics=batch)
            del self._waiting[: len(batch)]
        self._sent = time.monotonic()
