"""Rows made from runs and sweeps: their status, their names, damaged runs among others, and old
directories.

``old_sweep/`` is a sweep of two jobs that a version before ``result.json`` recorded.
"""

import csv
import io
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptoys.config.train_config import TrainConfig
from fsdptoys.metrics import Console, MetricsConfig, ResumePoint, RunRecorder
from fsdptoys.report.runs_table import Record, gather
from fsdptoys.report.table import make_table
from fsdptoys.report.table_export import to_csv
from fsdptoys.sweep import Job, JobStatus, Sweep
from fsdptoys.train.skipped_steps import SkippedSteps
from fsdptoys.train.stop import STOP_SIGNALS, Stop, agreed_stop, run_status
from fsdptoys.utils.file_lock import FolderLock
from tests.harness.recorded_runs import ENVIRONMENT, STEP, plain_tree, run_of, write_run
from tests.report.watched_runs import beat

TRAIN = TrainConfig(steps=20, max_seconds=9.0)


def stop_by(
    votes: Sequence[float] = (0,) * (len(STOP_SIGNALS) + 1), in_a_row: int = 0
) -> Stop:
    """The trainer's stop for these votes."""
    skipped = SkippedSteps(None)
    for _ in range(in_a_row):
        skipped.record(1.0, overflowed=True, skipped=True)
    stop = agreed_stop(TRAIN, votes, skipped)
    assert stop is not None
    return stop


BY_SIGNAL = stop_by([1.0, *[0.0] * len(STOP_SIGNALS)])
BY_TIME = stop_by([*[0.0] * len(STOP_SIGNALS), 1.0])
BY_SKIPS = stop_by(in_a_row=TRAIN.max_skipped_in_a_row)


def record_run(path: Path, last: int, stop: Stop | None, after: int = 0) -> None:
    """Have a recorder write a run of 20 steps up to some step, from a checkpoint on, and finish
    after a stop."""
    config = MetricsConfig(run_dir=str(path), console=Console.none)
    offsets = (
        {"metrics.jsonl": (path / "metrics.jsonl").stat().st_size} if after else {}
    )
    resumed = ResumePoint(after, offsets, "a checkpoint") if after else None
    with RunRecorder(
        config, "a run", plain_tree(), ENVIRONMENT, TRAIN.steps, {}, resumed
    ) as recorder:
        for number in range(after + 1, last + 1):
            recorder.step(replace(STEP, step=number))
        if stop is not None:
            recorder.finish(stop.reason, run_status(stop, last, TRAIN.steps))


def row_of(path: Path) -> Record:
    """The row of one run."""
    (record,) = gather([path]).records
    return record


@pytest.mark.parametrize(
    ("last", "stop", "status"),
    [
        (20, Stop("all steps done"), JobStatus.completed),
        (20, BY_SIGNAL, JobStatus.completed),
        (4, BY_TIME, JobStatus.completed),
        (4, BY_SIGNAL, JobStatus.stopped),
        (4, BY_SKIPS, JobStatus.failed),
        (20, BY_SKIPS, JobStatus.failed),
    ],
)
@pytest.mark.parametrize("file", ["result.json", "summary.md"])
def test_run_has_the_status_and_reason_of_its_end(
    tmp_path: Path, last: int, stop: Stop, status: JobStatus, file: str
) -> None:
    """Oracle: the trainer's stop; directories of earlier versions have the summary only."""
    record_run(tmp_path / "run", last, stop)
    if file == "summary.md":
        (tmp_path / "run" / "result.json").unlink()
    record = row_of(tmp_path / "run")
    reason = None if status is JobStatus.completed else f"{last} of 20; {stop.reason}"
    assert (record.status, record.reason) == (status, reason)


def test_run_killed_after_resuming_is_not_done(tmp_path: Path) -> None:
    """Oracle: the previous start ended well, at step 4; this one writes two more steps and no
    summary."""
    record_run(tmp_path / "run", 4, BY_TIME)
    record_run(tmp_path / "run", 6, None, after=4)
    record = row_of(tmp_path / "run")
    assert (record.status, record.reason) == (
        JobStatus.stopped,
        "it ended without a summary after 6 steps",
    )


@pytest.mark.parametrize("sign", ["lock", "heartbeat"])
def test_run_with_a_writer_is_running_despite_a_summary(
    tmp_path: Path, sign: str
) -> None:
    """Oracle: a held lock, or a heartbeat of a live process, next to a summary."""
    path = write_run(tmp_path / "run", run_of(3))
    lock = None
    if sign == "lock":
        lock = FolderLock(path)
    else:
        beat(path, 0, 4, "forward")
    assert row_of(path).status is JobStatus.running
    if lock is not None:
        lock.release()


def sweep_in(path: Path, *names: str) -> Sweep:
    """A sweep of finished jobs, each with a run."""
    jobs = [
        Job(name, (), {"optim.lr": name}, name, JobStatus.completed) for name in names
    ]
    sweep = Sweep(path, "debug", "fsdptoys sweep debug", jobs, [], None)
    sweep.write()
    for job in jobs:
        write_run(sweep.run_dir(job), run_of(3))
    return sweep


def names_of(*paths: Path) -> list[str]:
    """The names of the rows."""
    return [record.name for record in gather(paths).records]


def test_rows_are_named_below_the_last_common_folder(tmp_path: Path) -> None:
    """Oracle: written by hand."""
    for folder in ("A/runs/a", "B/runs/a", "A/runs/b"):
        write_run(tmp_path / folder, run_of(3))
    for folder in ("A/s1", "B/s1"):
        sweep_in(tmp_path / folder, "01", "02")
    a = tmp_path / "A"
    b = tmp_path / "B"
    assert names_of(a / "runs/a", a / "runs/b") == ["a", "b"]
    assert names_of(a / "runs/a", b / "runs/a") == ["A/runs/a", "B/runs/a"]
    assert names_of(a / "s1") == ["01", "02"]
    assert names_of(a / "s1", b / "s1") == ["A/s1/01", "A/s1/02", "B/s1/01", "B/s1/02"]


def test_damaged_job_keeps_its_recorded_status_and_reason(tmp_path: Path) -> None:
    """Oracle: the status of the job, and both sentences."""
    sweep = sweep_in(tmp_path / "s1", "01")
    failed = replace(
        sweep.jobs[0], status=JobStatus.out_of_memory, reason="rank 1 ran out of memory"
    )
    (sweep.run_dir(failed) / "environment.json").write_text("")
    (sweep.job_folder(failed) / "job.json").unlink()
    replace(sweep, jobs=[failed]).write()
    record = row_of(sweep.path)
    assert record.status is JobStatus.out_of_memory and record.reason is not None
    assert (
        record.reason.startswith("rank 1 ran out of memory; ")
        and "environment.json cannot be read" in record.reason
    )


def test_finished_job_without_settings_is_reported(tmp_path: Path) -> None:
    """Oracle: the message names the missing file; a job without any folder has the status of its
    own file."""
    sweep = sweep_in(tmp_path / "s1", "01", "02")
    (sweep.run_dir(sweep.jobs[0]) / "config.yaml").unlink()
    shutil.rmtree(sweep.run_dir(sweep.jobs[1]))
    lost, gone = gather([sweep.path]).records
    assert lost.status is JobStatus.failed and "config.yaml cannot be read" in (
        lost.reason or ""
    )
    assert (gone.status, gone.run) == (JobStatus.completed, None)


def test_damaged_sweep_in_a_folder_leaves_the_others_intact(tmp_path: Path) -> None:
    """Oracle: the rows of the intact sweep, after the sentence on the other."""
    for folder in ("s1", "s2"):
        sweep_in(tmp_path / folder, "01")
    (tmp_path / "s1" / "sweep.json").write_text("{")
    bad, good = gather([tmp_path]).records
    assert (bad.name, bad.status, good.name, good.status) == (
        "s1",
        JobStatus.failed,
        "s2/01",
        JobStatus.completed,
    )


FOLDER = Path(__file__).parent / "old_sweep"
RUNS = [FOLDER / "jobs" / number / "run" for number in ("01", "02")]


@pytest.mark.parametrize("paths", [[FOLDER], RUNS], ids=["sweep", "runs"])
def test_tables_of_old_directories_keep_their_values(paths: list[Path]) -> None:
    """Oracle: the table written by the old version at the end of the sweep."""
    rows = list(csv.DictReader(io.StringIO(to_csv(make_table(gather(paths))))))
    expected = list(csv.DictReader(io.StringIO((FOLDER / "expected.csv").read_text())))
    for row, old in zip(rows, expected, strict=True):
        keys = row.keys() & old.keys() - {"run", "path"}
        assert {key: row[key] for key in keys} == {key: old[key] for key in keys}
