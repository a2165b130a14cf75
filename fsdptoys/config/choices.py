"""Groups of settings, and their choices: the YAML files of ``configs/``, and own ones.

Own files lie in ``configs/GROUP`` of the working directory, and of each folder of ``--config-dir``.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.register import CONFIGS, registered
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.text import one_line

OWN_CONFIGS = Path("configs")
"""Folder of own files in the working directory."""

CONFIG_DIRS = "FSDPTOYS_CONFIG_DIRS"
"""Environment variable with the folders of ``--config-dir``, which child processes need too."""

BASE = "base_"
"""Prefix of a schema in the defaults of a file; ``model=base_llama`` is a model without a file."""

Choices = Mapping[str, Sequence[str]]  # group → names of its choices


def list_choices() -> dict[str, list[str]]:
    """Map each group to the sorted names of its YAML files, own ones included, and of the classes
    that own code has registered."""
    own = list(own_files())
    return {
        group: sorted(
            {
                *built_in_names(group),
                *(path.stem for other, path in own if other == group),
                *registered(group),
            }
        )
        for group in sorted(list_defaults())
    }


def built_in_names(group: str) -> list[str]:
    """Return the sorted names of the package's own files of a group."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def own_folders() -> list[Path]:
    """Return the folders with own files, those of ``--config-dir`` first.

    The folder ``configs`` of a checkout of this project holds no own files.
    """
    names = os.environ.get(CONFIG_DIRS, "").split(os.pathsep)
    folders = [Path(name) for name in names if name]
    if not (OWN_CONFIGS / "config.yaml").is_file():
        folders.append(OWN_CONFIGS)
    unique: dict[Path, Path] = {}
    for folder in folders:
        try:
            path = Path(os.path.realpath(folder))
        except FileNotFoundError:  # the working directory was deleted
            continue
        if path.is_dir() and path != Path(os.path.realpath(CONFIGS)):
            unique.setdefault(path, folder)
    return list(unique.values())


def own_files(group: str = "*") -> Iterator[tuple[str, Path]]:
    """Yield the group and the path of each own file, of all groups or of one."""
    groups = list_defaults()
    for folder in own_folders():
        for path in sorted(folder.glob(f"{group}/*.yaml")):
            if path.parent.name in groups:
                yield path.parent.name, path


def find_file(group: str, choice: str) -> Path:
    """Return the YAML file of a choice.

    Raises:
        ConfigError: if several files have this name.
    """
    built_in = CONFIGS / group / f"{choice}.yaml"
    own = [path for _, path in own_files(group) if path.stem == choice]
    is_registered = choice in registered(group)
    if own and len(own) + built_in.is_file() + is_registered > 1:
        other = (
            "the name of a built-in file"
            if built_in.is_file()
            else "the name that own code has registered"
            if is_registered
            else f"that of {own[1]}"
        )
        raise ConfigError(
            f"{group}={choice} is ambiguous, since {own[0]} has {other}; rename {own[0]}"
        )
    return own[0] if own else built_in


def schema_name(group: str, choice: str) -> str:
    """Name of the schema of a group's YAML file: ``llama`` if its defaults begin with
    ``base_llama``.

    An own file may begin with another file of its group, and then has the schema of that one. A
    registered class has its own name.
    """
    for _ in range(100):
        if choice in registered(group):
            return choice
        if choice.startswith(BASE):
            return choice.removeprefix(BASE)
        built_in = CONFIGS / group / f"{choice}.yaml"
        choice = (
            _built_in_default(built_in)
            if built_in.is_file()
            else first_default(find_file(group, choice))
        )
    raise ConfigError(
        f"configs/{group}/{choice}.yaml begins with itself, by way of its defaults; let one of "
        f"these files begin with {BASE}NAME"
    )


def first_default(path: Path) -> str:
    """Return the file or the schema with which a group's YAML file begins."""
    try:
        return str(parse_yaml(path.read_text(encoding="utf-8"))["defaults"][0])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{path} cannot be read ({one_line(error)}); begin it with a list of defaults, as "
            "fsdptoys config cp copies them"
        ) from error


_built_in_default = functools.cache(first_default)


def own_schemas() -> dict[tuple[str, str], str]:
    """Map group and name of each own file, except for experiments and invalid ones, to the name of
    its schema."""
    schemas = {}
    for group, path in own_files():
        with contextlib.suppress(ConfigError):
            if group != "experiment":
                schemas[group, path.stem] = schema_name(group, path.stem)
    return schemas


def list_defaults() -> dict[str, str | None]:
    """Map each group to its default choice, in the order of ``config.yaml``."""
    return dict(_read_defaults(CONFIGS / "config.yaml"))


@functools.cache
def _read_defaults(path: Path) -> dict[str, str | None]:
    entries = parse_yaml(path.read_text(encoding="utf-8"))["defaults"]
    return {
        group: choice
        for entry in entries
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }


def explain_file(word: str, group: str = "", command: str = "") -> str | None:
    """The end of a sentence on a YAML file in place of a setting; None for another word."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml"):
        return None
    if (CONFIGS / (group or "experiment") / f"{path.stem}.yaml").is_file():
        return f"write {command}{group or 'experiment'}={path.stem}"
    if group in ("", "experiment"):
        return f"write {command}--config {word}"
    return (
        f"own files of a group lie in {OWN_CONFIGS / group}: copy it to "
        f"{OWN_CONFIGS / group / path.stem}.yaml and write {command}{group}={path.stem}"
    )
