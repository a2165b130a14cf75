"""Arguments of a sweep: its name or settings, the launcher, and options on the folder."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.errors import ConfigError

from .definition import is_file_name, list_sweeps
from .folder import SWEEP_FILE, Sweep
from .slurm_settings import refuse_commands, split_launcher_words


@dataclass(frozen=True)
class SweepArguments:
    """What to run, where, and in which folder."""

    words: tuple[str, ...]
    """Arguments without dashed options; a sweep's file as an absolute path, valid from any folder."""
    name: str | None
    """Name or file of a sweep."""
    settings: list[str]
    launcher_words: list[str]
    command: str = "fsdptoys sweep"
    """The command line, recorded in a new folder."""
    resume: bool = False
    resume_dir: Path | None = None
    """The folder to resume, if given."""
    out: Path | None = None
    time_limit_seconds: float | None = None
    dry_run: bool = False
    retry: bool = False


def split_words(words: Sequence[str]) -> SweepArguments:
    """Split the arguments without dashed options into name, settings and launcher words.

    Raises:
        ConfigError: for a misplaced name.
    """
    settings, launcher_words = split_launcher_words(words)
    name = settings.pop(0) if settings and "=" not in settings[0] and not settings[0].startswith("-") else None
    _check_names(name, settings)
    absolute = [os.path.abspath(word) if word == name and is_file_name(word) else word for word in words]
    return SweepArguments(tuple(absolute), name, settings, launcher_words)


def _check_names(name: str | None, settings: Sequence[str]) -> None:
    """Reject a sweep's name after the first word, and a key mistaken for a name."""
    if name is not None and settings and settings[0].startswith("="):
        value = settings[0][1:] or "".join(settings[1:2]) or "VALUE"
        raise ConfigError(f"{name} has no value; write {name}={value} without spaces")
    for word in settings:
        if "=" not in word and (is_file_name(word) or word in list_sweeps()):
            raise ConfigError(f"{word} names a sweep; put it first, and only one")


def with_recorded_words(arguments: SweepArguments, sweep: Sweep) -> SweepArguments:
    """Return the arguments with the words of the resumed folder; a typed launcher replaces the recorded one.

    Raises:
        ConfigError: if the folder has no words, or its launcher words may run commands.
    """
    if not sweep.words:
        raise ConfigError(f"{sweep.path / SWEEP_FILE} does not say its words; give them after --resume {sweep.path}")
    old = split_words(sweep.words)
    if not arguments.launcher_words:
        refuse_commands(old.launcher_words, sweep.path)
    launcher_words = arguments.launcher_words or old.launcher_words
    words = (*(word for word in old.words if word not in old.launcher_words), *launcher_words)
    return dataclasses.replace(
        arguments, words=words, name=old.name, settings=old.settings, launcher_words=launcher_words
    )
