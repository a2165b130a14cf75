"""``fsdptoys sweep``: parse its arguments, run it, and keep its tables up to date."""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fsdptoys.config.settings import Settings, read_settings
from fsdptoys.errors import ConfigError
from fsdptoys.imports import import_options
from fsdptoys.report.runs_table import gather
from fsdptoys.report.table import make_table
from fsdptoys.report.table_export import to_csv, to_json, to_markdown
from fsdptoys.report.table_terminal import print_table
from fsdptoys.sweep.axes import SET_BY_SWEEP
from fsdptoys.sweep.definition import is_file_name
from fsdptoys.sweep.run_sweep import SweepArguments, run_sweep, split_arguments
from fsdptoys.sweep.runner import TRAIN, print_line
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.text import near_miss

from .commands import parse

SWEEP_OPTIONS = (
    *("--dry-run", "--retry", "--resume", "--out", "--time-limit"),
    *("--config", "--config-dir"),
)


def sweep_command(argv: Sequence[str], train: Sequence[str] = TRAIN) -> int:
    """Run ``fsdptoys sweep``; return the exit status of ``run_sweep``."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "fsdptoys sweep starts the ranks of each job itself, and here torchrun has started "
            f"it as one of several; write {shlex.join(['fsdptoys', 'sweep', *argv])} "
            f"launch.nproc_per_node={os.environ['WORLD_SIZE']}, without torchrun"
        )
    arguments, settings = _read(argv)
    settings.tell()
    with settings.name_origin():
        return run_sweep(arguments, make_tables, train)


def read_arguments(argv: Sequence[str]) -> SweepArguments:
    """Parse the arguments after ``fsdptoys sweep``; those of files become overrides.

    Raises:
        ConfigError: for an unknown option, one without a value, or incompatible options.
    """
    return _read(argv)[0]


def _read(argv: Sequence[str]) -> tuple[SweepArguments, Settings]:
    options = parse("sweep", _join_resume(argv))
    for word in options.arguments:
        near = near_miss(word.partition("=")[0], SWEEP_OPTIONS)
        if near and word.startswith("--"):
            raise ConfigError(
                f"{word} is not an option of fsdptoys sweep; did you mean {near}?"
            )
    resume = options.resume or options.resume_dir is not None
    if resume and options.out is not None:
        raise ConfigError(
            f"--out {options.out} names a new folder, and --resume continues in an old one; "
            "leave out one of them"
        )
    if options.retry and not resume:
        raise ConfigError(
            "--retry repeats failed jobs, which a new sweep does not have; add --resume"
        )
    arguments = options.arguments
    has_name = (
        bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("-")
    )
    settings = read_settings(options.config, arguments[has_name:])
    settings = settings.without_defaults(*SET_BY_SWEEP)
    split = split_arguments([*arguments[:has_name], *settings.overrides])
    sweep_arguments = dataclasses.replace(
        split,
        command=shlex.join(["fsdptoys", "sweep", *import_options(), *argv]),
        resume=resume,
        resume_dir=Path(options.resume_dir) if options.resume_dir is not None else None,
        out=Path(options.out) if options.out is not None else None,
        time_limit_seconds=options.time_limit,
        dry_run=options.dry_run,
        retry=options.retry,
    )
    return sweep_arguments, settings


def _join_resume(argv: Sequence[str]) -> list[str]:
    """Write ``--resume`` with its folder as ``--resume-dir=DIR``; a sweep's name after ``--resume``
    is no folder."""
    joined = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        if word == "--resume=":
            raise ConfigError(
                "--resume= has no value; write --resume=DIR, or --resume for the newest with the "
                "same words"
            )
        after = queue[0] if word == "--resume" and queue else "-"
        is_path = "/" in after or Path(after).is_dir()
        if (
            is_path
            and not after.startswith("-")
            and "=" not in after
            and not is_file_name(after)
        ):
            word = f"--resume={queue.pop(0)}"
        joined.append(re.sub("^--resume=", "--resume-dir=", word))
    return joined


def make_tables(path: Path, console: Console | None = None) -> None:
    """Write ``table.md``, ``table.csv`` and ``table.json`` for the current state of a sweep's
    folder.

    A write error is printed, not raised, so that the remaining jobs still run.

    Args:
        path: the sweep's folder.
        console: also print the table there.
    """
    table = make_table(gather([path]))
    try:
        for name, export in {
            "table.md": to_markdown,
            "table.csv": to_csv,
            "table.json": to_json,
        }.items():
            write_atomically(path / name, export(table))
    except OSError as problem:
        print_line(
            f"fsdptoys: the tables in {path} could not be written ({problem.strerror or problem})"
        )
    if console is not None:
        print_table(table, console)
