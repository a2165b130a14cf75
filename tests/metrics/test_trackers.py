"""CSV, MLflow and Trackio receive the values of ``metrics.jsonl``, across a failure and a
resume."""

import contextlib
import csv
import io
import json
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.metrics import Console, MetricsConfig, ResumePoint
from fsdptoys.metrics.registry import WRITERS, check_writers
from tests.harness.recording import ROUTING, STEP, TREE, open_recorder

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY")
STARTS = [*range(1, 7), *range(5, 9)]
"""Steps that the writers receive, in order."""


@dataclass(frozen=True)
class Outcome:
    """Output of a run that fails after step 6 and resumes from a checkpoint of step 4."""

    folder: Path
    printed: str
    requests: int
    """Connections to the proxy that the environment names for all requests."""

    @property
    def lines(self) -> list[dict[str, float | None]]:
        """The lines of ``metrics.jsonl``."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def loss_of(step: int, *, is_repeated: bool) -> float:
    return 5.5 - 0.01 * step + is_repeated


def record(
    folder: Path, writer: str, resumed: ResumePoint | None = None, until: int = 8
) -> dict[str, int]:
    """Record steps up to a number; fail unless these are all. Return the offsets of step 4."""
    settings = {"console": Console.plain, "writers": [writer], "log_every": 1}
    offsets: dict[str, int] = {}
    with open_recorder(resumed, folder, steps=8, **settings) as recorder:
        for step in range(resumed.step + 1 if resumed else 1, until + 1):
            metrics = replace(
                STEP,
                step=step,
                loss=loss_of(step, is_repeated=resumed is not None),
                eval_loss=5.0 if step % 4 == 0 else None,
                grad_norm=math.inf if step == 6 else 1.0 / step,
                routing=ROUTING,
                added={"callbacks.late.number": 2.0} if step > 2 else {},
            )
            recorder.step(metrics)
            if step == 4:
                offsets = recorder.offsets()
        if until < 8:
            raise ZeroDivisionError
        recorder.finish("all steps done")
    return offsets


@pytest.fixture(scope="module", params=["csv", "mlflow", "trackio"])
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    if request.param != "csv" and find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}, which reads its variables when imported")
    folder = tmp_path_factory.mktemp("runs") / "run"
    proxy = socket.create_server(("127.0.0.1", 0))
    proxy.setblocking(False)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in PROXIES:
            patch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        patch.setenv("TRACKIO_SPACE_ID", "nobody/nothing")
        patch.delenv("TRACKIO_DIR", raising=False)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            with contextlib.suppress(ZeroDivisionError):
                record(folder, request.param, until=6)
            size = (folder / "metrics.jsonl").read_bytes().find(b'{"step": 5')
            resumed = ResumePoint(4, {"metrics.jsonl": size}, "step-00000004")
            record(folder, request.param, resumed)
    requests = 0
    with contextlib.suppress(BlockingIOError), proxy:
        while True:
            proxy.accept()[0].close()
            requests += 1
    yield Outcome(folder, printed.getvalue(), requests)


def read_csv(folder: Path) -> list[tuple[int, dict[str, float]]]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = {"True": "1", "False": "0"}
    return [
        (
            int(row["step"]),
            {key: float(numbers.get(text, text)) for key, text in row.items() if text},
        )
        for row in rows
    ]


def read_mlflow(folder: Path) -> list[tuple[int, dict[str, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    run_id = (folder / "mlflow" / "run_id.txt").read_text().strip()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["model.dim"] == str(TREE["model"]["dim"])
    assert run.data.tags["stop_reason"] == "all steps done"
    assert run.data.tags["resumed_step"] == "4"
    assert run.data.metrics["results.steps"] == 8
    losses = client.get_metric_history(run_id, "loss")
    rows = [(metric.step, {"loss": metric.value}) for metric in losses]
    for name in set(run.data.metrics) - {"loss"}:
        if not name.startswith("results."):
            for metric in client.get_metric_history(run_id, name):
                next(
                    values
                    for step, values in rows
                    if step == metric.step and name not in values
                )[name] = metric.value
    return rows


def read_trackio(folder: Path) -> list[tuple[int, dict[str, float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("fsdptoys", str(folder)[-128:])
    return [
        (row["step"], {key: row[key] for key in row.keys() - {"step", "timestamp"}})
        for row in logs
    ]


READERS = {"csv": read_csv, "mlflow": read_mlflow, "trackio": read_trackio}


def test_tracker_has_the_numbers_of_every_step(
    outcome: Outcome, request: pytest.FixtureRequest
) -> None:
    """Oracle: ``metrics.jsonl``, read by the tracker's own client; a tracker keeps repeated steps
    in the order of the starts, a file has each once."""
    writer = request.node.callspec.params["outcome"]
    rows = READERS[writer](outcome.folder)
    assert [step for step, _ in rows] == ([*range(1, 9)] if writer == "csv" else STARTS)
    last = dict(rows)
    for line in outcome.lines:
        step = int(line["step"] or 0)
        expected = {
            key: float(value)
            for key, value in line.items()
            if value is not None and key not in ("step", "non_finite")
        }
        if step == 6:
            expected["grad_norm"] = math.inf
        values = {key: value for key, value in last[step].items() if key != "step"}
        assert values.keys() == expected.keys()
        assert [values[key] for key in expected] == pytest.approx(
            list(expected.values()), rel=1e-9
        )


def test_tracker_makes_no_request_and_prints_nothing(outcome: Outcome) -> None:
    """Oracle: a proxy set for every request, and the console's lines, which are all our own."""
    assert outcome.requests == 0
    assert not [
        line
        for line in outcome.printed.splitlines()
        if "mlflow" in line.lower() or "trackio" in line.lower()
    ]


def test_csv_without_a_whole_last_line_is_continued(tmp_path: Path) -> None:
    """Oracle: the rows of complete lines, as after a kill."""
    with contextlib.suppress(ZeroDivisionError):
        record(tmp_path, "csv", until=4)
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().rstrip("\r\n")[:-3])
    record(tmp_path, "csv", ResumePoint(3, {}, "step-00000003"))
    assert [step for step, _ in read_csv(tmp_path)] == [*range(1, 9)]


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_missing_tracker_is_reported_before_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, where no module is found."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check_writers(MetricsConfig(writers=[name]), {}, {name: WRITERS[name]()})
    assert str(error.value) == (
        f"metrics.writers=[{name}] needs the package {name}, which is not installed; run pip "
        f"install -e '.[{name}]' or leave {name} out"
    )
