"""The rows of every table and picture: runs, whether they stand alone or in a sweep, with how each of them ended."""

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import SUMMARY_FILE
from fsdptoys.sweep import JobStatus, Skipped, Sweep, is_sweep_dir, read_sweep
from fsdptoys.train.recorded_run import RecordedRun, is_run_dir, is_written, read_recorded_run

from .result_file import read_ending


@dataclass(frozen=True)
class Record:
    """One configuration, and what became of it."""

    name: str
    """No other record's of the collection: a job's number, or a run's folder, after folders above where it must be."""
    path: Path
    """The run directory, which may not be there where a job failed early."""
    status: JobStatus
    run: RecordedRun | None
    """None where nothing was written, or it cannot be read."""
    reason: str | None = None
    """A sentence, where it is not done."""
    varied: dict[str, str] | None = None
    """Key → value, as typed, of what a sweep varies; None for a run that stands alone."""


@dataclass(frozen=True)
class Collection:
    """What is reported together."""

    title: str
    records: list[Record]
    skipped: list[Skipped]
    """Combinations of sweeps that were not run."""
    commands: list[str]
    """That started the sweeps."""


def gather(paths: Sequence[Path]) -> Collection:
    """Read runs and sweeps.

    Args:
        paths: run directories, sweep folders, and folders that hold some of these.

    Raises:
        ConfigError: for a path that holds none of them.
    """
    records: list[Record] = []
    skipped: list[Skipped] = []
    commands, titles = [], []
    found = _found(paths)
    for (path, is_named), name in zip(found.items(), _own_names(list(found)), strict=True):
        title = _parts(path)[-1]
        try:
            if is_sweep_dir(path):
                sweep = read_sweep(path)
                records += _of_sweep(sweep, f"{name}/" if len(found) > 1 else "")
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
    return Collection(title, _numbered(records), skipped, commands)


def _found(paths: Sequence[Path]) -> dict[Path, bool]:
    """Run directories and sweep folders, each once → whether it was named itself, and not the folder above."""
    found: dict[Path, tuple[Path, bool]] = {}
    for path in paths:
        is_named = is_sweep_dir(path) or is_run_dir(path)
        if is_named:
            inside = [path]
        elif path.is_dir():
            inside = [each for each in sorted(path.iterdir()) if is_sweep_dir(each) or is_run_dir(each)]
        else:
            inside = []
        if not inside:
            raise ConfigError(
                f"{path} holds neither a run nor a sweep; give a folder that fsdptoys train or fsdptoys sweep has "
                "written, as runs/NAME"
            )
        for each in inside:
            first, was_named = found.get(each.resolve(), (each, False))
            found[each.resolve()] = first, is_named or was_named
    return dict(found.values())


def _of_sweep(sweep: Sweep, prefix: str) -> list[Record]:
    records = []
    for job in sweep.jobs:
        path, status, reason = sweep.run_dir(job), job.status, job.reason
        run = None
        try:
            is_there = is_run_dir(path) or (status is JobStatus.done and path.is_dir())
            run = read_recorded_run(path) if is_there else None
        except ConfigError as mistake:
            # Nothing came of it that could be told, whatever its launcher said.
            status = JobStatus.failed if status is JobStatus.done else status
            reason = f"{reason}; {mistake}" if reason else str(mistake)
        records.append(Record(prefix + job.name, path, status, run, reason, job.varied))
    return records


def _of_run(path: Path, name: str) -> Record:
    is_going_on = is_written(path)  # asked first: a run that ends while it is read is not one that was killed
    run = read_recorded_run(path)
    if is_going_on:
        return Record(name, path, JobStatus.running, run, "it has not ended yet")
    if (path / SUMMARY_FILE).exists():
        ending = read_ending(path)
        return Record(name, path, ending.status, run, None if ending.status is JobStatus.done else ending.text)
    return Record(name, path, JobStatus.stopped, run, f"it ended without a summary after {run.results.steps} steps")


def _own_names(paths: Sequence[Path]) -> list[str]:
    """The name of each folder, after those of so many folders above as tell it from the others."""
    parts = [_parts(path) for path in paths]
    counts = [1] * len(paths)
    while True:
        names = ["/".join(each[-count:]) for each, count in zip(parts, counts, strict=True)]
        times = Counter(names)
        longer = [
            count + (times[name] > 1 and count < len(each))
            for each, count, name in zip(parts, counts, names, strict=True)
        ]
        if longer == counts:
            return names
        counts = longer


def _parts(path: Path) -> list[str]:
    """Names of the folders from the root on; of the root, its own."""
    return os.path.abspath(path).strip("/").split("/")


def _numbered(records: list[Record]) -> list[Record]:
    """The same, with a number after the name where an earlier one has it, as where a run is named like a job."""
    taken: set[str] = set()
    numbered = []
    for record in records:
        name, number = record.name, 2
        while name in taken:
            name, number = f"{record.name} ({number})", number + 1
        taken.add(name)
        numbered.append(dataclasses.replace(record, name=name))
    return numbered
