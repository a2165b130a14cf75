"""Own files of groups: read by the bounded reader, checked like the command line, and stored where
Hydra finds them.

A file begins with a schema (``base_llama``) or with another file of its group, as the files of
``configs/`` do. One of ``experiment`` overrides other groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line, suggestion, value_text

from .choices import (
    BASE,
    find_file,
    list_choices,
    list_defaults,
    own_files,
    schema_name,
)
from .overrides import check_values, parse_overrides
from .yaml_settings import YAMLFile

EXPERIMENT = "experiment"
SELF = "_self_"
OVERRIDE = "override /"


@dataclass(frozen=True)
class GroupFile:
    """An own file of a group."""

    group: str
    name: str
    defaults: tuple[Any, ...]
    tree: dict[str, Any]

    @property
    def parents(self) -> Iterator[tuple[str, str]]:
        """Groups and choices that the defaults name, except for schemas."""
        for entry in self.defaults:
            if isinstance(entry, dict):
                for key, choice in entry.items():
                    yield key.removeprefix(OVERRIDE), str(choice)
            elif entry != SELF and not entry.startswith(BASE):
                yield self.group, entry

    @property
    def node(self) -> dict[str, Any]:
        """Contents for Hydra."""
        return {"defaults": list(self.defaults), **self.tree}


def find_own_files(overrides: Sequence[str]) -> list[GroupFile]:
    """Return the own files that ``GROUP=CHOICE`` overrides name, and those that their defaults
    name.

    Raises:
        ConfigError: for the first mistake in one of them.
    """
    if next(own_files(), None) is None:
        return []
    queue = []
    for word in overrides:
        key, _, choice = word.lstrip("+").partition("=")
        queue.append((key.partition("@")[0], choice.strip("'\"")))
    files: dict[tuple[str, str], GroupFile] = {}
    while queue:
        group, name = queue.pop()
        if (group, name) in files:
            continue
        path = find_file(group, name)
        if any(path == own for _, own in own_files(group)):
            files[group, name] = read_group_file(group, path)
            queue += files[group, name].parents
    return list(files.values())


def read_group_file(group: str, path: Path) -> GroupFile:
    """Read an own file of a group.

    Raises:
        ConfigError: for its first mistake.
    """
    file = YAMLFile.read(path)
    tree = dict(file.tree)
    defaults = tree.pop("defaults", None)
    if not isinstance(defaults, list) or not defaults:
        begin = (
            f"{OVERRIDE}model: llama_debug"
            if group == EXPERIMENT
            else (list_defaults()[group] or "")
        )
        raise ConfigError(
            f"{path} has no list of defaults, with which the files of a group begin; write "
            f"defaults: [{begin}, {SELF}]"
        )
    for entry in defaults:
        _check_default(file, group, entry)
    _check_options(file, group, path.stem, tree)
    if group == "model":
        tree.setdefault("name", path.stem)
    return GroupFile(group, path.stem, tuple(defaults), tree)


def _check_default(file: YAMLFile, group: str, entry: Any) -> None:
    """Check an entry of the defaults of a file."""
    choices = list_choices()
    origin = file.origin("defaults")
    if entry == SELF:
        return
    if isinstance(entry, dict) and group == EXPERIMENT and len(entry) == 1:
        ((key, choice),) = entry.items()
        other = str(key).removeprefix(OVERRIDE)
        if str(key).startswith(OVERRIDE) and other in choices:
            if choice not in choices[other]:
                fix = suggestion(
                    str(choice),
                    choices[other],
                    f"see fsdptoys train --help for {other}=",
                )
                raise ConfigError(
                    f"{origin}: {other}={value_text(choice, quote=True)} does not exist; {fix}"
                )
            return
    if isinstance(entry, str):
        from .schema import SCHEMAS

        names = [f"{BASE}{name}" for name in SCHEMAS.get(group, ())]
        names += choices[group]
        if entry in names:
            return
        fix = suggestion(entry, names, f"begin with one of {', '.join(names)}")
        raise ConfigError(
            f"{origin}: {one_line(entry)} is neither a schema nor a file of {group}; {fix}"
        )
    raise ConfigError(
        f"{origin}: {one_line(entry)} is no entry of defaults; write the name of a file of "
        f"{group}, {SELF}, or in an experiment '{OVERRIDE}GROUP: NAME'"
    )


def _check_options(file: YAMLFile, group: str, name: str, tree: dict[str, Any]) -> None:
    """Check keys and values of a file as those of the command line are."""
    chosen: dict[str, str | None] = dict(list_defaults())
    if group != EXPERIMENT:
        schema_name(group, name)  # the file with which it begins exists
        chosen[group] = name
    for entry in file.tree["defaults"] if group == EXPERIMENT else ():
        for key, choice in entry.items() if isinstance(entry, dict) else ():
            chosen[key.removeprefix(OVERRIDE)] = choice
    prefix = "" if group == EXPERIMENT else f"{group}."
    for setting in file.settings(tree, prefix=prefix):
        try:
            check_values(parse_overrides([setting.word], list_choices()), chosen)
        except ConfigError as error:
            raise ConfigError(f"{setting.origin}: {error}") from error
