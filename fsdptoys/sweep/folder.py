"""A sweep's folder: its definition, and a folder for each job with its status.

    sweeps/20261122-101500-debug/
      sweep.json            definition: jobs in order, skipped combinations with reasons
      jobs/01/job.json      one job: its overrides and status
      jobs/01/log.txt       output of its launcher and ranks
      jobs/01/run/          its run directory
      table.md, table.csv, table.json

A job's file is replaced atomically at each change, so that a sweep killed at any moment can be
resumed.
"""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.bounds import above, at_least
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line, short_text

SWEEP_FILE = "sweep.json"
JOBS_FOLDER = "jobs"
JOB_FILE = "job.json"
LOG_FILE = "log.txt"
RUN_FOLDER = "run"

LARGEST_FILE_BYTES = 2**24
"""Limit of a JSON file; ten thousand skipped combinations take some megabytes."""

JOB_NAME = re.compile(r"[0-9]{2,9}")
"""Pattern of a job's folder name, which keeps it inside the sweep's folder."""

READS = 3
READ_AGAIN_SECONDS = 0.1
"""On shared disks, a file being replaced by another node may be stale or missing for a moment."""


class JobStatus(Enum):
    """Status of a job."""

    waiting = "waiting"
    running = "running"
    completed = "done"
    failed = "failed"
    out_of_memory = "out of memory"
    timed_out = "timed out"
    stopped = "stopped"
    """Ended by a signal."""

    @property
    def ended(self) -> bool:
        """Whether the job is over; a failed one runs again only with ``--retry``."""
        return self not in (JobStatus.waiting, JobStatus.running, JobStatus.stopped)


@dataclass(frozen=True)
class Job:
    """One configuration of a sweep."""

    name: str
    """Name of its folder: its number in the sweep, from 01."""
    overrides: tuple[str, ...]
    """Arguments of ``fsdptoys train``, without the run directory."""
    varied: dict[str, str]
    """Key → value, as typed, of the varied settings."""
    fingerprint: str
    """Hash of the resolved configuration, hardware and code; equal for identical runs."""
    status: JobStatus = JobStatus.waiting
    exit_status: int | None = None
    """Exit status of its launcher, once it has ended."""
    reason: str | None = None
    """One sentence on why the job is not done."""
    started_at: str | None = None
    """UTC, ISO 8601."""
    seconds: float | None = dataclasses.field(default=None, metadata=at_least(0))
    """Duration from the launcher's start to its end."""

    def restarted(self) -> "Job":
        """Return the job as before its first start."""
        return Job(self.name, self.overrides, self.varied, self.fingerprint)

    @property
    def label(self) -> str:
        """The varied settings, as typed."""
        return label_of(self.varied)


def label_of(varied: Mapping[str, str]) -> str:
    """Return varied settings as typed."""
    return " ".join(f"{key}={value}" for key, value in varied.items()) or "as it is"


@dataclass(frozen=True)
class Skipped:
    """A combination that was not run."""

    varied: dict[str, str]
    reason: str
    """One sentence."""


@dataclass(frozen=True)
class Sweep:
    """A sweep, as recorded in its folder."""

    path: Path
    title: str
    """Title of the sweep's YAML file, or the varied keys."""
    command: str
    """Command that started it."""
    jobs: list[Job]
    skipped: list[Skipped]
    time_limit_seconds: float | None
    """Time limit of one job."""
    argv: tuple[str, ...] = ()
    """Arguments as typed, without dashed options: a sweep's name, overrides and launcher
    settings."""

    def job_folder(self, job: Job) -> Path:
        """Return a job's folder."""
        return self.path / JOBS_FOLDER / job.name

    def run_dir(self, job: Job) -> Path:
        """Return a job's run directory, which exists once the job's ranks have met."""
        return self.job_folder(job) / RUN_FOLDER

    def write(self) -> None:
        """Write ``sweep.json`` and missing job files."""
        self.path.mkdir(parents=True, exist_ok=True)
        for job in self.jobs:
            if not (self.job_folder(job) / JOB_FILE).exists():
                write_job(self.job_folder(job), job)
        tree = dataclasses.asdict(self) | {"jobs": [job.name for job in self.jobs]}
        del tree["path"]
        _write(self.path / SWEEP_FILE, _renamed(tree, "argv", "words"))


@dataclass(frozen=True)
class _SweepFile:
    """Content of ``sweep.json``."""

    title: str
    command: str
    time_limit_seconds: float | None = dataclasses.field(metadata=above(0))
    jobs: list[str]
    skipped: list[Skipped]
    argv: tuple[str, ...] = ()


def _renamed(tree: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return a tree with one key under another name, in the same order."""
    return {name if other == key else other: tree[other] for other in tree}


def is_sweep_dir(path: Path) -> bool:
    """Return whether a folder is a sweep's."""
    return (path / SWEEP_FILE).is_file()


def read_sweep(path: Path) -> Sweep:
    """Read the current state of a sweep's folder.

    Raises:
        ConfigError: if it is not a sweep's folder, or a file of it cannot be read.
    """
    tree = _read(path / SWEEP_FILE)
    try:
        definition = build(
            _SweepFile, _renamed(tree, "words", "argv"), names={"argv": "words"}
        )
        for name in definition.jobs:
            _check_name(name)
        if len(set(definition.jobs)) < len(definition.jobs):
            raise ForeignError("it names a job twice")
    except ForeignError as mistake:
        raise ConfigError(
            f"{path / SWEEP_FILE} was not written by fsdptoys sweep ({mistake}); name another"
        ) from mistake
    folders = [path / JOBS_FOLDER / name for name in definition.jobs]
    for folder in (path / JOBS_FOLDER, *folders):
        if folder.is_symlink():
            raise ConfigError(
                f"{folder} is a link, through which a sweep would write elsewhere; put the "
                "folder here"
            )
    jobs = list(map(read_job, folders))
    for job, name in zip(jobs, definition.jobs, strict=True):
        if job.name != name:
            file = path / JOBS_FOLDER / name / JOB_FILE
            raise ConfigError(
                f"{file} is the file of job {job.name}; remove the folder {file.parent}"
            )
    return Sweep(path, **{**vars(definition), "jobs": jobs})


def read_job(folder: Path) -> Job:
    """Read a job's file.

    Raises:
        ConfigError: if its file cannot be read.
    """
    tree = _read(folder / JOB_FILE)
    try:
        job = build(
            Job, _renamed(tree, "words", "overrides"), names={"overrides": "words"}
        )
        _check_name(job.name)
        return job
    except ForeignError as mistake:
        raise ConfigError(
            f"{folder / JOB_FILE} was not written by fsdptoys sweep ({mistake}); remove the "
            f"folder {folder}"
        ) from mistake


def _check_name(name: str) -> None:
    if not JOB_NAME.fullmatch(name):
        raise ForeignError(f"{short_text(name)} is no number of a job")


def write_job(folder: Path, job: Job) -> None:
    """Write a job's file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {**dataclasses.asdict(job), "status": job.status.value}
    _write(folder / JOB_FILE, _renamed(tree, "overrides", "words"))


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")


def _read(path: Path) -> dict[str, Any]:
    for left in reversed(range(READS)):
        try:
            tree = parse_json(read_regular(path, LARGEST_FILE_BYTES))
            break
        except (OSError, ValueError) as mistake:
            if not left or isinstance(mistake, ValueError):
                raise ConfigError(
                    f"{path} cannot be read ({one_line(mistake)}); give a folder that fsdptoys "
                    "sweep has written"
                ) from mistake
        time.sleep(READ_AGAIN_SECONDS)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds no object; give a folder that fsdptoys sweep has written"
        )
    return tree
