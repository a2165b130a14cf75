"""Sweep folders written by someone else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.sweep import Job, JobStatus, Skipped, Sweep, read_sweep
from fsdptoys.sweep.axes import Combination
from fsdptoys.sweep.folder import read_job
from fsdptoys.sweep.job_list import arrange
from fsdptoys.sweep.slurm_queue import read_submissions


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Two jobs and a skipped combination."""
    jobs = [
        Job("01", ("a=1",), {"a": "1"}, "f1"),
        Job("02", ("a=2",), {"a": "2"}, "f2", JobStatus.done, 0, None, "t", 2.5),
    ]
    made = Sweep(tmp_path / "sweep", "title", "fsdptoys sweep", jobs, [Skipped({"a": "3"}, "why")], 60.0, ("a=1,2",))
    made.write()
    return made


def change(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_sweep_files_round_trip(sweep: Sweep) -> None:
    """Oracle: the sweep as written."""
    assert read_sweep(sweep.path) == sweep


@pytest.mark.parametrize(
    ("file", "key", "value", "reason"),
    [
        ("sweep.json", "jobs", ["../../elsewhere"], "'../../elsewhere' is no number of a job"),
        ("sweep.json", "jobs", ["/etc"], "'/etc' is no number of a job"),
        ("sweep.json", "jobs", ["01", "01"], "it names a job twice"),
        ("sweep.json", "jobs", 1, "jobs is 1"),
        ("sweep.json", "title", ["\x1b[2J"], "title is ['\\x1b[2J']"),
        ("sweep.json", "time_limit_seconds", -1, "time_limit_seconds is -1"),
        ("sweep.json", "time_limit_seconds", 10**400, "more than 300 digits"),
        ("sweep.json", "skipped", [{"varied": [], "reason": ""}], "skipped[0].varied is []"),
        ("sweep.json", "words", "ab", "words is 'ab'"),
        ("jobs/01/job.json", "name", "..", "'..' is no number of a job"),
        ("jobs/01/job.json", "name", "02", "is the file of job 02"),
        ("jobs/01/job.json", "status", "DONE", "status is 'DONE'"),
        ("jobs/01/job.json", "seconds", -3, "seconds is -3"),
        ("jobs/01/job.json", "varied", {"a": 1}, "varied.a is 1"),
        ("jobs/01/job.json", "more", 1, "the key 'more'"),
    ],
)
def test_hostile_file_is_reported_in_one_sentence(sweep: Sweep, file: str, key: str, value: Any, reason: str) -> None:
    """Oracle: the expected message, on one line."""
    change(sweep.path / file, key, value)
    with pytest.raises(ConfigError) as caught:
        read_sweep(sweep.path)
    assert reason in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[]", '{"launcher": 1, "jobs": []}', None])
def test_hostile_submission_is_reported_in_one_sentence(sweep: Sweep, text: str | None) -> None:
    """Oracle: the expected message, which names the file; None stands for a pipe without a writer."""
    path = sweep.path / "queue" / "1" / "jobs.json"
    path.parent.mkdir(parents=True)
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"jobs\.json cannot be read"):
        read_submissions(sweep)


def test_job_runs_with_the_validated_arguments(sweep: Sweep) -> None:
    """Oracle: the combination; the folder's own arguments would write elsewhere under the same fingerprint."""
    change(sweep.job_folder(sweep.jobs[0]) / "job.json", "words", ["a=1", "checkpoint.folder=/elsewhere"])
    asked = [(Combination(("a=1",), {"a": "1"}), "f1"), (Combination(("a=2",), {"a": "2"}), "f2")]
    arrangement = arrange(asked, [], read_sweep(sweep.path))
    assert [job.words for job in arrangement.to_run] == [("a=1",)]


def test_symbolic_link_in_place_of_a_temporary_file_is_replaced(sweep: Sweep) -> None:
    """Oracle: the content of the link's target and the sweep read back."""
    precious = sweep.path / "precious"
    precious.write_text("precious")
    (sweep.path / f".sweep.json.{os.getpid()}.part").symlink_to(precious)
    sweep.write()
    assert read_sweep(sweep.path) == sweep and not list(sweep.path.glob(".*.part"))
    assert precious.read_text() == "precious" and read_job(sweep.job_folder(sweep.jobs[0])).name == "01"
