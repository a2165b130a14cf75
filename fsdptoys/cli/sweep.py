"""Parse the arguments of ``fsdptoys sweep``: a name, settings, launcher words and dashed options."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.sweep import Sweep
from fsdptoys.sweep.definition import is_file_name, list_sweeps
from fsdptoys.sweep.folder import SWEEP_FILE
from fsdptoys.sweep.slurm_settings import refuse_commands, split_launcher_words
from fsdptoys.utils.text import (
    near_miss,
)

from .help import (
    take_options,
)

FLAGS = ("--dry-run", "--retry", "--resume")
VALUES = {"--out": "DIR", "--time-limit": "SECONDS"}


@dataclass(frozen=True)
class Asked:
    """Parsed arguments."""

    words: tuple[str, ...]
    """Arguments without dashed options; a sweep's file as an absolute path, valid from any folder."""
    name: str | None
    """Name or file of a sweep."""
    settings: list[str]
    launcher_words: list[str]
    resume: bool
    resumed: Path | None
    """The folder to resume, if given."""
    out: Path | None
    time_limit_seconds: float | None
    dry_run: bool
    retry: bool


def read_words(words: Sequence[str]) -> Asked:
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
    settings, launcher_words = split_launcher_words(rest)
    name = settings.pop(0) if settings and "=" not in settings[0] and not settings[0].startswith("-") else None
    _check_names(name, settings)
    if name is not None and is_file_name(name):
        rest[rest.index(name)] = os.path.abspath(name)
    return Asked(
        words=tuple(rest),
        name=name,
        settings=settings,
        launcher_words=launcher_words,
        resume=resume,
        resumed=resumed,
        out=Path(options["--out"]) if "--out" in options else None,
        time_limit_seconds=_seconds(options.get("--time-limit")),
        dry_run="--dry-run" in options,
        retry="--retry" in options,
    )


def _check_names(name: str | None, settings: Sequence[str]) -> None:
    """Reject a sweep's name after the first word, and a key mistaken for a name."""
    if name is not None and settings and settings[0].startswith("="):
        value = settings[0][1:] or "".join(settings[1:2]) or "VALUE"
        raise ConfigError(f"{name} has no value; write {name}={value} without spaces")
    for word in settings:
        if "=" not in word and (is_file_name(word) or word in list_sweeps()):
            raise ConfigError(f"{word} names a sweep; put it first, and only one")


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


def with_words(asked: Asked, before: Sweep) -> Asked:
    """Return the arguments with the words of the resumed folder; a typed launcher replaces the recorded one.

    Raises:
        ConfigError: if the folder has no words, or its launcher words may run commands.
    """
    if not before.words:
        raise ConfigError(f"{before.path / SWEEP_FILE} does not say its words; give them after --resume {before.path}")
    old = read_words(before.words)
    if not asked.launcher_words:
        refuse_commands(old.launcher_words, before.path)
    launcher_words = asked.launcher_words or old.launcher_words
    words = (*(word for word in old.words if word not in old.launcher_words), *launcher_words)
    return dataclasses.replace(asked, words=words, name=old.name, settings=old.settings, launcher_words=launcher_words)
