"""``fsdptoys sweep``: parse its arguments, run it, and keep its tables up to date."""

import contextlib
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from fsdptoys.errors import ConfigError
from fsdptoys.report.runs_table import gather
from fsdptoys.report.table import make_table
from fsdptoys.report.table_export import to_csv, to_json, to_markdown
from fsdptoys.report.table_terminal import print_table
from fsdptoys.sweep.arguments import SweepArguments, split_words
from fsdptoys.sweep.definition import is_file_name
from fsdptoys.sweep.local import print_status
from fsdptoys.sweep.run_sweep import run_sweep
from fsdptoys.sweep.runner import TRAIN
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.text import near_miss

from .help import take_options

FLAGS = ("--dry-run", "--retry", "--resume")
VALUES = {"--out": "DIR", "--time-limit": "SECONDS"}


def sweep_command(words: Sequence[str], environment: Mapping[str, str], train: Sequence[str] = TRAIN) -> int:
    """Run ``fsdptoys sweep``.

    Args:
        words: as typed after the command.
        environment: of this process.
        train: the command of a job on this machine, before its words.

    Returns:
        Exit status, see ``run_sweep``.

    Raises:
        ConfigError: for the first mistake.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        raise ConfigError(
            "fsdptoys sweep starts the ranks of each job itself, and here torchrun has started it as one of several; "
            f"write {shlex.join(['fsdptoys', 'sweep', *words])} launch.nproc_per_node={environment['WORLD_SIZE']}, "
            "without torchrun"
        )
    return run_sweep(read_words(words), make_tables, train)


def read_words(words: Sequence[str]) -> SweepArguments:
    """Parse the arguments after ``fsdptoys sweep``.

    Raises:
        ConfigError: for an unknown option, one without a value, or incompatible options.
    """
    if "--resume=" in words:
        raise ConfigError("--resume= has no value; write --resume=DIR, or --resume for the newest with the same words")
    rest, options = take_options(
        [f"--resume-dir={word[9:]}" if word.startswith("--resume=") else word for word in words],
        FLAGS,
        {**VALUES, "--resume-dir": "DIR"},
    )
    resumed = Path(options["--resume-dir"]) if "--resume-dir" in options else None
    if resumed is None and "--resume" in options:
        resumed, rest = _take_folder(words, rest)
    resume = "--resume" in options or resumed is not None
    for word in rest:
        known = near_miss(word.partition("=")[0], [*FLAGS, *VALUES]) if word.startswith("--") else None
        if known:
            raise ConfigError(f"{word} is not an option of fsdptoys sweep; did you mean {known}?")
    if resume and "--out" in options:
        raise ConfigError(
            f"--out {options['--out']} names a new folder, and --resume goes on in an old one; leave out one of them"
        )
    if "--retry" in options and not resume:
        raise ConfigError("--retry runs jobs again that ended badly, which a new sweep does not have; add --resume")
    return dataclasses.replace(
        split_words(rest),
        command=shlex.join(["fsdptoys", "sweep", *words]),
        resume=resume,
        resume_dir=resumed,
        out=Path(options["--out"]) if "--out" in options else None,
        time_limit_seconds=_seconds(options.get("--time-limit")),
        dry_run="--dry-run" in options,
        retry="--retry" in options,
    )


def _take_folder(words: Sequence[str], rest: list[str]) -> tuple[Path | None, list[str]]:
    """Return the folder after ``--resume``, or None, and the words without it; a sweep's name is not a folder."""
    index = list(words).index("--resume") + 1
    if index == len(words) or words[index] not in rest or "=" in words[index] or words[index].startswith("-"):
        return None, rest
    word = words[index]
    if not (Path(word).is_dir() or "/" in word) or is_file_name(word):
        return None, rest
    left = list(rest)
    left.remove(word)
    return Path(word), left


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--time-limit {text} must be a number of seconds above 0; write --time-limit 600")
    return seconds


def make_tables(path: Path, console: Console | None = None) -> None:
    """Write ``table.md``, ``table.csv`` and ``table.json`` for the current state of a sweep's folder.

    A write error is printed, not raised, so that the remaining jobs still run.

    Args:
        path: the sweep's folder.
        console: also print the table there.
    """

    table = make_table(gather([path]))
    try:
        for name, export in {"table.md": to_markdown, "table.csv": to_csv, "table.json": to_json}.items():
            write_atomically(path / name, export(table))
    except OSError as problem:
        print_status(f"fsdptoys: the tables in {path} could not be written ({problem.strerror or problem})")
    if console is not None:
        with contextlib.suppress(OSError):  # a closed terminal
            print_table(table, console)
