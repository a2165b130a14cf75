"""Rows of tables and figures: single runs and jobs of sweeps, each with its status."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import SUMMARY_FILE
from fsdptoys.sweep import JobStatus, Skipped, Sweep, is_sweep_dir, read_sweep
from fsdptoys.train.recorded_run import (
    RecordedRun,
    is_run_dir,
    is_written,
    read_recorded_run,
)

from .result_file import read_ending


@dataclass(frozen=True)
class Record:
    """One configuration with its status and its recorded run."""

    name: str
    """Unique in the collection: a job's number, or a run's folder, with parent folders if
    needed."""
    path: Path  # The run directory; may be missing if a job failed early
    status: JobStatus
    run: RecordedRun | None  # None if nothing was written, or it cannot be read
    reason: str | None = None  # Why it is not done
    varied: dict[str, str] | None = None
    """Key → value, as typed, of the settings that a sweep varies; None for a single run."""


@dataclass(frozen=True)
class Collection:
    """Runs and sweeps of one report."""

    title: str
    records: list[Record]
    skipped: list[Skipped]  # Combinations that the sweeps skipped
    commands: list[str]  # Commands that started the sweeps


def gather(paths: Sequence[Path]) -> Collection:
    """Read run directories, sweep folders, and folders that contain some of these.

    Raises:
        ConfigError: for a path without runs and sweeps, or a named run or sweep that cannot be
            read.
    """
    records: list[Record] = []
    skipped: list[Skipped] = []
    commands = []
    titles = []
    folders = _find_folders(paths)
    for (path, is_named), name in zip(
        folders.items(), _own_names(list(folders)), strict=True
    ):
        title = os.path.basename(os.path.abspath(path))
        try:
            if is_sweep_dir(path):
                sweep = read_sweep(path)
                records += _of_sweep(sweep, f"{name}/" if len(folders) > 1 else "")
                skipped += sweep.skipped
                commands.append(sweep.command)
                title = sweep.title
            else:
                records.append(_of_run(path, name))
        except ConfigError as mistake:
            if is_named:
                raise
            records.append(Record(name, path, JobStatus.failed, None, str(mistake)))
        titles.append(title)
    title = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"
    return Collection(title, records, skipped, commands)


def _find_folders(paths: Sequence[Path]) -> dict[Path, bool]:
    """Run directories and sweep folders, without duplicates → whether the path itself was given,
    not its parent."""
    folders: dict[Path, tuple[Path, bool]] = {}
    for path in paths:
        is_named = is_sweep_dir(path) or is_run_dir(path)
        inside = [path] if is_named else sorted(path.iterdir()) if path.is_dir() else []
        inside = [
            folder
            for folder in inside
            if is_named or is_sweep_dir(folder) or is_run_dir(folder)
        ]
        if not inside:
            raise ConfigError(
                f"{path} holds neither a run nor a sweep; give a folder that fsdptoys train or "
                "fsdptoys sweep has written, as runs/NAME"
            )
        for folder in inside:
            first, was_named = folders.get(folder.resolve(), (folder, False))
            folders[folder.resolve()] = first, is_named or was_named
    return dict(folders.values())


def _of_sweep(sweep: Sweep, prefix: str) -> list[Record]:
    records = []
    for job in sweep.jobs:
        path = sweep.run_dir(job)
        status = job.status
        reason = job.reason
        run = None
        try:
            is_there = is_run_dir(path) or (
                status is JobStatus.completed and path.is_dir()
            )
            run = read_recorded_run(path) if is_there else None
        except ConfigError as mistake:
            # Without a readable run the job failed, whatever status its launcher recorded.
            status = JobStatus.failed if status is JobStatus.completed else status
            reason = f"{reason}; {mistake}" if reason else str(mistake)
        records.append(Record(prefix + job.name, path, status, run, reason, job.varied))
    return records


def _of_run(path: Path, name: str) -> Record:
    # Checked first: a run that ends while being read was not killed
    is_going_on = is_written(path)
    run = read_recorded_run(path)
    if is_going_on:
        return Record(name, path, JobStatus.running, run, "it has not ended yet")
    if (path / SUMMARY_FILE).exists():
        ending = read_ending(path)
        return Record(
            name,
            path,
            ending.status,
            run,
            None if ending.status is JobStatus.completed else ending.text,
        )
    return Record(
        name,
        path,
        JobStatus.stopped,
        run,
        f"it ended without a summary after {run.results.steps} steps",
    )


def _own_names(paths: Sequence[Path]) -> list[str]:
    """Name of each folder, below the last folder that contains all."""
    folders = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(map(os.path.dirname, folders))
    return [os.path.relpath(folder, common) for folder in folders]
