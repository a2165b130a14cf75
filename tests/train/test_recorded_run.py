"""Run directories: read back, and from elsewhere, with links, pipes and damaged files."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.device.profile import load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import Console, MetricsConfig, RunRecorder, StepMetrics, environment
from fsdptoys.metrics.config import METRICS_FILE, PREDICTION_FILE, SUMMARY_FILE
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.train.recorded_run import is_run_dir, read_recorded_run
from fsdptoys.utils.file_lock import LOCK_FILE, FolderLock, is_locked

STEP = StepMetrics(1, 5.5, 1.0, 1e-3, 0.1, 512, 5120.0, 0.1, None, None, None, None, 0.5)


@pytest.fixture(scope="module")
def config() -> Config:
    found = compose_config(["experiment=null", "parallel=ddp"])
    found.validate(2, "cpu")
    return found


@pytest.fixture(scope="module")
def prediction(config: Config) -> Prediction:
    return closed_form(config, load_hardware("h100"), 2)


def record(path: Path, config: Config, prediction: Prediction | None, steps: int, finish: bool = True) -> None:
    """Write a run directory as a run does."""
    metrics = MetricsConfig(run_dir=str(path), console=Console.none)
    found = environment(Device("cpu"), 2, ["fsdptoys"])
    with RunRecorder(metrics, "a run", config.to_dict(), found, steps, {}, prediction=prediction) as recorder:
        for number in range(1, steps + 1):
            recorder.step(dataclasses.replace(STEP, step=number, step_time_seconds=0.1 * number))
        if finish:
            recorder.finish("every step was done")


def test_recorded_run_round_trips(tmp_path: Path, config: Config, prediction: Prediction) -> None:
    """Oracle: the recorder's values; the median of 0.3, 0.4 and 0.5 s, after two steps of warm-up."""
    record(tmp_path / "run", config, prediction, steps=5)
    run = read_recorded_run(tmp_path / "run")
    assert run.tree == config.to_dict() and run.prediction == prediction
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5]
    assert run.results.step_time_seconds is not None
    assert run.results.step_time_seconds.median == pytest.approx(0.4)
    assert (run.world_size, run.device_type, run.finished, run.running, run.notes) == (2, "cpu", True, False, ())
    assert run.config().parallel == config.parallel
    assert {each.quantity for each in run.prediction_errors()} == {"step time", "tokens/s, all ranks"}


def test_killed_run_is_read_up_to_its_last_complete_line(tmp_path: Path, config: Config) -> None:
    """Oracle: three complete lines and a torn one; an unreadable prediction."""
    record(tmp_path / "run", config, None, steps=3, finish=False)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    (tmp_path / "run" / PREDICTION_FILE).write_text('{"method": "older"}')
    run = read_recorded_run(tmp_path / "run")
    assert (run.results.steps, run.finished, run.prediction) == (3, False, None)
    assert len(run.notes) == 2 and "line 4" in run.notes[0] and "another version" in run.notes[1]
    assert is_run_dir(tmp_path / "run") and not (tmp_path / "run" / SUMMARY_FILE).exists()


def test_folder_is_locked_while_its_run_holds_the_lock(tmp_path: Path) -> None:
    """Oracle: the state of the lock before, during and after its use."""
    before = is_locked(tmp_path)
    lock = FolderLock(tmp_path)
    held = is_locked(tmp_path)
    lock.release()
    assert (before, held, is_locked(tmp_path)) == (False, True, False)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("environment.json", "{}", "does not describe the machine of the run"),
        ("environment.json", "[]", "holds no settings"),
        ("config.yaml", "a: [", "cannot be read"),
    ],
)
def test_invalid_run_files_are_named(tmp_path: Path, config: Config, name: str, text: str, message: str) -> None:
    """Oracle: the message names the file and the fault."""
    record(tmp_path / "run", config, None, steps=1, finish=False)
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as mistake:
        read_recorded_run(tmp_path / "run")
    assert name in str(mistake.value)


SMALL = [
    *("experiment=null", "parallel=single", "model=llama_debug", "train.batch_size=1", "train.seq_len=16"),
    *("launch.device=cpu", "launch.nproc_per_node=1", "metrics.console=plain", "metrics.log_every=1"),
    *("checkpoint.every=1", "checkpoint.resume=auto"),
]


@pytest.mark.parametrize("name", [LOCK_FILE, METRICS_FILE])
@pytest.mark.parametrize("kind", ["symbolic link", "named pipe"])
def test_link_or_pipe_in_the_run_directory_stops_the_launch(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: status 2 and one sentence, and the file that the link leads to."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    if kind == "named pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(precious)
    assert main(["train", *SMALL, f"metrics.run_dir={run}"]) == 2
    assert capsys.readouterr().err == (
        f"fsdptoys: {run}/{name} is a {kind} and not a regular file; remove it, or set metrics.run_dir to another "
        "folder\n"
    )
    assert precious.read_text() == "precious"


@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured", "warm")
def test_run_resumes_in_a_folder_with_damaged_files(tmp_path: Path) -> None:
    """Oracle: status 0, the steps, and the content of files that links under temporary and rank names lead to."""
    run = tmp_path / "run"
    precious = tmp_path / "precious"
    precious.write_text("precious")

    def train(steps: int) -> None:
        command = [sys.executable, "-m", "fsdptoys", "train", *SMALL, f"metrics.run_dir={run}", f"train.steps={steps}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr

    train(1)
    (run / "config.yaml").write_text("a: &a [x]\nb: [*a, *a]\n" + "[" * 100_000)
    (run / "environment.json").write_text("[" * 100_000)
    (run / "resumes.jsonl").write_text("[" * 100_000 + '\n{"step": 1}\n')
    (run / "heartbeats").mkdir(exist_ok=True)
    for name in (".config.yaml.part", ".summary.md.part", ".loss.png.part", "heartbeats/rank-00000.json"):
        (run / name).symlink_to(precious)
    train(2)
    assert [json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines()] == [1, 2]
    assert precious.read_text() == "precious"
    assert (run / "summary.md").is_file() and (run / "checkpoints/step-00000002").is_dir()
