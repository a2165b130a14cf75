"""Candidates for the last word of a command line: commands, options, keys, choices, values and
folders of runs.

The keys are in ``completion_keys.txt``, which ``scripts/write_options.py`` writes.
"""

import functools
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fsdptoys.config.choices import list_choices, schema_name
from fsdptoys.errors import ConfigError
from fsdptoys.register import CONFIGS
from fsdptoys.utils.text import printable

from .command_table import make_parsers
from .config_dirs import take_config_dirs

KEYS = Path(__file__).with_name("completion_keys.txt")
SETTINGS = ("train", "sweep", "plan", "plan search", "config show")
"""Commands that take settings."""

RUNS = (
    *("report", "compare", "generate", "evaluate", "convert to-hf", "plan calibrate"),
    *("checkpoint ls", "checkpoint show", "config diff"),
)
"""Commands that take folders of runs."""

FOLDERS_OF_RUNS = ("runs", "sweeps")
FOLDER_KEYS = ("metrics.run_dir", "checkpoint.resume", "model.init_from")
RESUME = ("auto", "must", "never")
OPTION_VALUES = {
    "--device": ("cpu", "cuda", "npu"),
    "--dtype": ("bfloat16", "float16", "float32"),
    "--cfg": ("job",),
}
YAML = (".yaml", ".yml")
SHELLS = ("bash", "fish", "zsh")
MOST_PATHS = 1000


def complete(line: str) -> list[str]:
    """Return the words by which the last word of a line may be replaced; none for an odd line."""
    try:
        argv = _split(line)
        command = argv[1] if len(argv) > 2 else ""
        rest = take_config_dirs(command, argv[2:-1]) if command else []
        candidates = _candidates(command, rest, argv[-1], argv[-2])
    except (ConfigError, OSError, ValueError, IndexError):
        return []
    word = argv[-1]
    return sorted({name for name in candidates if name.startswith(word)})


def _split(line: str) -> list[str]:
    """Split a line like a shell; the last word may be empty."""
    argv = shlex.split(line)
    return [*argv, ""] if line[-1:].isspace() else argv


def _candidates(
    command: str, rest: Sequence[str], word: str, before: str
) -> Iterable[str]:
    """Return words for the place of the last one, which need not begin like it.

    Args:
        command: the first word; "" if it is the last.
        rest: the words between both, without folders of own files.
        word: the last word, as far as it is typed.
        before: the word before it.
    """
    parsers = make_parsers()[1]
    if not command:
        return [*(name.partition(" ")[0] for name in parsers), "--version", "--help"]
    parts = [
        name.partition(" ")[2] for name in parsers if name.startswith(f"{command} ")
    ]
    if rest and f"{command} {rest[0]}" in parsers:
        command = f"{command} {rest[0]}"
        rest = rest[1:]
        parts = []
    parser = parsers.get(command)
    options = parser.examples if parser is not None else {}
    option, equals, _ = word.partition("=")
    if word.startswith("-") and equals and options.get(option):
        return (f"{option}={value}" for value in _option_values(option, word))
    if before.startswith("-") and options.get(before):
        return _option_values(before, word)
    if word.startswith("-"):
        return [*options, "--help"]
    if command not in parsers:
        return [] if rest else parts
    return [*([] if rest else parts), *_arguments(command, rest, word)]


def _option_values(option: str, word: str) -> Iterable[str]:
    value = word.partition("=")[2] if word.startswith("-") else word
    if option in OPTION_VALUES:
        return OPTION_VALUES[option]
    if option == "--import":
        return _paths(value, lambda path: path.suffix == ".py")
    if option == "--config":
        return [*_runs(value), *_paths(value, lambda path: path.suffix in YAML)]
    return _paths(value)


def _arguments(command: str, rest: Sequence[str], word: str) -> Iterable[str]:
    """Return words that are no options."""
    if command in SETTINGS:
        names = _sweeps() if command == "sweep" and not rest else []
        return [*names, *_settings(rest, word)]
    if command in RUNS:
        return _runs(word)
    if command == "models":
        return list_choices()["model"]
    if command == "config cp" and not rest:
        return [
            f"{group}/{name}"
            for group, names in list_choices().items()
            for name in names
        ]
    if command == "config schema" and not rest:
        return [*list_choices(), "hardware", "sweep"]
    if command == "completion":
        return SHELLS
    return _paths(word)


def _sweeps() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "sweep").glob("*.yaml"))


def _settings(rest: Sequence[str], word: str) -> Iterable[str]:
    """Return groups and sections, the keys of a section, or the values of a key."""
    key, equals, value = word.partition("=")
    choices = list_choices()
    if equals:
        earlier, comma, _ = value.rpartition(",")  # values of a sweep
        prefix = f"{key}={earlier}{comma}"
        return (f"{prefix}{name}" for name in _values(key, value, choices))
    chosen = dict(item.partition("=")[::2] for item in rest)
    keys = [name for name, owners, _ in _table() if _has(name, owners, chosen)]
    if "." in word:
        return (f"{name}=" for name in keys)
    sections = {f"{name.partition('.')[0]}." for name in keys if "." in name}
    root = [f"{name}=" for name in keys if "." not in name]
    return [*(f"{group}=" for group in choices), *sections, *root]


def _values(key: str, value: str, choices: "dict[str, list[str]]") -> Iterable[str]:
    if key in choices:
        return [*choices[key], *(["null"] if key == "experiment" else [])]
    if key == "checkpoint.resume":
        return [*RESUME, *_runs(value)]
    if key in FOLDER_KEYS:
        return _paths(value, lambda path: False)
    if key == "plan.hardware":
        return [path.stem for path in (CONFIGS / "hardware").glob("*.yaml")]
    return next((values for name, _, values in _table() if name == key), [])


def _has(key: str, owners: Sequence[str], chosen: "dict[str, str]") -> bool:
    """Return whether the chosen file of a group has a key; all do if none is chosen."""
    group = key.partition(".")[0]
    choice = chosen.get(group)
    return not owners or choice is None or schema_name(group, choice) in owners


@functools.cache
def _table() -> list[tuple[str, list[str], list[str]]]:
    """Return each key, the schemas that have it (none: all), and its values."""
    rows = []
    for line in KEYS.read_text(encoding="utf-8").splitlines():
        key, owners, values = line.split("\t")
        rows.append(
            (
                key,
                [*filter(None, owners.split(","))],
                [*filter(None, values.split(","))],
            )
        )
    return rows


def _runs(word: str) -> list[str]:
    """Return the folders of runs and sweeps here, or those below a typed folder."""
    if "/" in word:
        return _paths(word)
    folders = [
        f"{folder}/{entry}"
        for folder in FOLDERS_OF_RUNS
        for entry in _entries(Path(folder))
    ]
    return [*folders, *_paths(word)]


def _paths(word: str, takes: Callable[[Path], bool] = lambda path: True) -> list[str]:
    """Return the folders, and the files that are taken, that begin with a path."""
    folder, slash, _ = word.rpartition("/")
    base = Path(os.path.expanduser(f"{folder}{slash}") or ".")
    paths = []
    for name in _entries(base):
        path = base / name
        if path.is_dir():
            paths.append(f"{folder}{slash}{name}/")
        elif takes(path):
            paths.append(f"{folder}{slash}{name}")
    return paths


def _entries(folder: Path) -> list[str]:
    """Return the visible names in a folder that a line can show."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return []
    return [
        name
        for name in names
        if name[0] != "." and printable(name) == name and "\n" not in name
    ][:MOST_PATHS]
