"""``fsdptoys sweep``: run one configuration after another, each in new processes, and tabulate the
results.

fsdptoys sweep parallel=fsdp1,fsdp2 memory.gradient_checkpointing=none,full
fsdptoys sweep debug train.steps=5
fsdptoys sweep --resume
"""

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from fsdptoys.config.choices import list_choices
from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import FolderLock, is_locked
from fsdptoys.utils.text import counted, duration_text

from .axes import Combination, combine, read_axes, read_base
from .definition import is_file_name, list_sweeps, read_definition
from .folder import (
    SWEEP_FILE,
    Job,
    JobStatus,
    Skipped,
    Sweep,
    is_sweep_dir,
    label_of,
    read_sweep,
)
from .job_list import Arrangement, arrange, still_running, write_arrangement
from .runner import TRAIN, print_line, run_jobs
from .slurm_queue import jobs_in_queue
from .slurm_settings import refuse_commands, split_launcher_overrides
from .validate import (
    NO_TIME_LIMIT,
    BatchQueue,
    InvalidJob,
    LocalMachine,
    ValidJob,
    validate_combinations,
)

SWEEPS_FOLDER = Path("sweeps")
"""Default parent of sweep folders, below the current directory."""

MakeTables = Callable[[Path, Console | None], None]
"""Writes the tables of a sweep's folder, and prints them to a console if given."""


@dataclass(frozen=True)
class SweepArguments:
    """What to run, on which machine and in which folder."""

    argv: tuple[str, ...]
    """Arguments without dashed options; a sweep's file as an absolute path, valid from any
    folder."""
    name: str | None
    """Name or file of a sweep."""
    settings: list[str]
    launcher_overrides: list[str]
    command: str = "fsdptoys sweep"
    """The command line, recorded in a new folder."""
    resume: bool = False
    resume_dir: Path | None = None
    """The folder to resume, if given."""
    out: Path | None = None
    time_limit_seconds: float | None = None
    dry_run: bool = False
    retry: bool = False


def split_arguments(argv: Sequence[str]) -> SweepArguments:
    """Split the arguments without dashed options into name, settings and launcher overrides.

    Raises:
        ConfigError: for a misplaced name.
    """
    settings, launcher_overrides = split_launcher_overrides(argv)
    name = None
    if settings and "=" not in settings[0] and not settings[0].startswith("-"):
        name = settings.pop(0)
    if name is not None and settings and settings[0].startswith("="):
        value = settings[0][1:] or "".join(settings[1:2]) or "VALUE"
        raise ConfigError(f"{name} has no value; write {name}={value} without spaces")
    for word in settings:
        if "=" not in word and (is_file_name(word) or word in list_sweeps()):
            raise ConfigError(f"{word} names a sweep; put it first, and only one")
    absolute = [
        os.path.abspath(word) if word == name and is_file_name(word) else word
        for word in argv
    ]
    return SweepArguments(tuple(absolute), name, settings, launcher_overrides)


def with_recorded_arguments(arguments: SweepArguments, sweep: Sweep) -> SweepArguments:
    """Complete the arguments by those of the resumed folder; a typed launcher replaces the
    recorded one.

    Raises:
        ConfigError: if the folder has no arguments, or its launcher overrides may run commands.
    """
    if not sweep.argv:
        raise ConfigError(
            f"{sweep.path / SWEEP_FILE} does not say its words; give them after --resume "
            f"{sweep.path}"
        )
    old = split_arguments(sweep.argv)
    if not arguments.launcher_overrides:
        refuse_commands(old.launcher_overrides, sweep.path)
    launcher_overrides = arguments.launcher_overrides or old.launcher_overrides
    argv = (
        *(word for word in old.argv if word not in old.launcher_overrides),
        *launcher_overrides,
    )
    return dataclasses.replace(
        arguments,
        argv=argv,
        name=old.name,
        settings=old.settings,
        launcher_overrides=launcher_overrides,
    )


def run_sweep(
    arguments: SweepArguments, make_tables: MakeTables, train: Sequence[str] = TRAIN
) -> int:
    """Run a sweep.

    Args:
        arguments: from the command line.
        make_tables: called after each job.
        train: the command of a job on this machine, before its overrides.

    Returns:
        Exit status: 0 if all jobs are done, 1 if one is not, 128 + number after a signal.

    Raises:
        ConfigError: for the first mistake, before anything starts; later if the folder can no
            longer be written.
    """
    before = _before(arguments)
    if before is not None and arguments.name is None and not arguments.settings:
        arguments = with_recorded_arguments(arguments, before)
    title, combinations, limit = _combinations(arguments)
    time_limit_seconds = arguments.time_limit_seconds or (
        limit if before is None else before.time_limit_seconds
    )
    where = (
        BatchQueue(arguments.launcher_overrides, time_limit_seconds)
        if arguments.launcher_overrides
        else LocalMachine()
    )
    validated = validate_combinations(combinations, where)
    valid = [
        (entry.combination, entry.fingerprint)
        for entry in validated
        if isinstance(entry, ValidJob)
    ]
    refused = [
        Skipped(entry.combination.varied, entry.reason)
        for entry in validated
        if isinstance(entry, InvalidJob)
    ]
    command = arguments.command if before is None else before.command

    def arranged(
        path: Path, before: Sweep | None, queued: Collection[str] = ()
    ) -> tuple[Sweep, Arrangement]:
        arrangement = arrange(
            valid, refused, before, retry=arguments.retry, queued=queued
        )
        return Sweep(
            path,
            title,
            command,
            arrangement.jobs,
            arrangement.skipped,
            time_limit_seconds,
            arguments.argv,
        ), arrangement

    if arguments.dry_run:
        if before is None and arguments.out is not None:
            _refuse_used(arguments.out)
        path = before.path if before is not None else arguments.out or SWEEPS_FOLDER
        _print_plan(*arranged(path, before))
        return 0
    path = before.path if before is not None else _new_folder(arguments.out, title)
    lock = _lock(path)
    try:
        queued: Collection[str] = ()
        if before is not None:
            # Another process may have changed it before we took the lock
            before = read_sweep(path)
            queued = jobs_in_queue(before)
            for job in before.jobs:
                watched = arguments.launcher_overrides and job.name in queued
                if (
                    job.status is JobStatus.running
                    and not watched
                    and is_locked(before.run_dir(job))
                ):
                    raise still_running(before, job)
        sweep, arrangement = arranged(path, before, queued)
        for job in arrangement.to_run if not arguments.launcher_overrides else ():
            if job.name in queued:
                raise ConfigError(
                    f"job {job.name} of {path} is still a batch queue's; wait for its end, "
                    "cancel it there, or continue with the same hydra/launcher="
                )
        write_arrangement(sweep, arrangement, queued)
        _print_plan(sweep, arrangement, briefly=True)
        return _run(
            sweep, arrangement.to_run, arguments.launcher_overrides, make_tables, train
        )
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); make room, and continue with "
            f"fsdptoys sweep --resume {shlex.quote(str(path))}"
        ) from error
    finally:
        lock.release()


def _before(arguments: SweepArguments) -> Sweep | None:
    """Return the sweep to resume, of several with the same arguments the newest; None for a new
    sweep."""
    if not arguments.resume:
        return None
    if arguments.resume_dir is not None:
        if not is_sweep_dir(arguments.resume_dir):
            raise ConfigError(
                f"--resume {arguments.resume_dir} is not a sweep's folder, which has a "
                f"{SWEEP_FILE}; name one, or leave the folder out to continue the newest sweep "
                "with the same arguments"
            )
        return read_sweep(arguments.resume_dir)
    if not arguments.argv:
        raise ConfigError(
            "--resume names neither a folder nor the words of the sweep; write fsdptoys sweep "
            "--resume sweeps/NAME"
        )
    folders = []
    for file in filter(Path.is_file, SWEEPS_FOLDER.glob(f"*/{SWEEP_FILE}")):
        with contextlib.suppress(ConfigError):
            if read_sweep(file.parent).argv == arguments.argv:
                folders.append((file.stat().st_mtime, file.parent))
    if not folders:
        raise ConfigError(
            f"--resume finds no sweep below {SWEEPS_FOLDER} that was started with "
            f"{shlex.join(arguments.argv)}; leave --resume out to start it, or write --resume "
            f"{SWEEPS_FOLDER}/NAME"
        )
    return read_sweep(max(folders)[1])


def _combinations(
    arguments: SweepArguments,
) -> tuple[str, list[Combination], float | None]:
    """Return the title, the combinations, and the time limit of the sweep's file."""
    if arguments.name is None and not arguments.settings:
        raise ConfigError(
            "fsdptoys sweep has neither a name nor keys to vary; write fsdptoys sweep debug"
        )
    choices = list_choices()
    user_axes = read_axes(arguments.settings, choices)
    if arguments.name is None:
        keys = [
            axis.key.rpartition(".")[2] for axis in user_axes if len(axis.values) > 1
        ]
        return "-".join(keys) or "one-job", combine([], [], user_axes), None
    definition = read_definition(arguments.name)
    base, rows = read_base(definition, arguments.name, choices)
    return (
        definition.title,
        combine(base, rows, user_axes),
        definition.time_limit_seconds,
    )


def _refuse_used(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"--out {out} already exists; name a new folder, or continue it with --resume {out}"
        )


def _new_folder(out: Path | None, title: str) -> Path:
    """Make the folder of a new sweep."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.")[:60] or "sweep"
    path = out or SWEEPS_FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"
    try:
        _refuse_used(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be made ({error.strerror or error}); name a folder that can be "
            "written"
        ) from error
    return path


def _lock(path: Path) -> FolderLock:
    try:
        return FolderLock(path)
    except ConfigError:
        raise ConfigError(
            f"{path} is being worked on by another fsdptoys sweep; wait for its end, or name "
            "another with --out DIR"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be locked ({error.strerror or error}); name another with --out DIR"
        ) from error


def _print_plan(sweep: Sweep, arrangement: Arrangement, briefly: bool = False) -> None:
    """Print the jobs to run and the skipped combinations."""
    to_run = len(arrangement.to_run)
    count = counted(len(arrangement.jobs), "job")
    if arrangement.ended:
        count += f", {len(arrangement.ended)} of which have ended already"
    limit = (
        f", each for {duration_text(sweep.time_limit_seconds)} at most"
        if sweep.time_limit_seconds is not None
        else ""
    )
    where = f" in {sweep.path}" if briefly else ""
    print_line(f"fsdptoys: {sweep.title}: {count}, {to_run} to run{where}{limit}")
    if not briefly:
        waiting = {job.name for job in arrangement.to_run}
        for job in arrangement.jobs:
            print_line(
                f"  {job.name} {job.label}"
                + ("" if job.name in waiting else f" ({job.status.value})")
            )
    if any(NO_TIME_LIMIT in job.overrides for job in arrangement.to_run):
        print_line(
            f"  with {NO_TIME_LIMIT}, so that all jobs run the same steps; type "
            "train.max_seconds to limit them"
        )
    for job in arrangement.changed:
        print_line(
            f"  {job.name} {job.label} runs again, since FSDPToys, PyTorch, a preset or the "
            "machine has changed; its files are kept as an attempt"
        )
    for skipped in arrangement.skipped:
        print_line(f"  skipped {label_of(skipped.varied)}: {skipped.reason}")


def _run(
    sweep: Sweep,
    to_run: Sequence[Job],
    launcher_overrides: Sequence[str],
    make_tables: MakeTables,
    train: Sequence[str],
) -> int:
    """Run jobs, keep the tables up to date, and print the last one."""
    after_job = functools.partial(make_tables, sweep.path, None)
    number: int | None = None
    if launcher_overrides:
        from .slurm_submit import submit

        try:
            submit(sweep, to_run, launcher_overrides, after_job)
        except KeyboardInterrupt as request:
            number = getattr(request, "number", signal.SIGINT)
    else:
        number = run_jobs(sweep, to_run, after_job, train=train)
    make_tables(sweep.path, Console())
    jobs = read_sweep(sweep.path).jobs
    resume = f"fsdptoys sweep --resume {shlex.quote(str(sweep.path))}"
    if number is not None:
        print_line(
            f"fsdptoys: stopped by {signal.Signals(number).name}; {resume} continues it"
        )
        return 128 + number
    bad = [job for job in jobs if job.status is not JobStatus.completed]
    if bad:
        print_line(
            f"fsdptoys: {len(bad)} of {len(jobs)} jobs are not done; {resume} --retry runs them "
            "again"
        )
    return 1 if bad else 0
