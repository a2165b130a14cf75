"""Settings of YAML files as overrides, each with its file and line.

Every file passes the bounded reader of ``utils.foreign``. What names code, and references to other
values, are refused, so that a file of unknown origin can be read.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from fsdptoys.errors import ConfigError
from fsdptoys.imports import explain_missing, read_records
from fsdptoys.register import registered
from fsdptoys.utils.foreign import parse_yaml, yaml_lines
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import near_miss, one_line, value_text

LARGEST_FILE_BYTES = 2**20
MOST_SETTINGS = 1000

CODE = re.compile(r"_\w+_|hydra|imports?")
"""Names of keys that other programs read as code to run."""

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""Numbers that YAML 1.1 reads as text."""

_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_OTHER_VALUES = ("null", "true", "false", "inf", "nan")


@dataclass(frozen=True)
class Setting:
    """An override, and its origin."""

    word: str
    origin: str
    """File and line, for messages; "" for the command line."""

    @property
    def key(self) -> str:
        """Group or key, without a typed ``+``."""
        return self.word.partition("=")[0].lstrip("+")


@dataclass(frozen=True)
class YAMLFile:
    """Contents of a YAML file of settings."""

    path: str
    tree: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]

    @classmethod
    def read(cls, path: "str | Path") -> "YAMLFile":
        """Read a file.

        Raises:
            ConfigError: if it cannot be read, or names code.
        """
        try:
            text = read_regular(path, LARGEST_FILE_BYTES)
            tree = parse_yaml(text)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{path} cannot be read ({one_line(reason)}); name a YAML file of settings, such "
                "as fsdptoys train --cfg job prints"
            ) from error
        if tree is None:
            tree = {}
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{path} holds no settings by name; write lines such as train: {{steps: 20}}"
            )
        file = cls(str(path), tree, yaml_lines(text))
        file._take_imports()
        file._check(tree, ())
        return file

    @classmethod
    def of_mapping(cls, tree: Mapping[str, Any]) -> "YAMLFile":
        """Take a mapping in place of a file; the same is refused."""
        file = cls("config", copy.deepcopy(dict(tree)), {})
        file._take_imports()
        file._check(file.tree, ())
        return file

    def origin(self, *path: str) -> str:
        """Return file and line of a key, for the beginning of a message."""
        line = self.lines.get(path)
        return self.path if line is None else f"{self.path}, line {line}"

    def _take_imports(self) -> None:
        """Take the records of own code out of a run's settings; it must have been loaded."""
        records = read_records(self.tree)
        if records and len(records) == len(self.tree["imports"]):
            missing = explain_missing(self.tree)
            if missing is not None:
                raise ConfigError(f"{self.path} has settings of own code: {missing}")
            del self.tree["imports"]

    def _check(self, tree: Any, path: tuple[str, ...]) -> None:
        """Refuse keys that are no text, keys that name code, and references."""
        if isinstance(tree, list):
            for item in tree:
                self._check(item, path)
        elif isinstance(tree, str) and "${" in tree:
            raise ConfigError(
                f"{self.origin(*path)}: {'.'.join(path)} refers to another value "
                f"({one_line(tree)}), which only the command line may; write the value itself"
            )
        for key, value in tree.items() if isinstance(tree, dict) else ():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{self.origin(*path)} has the key {one_line(key)}, which is not text; write "
                    "the name of a setting"
                )
            name = ".".join([*path, key])
            if any(map(CODE.fullmatch, re.split(r"[./@]", key))):
                raise ConfigError(
                    f"{self.origin(*path, key)}: {one_line(name)} names code to run, which no file "
                    "may; leave it out, and name own code on the command line, as --import "
                    "./mine.py"
                )
            self._check(value, (*path, key))

    def settings(
        self, tree: Mapping[str, Any], path: tuple[str, ...] = (), prefix: str = ""
    ) -> Iterator[Setting]:
        """Yield an override for each value of nested mappings.

        Args:
            tree: a mapping of the file.
            path: of the mapping in the file.
            prefix: of its keys, such as ``train.``.
        """
        if len(self.lines) > MOST_SETTINGS:
            raise ConfigError(
                f"{self.path} has more than {MOST_SETTINGS} settings; keep those of one run"
            )
        for name, value in tree.items():
            origin = self.origin(*path, name)
            key = f"{prefix}{name}"
            if not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z_]\w*)*", key, re.ASCII):
                raise ConfigError(
                    f"{origin}: {one_line(name)} is no setting's name; write it as fsdptoys train "
                    "--help does"
                )
            if isinstance(value, dict):
                yield from self.settings(value, (*path, name), f"{key}.")
                continue
            if isinstance(value, list) and any(
                isinstance(item, (dict, list)) for item in value
            ):
                raise ConfigError(
                    f"{origin}: {key} holds a list of mappings or of lists, and a setting takes a "
                    "list of values; write [a, b]"
                )
            yield Setting(f"{key}={override_text(key, value)}", origin)


def override_text(key: str, value: Any) -> str:
    """Return a value of a key, None, a boolean, a number, text or a list, in the syntax of the
    command line."""
    if isinstance(value, list):
        return f"[{','.join(override_text(key, item) for item in value)}]"
    if not isinstance(value, str):
        return value_text(value)
    if _NUMBER.fullmatch(value) and _is_number(key):
        return value
    if _WORD.fullmatch(value) and value.lower() not in _OTHER_VALUES:
        return value
    return QuotedString(value, Quote.single).with_quotes()


def _is_number(key: str) -> bool:
    from .fixes import all_options

    option = all_options(())[0].get(key)
    return option is not None and option.base_type in (int, float, list[float])


def read_sections(file: YAMLFile) -> list[Setting]:
    """Return the overrides of a file of settings: groups, and keys of sections.

    A section with a ``name`` chooses from its group and sets keys of the choice.

    Raises:
        ConfigError: for the first mistake of the file's form.
    """
    from .choices import list_choices

    choices = list_choices()
    settings: list[Setting] = []
    for section, value in file.tree.items():
        origin = file.origin(section)
        if section == "defaults":
            raise ConfigError(
                f"{origin}: defaults belongs to the files of a group, and a file of settings "
                "chooses by name; write a line such as model: llama_debug"
            )
        if section in choices and not isinstance(value, dict):
            settings.append(
                Setting(f"{section}={override_text(section, value)}", origin)
            )
        elif isinstance(value, dict):
            keys = dict(value)
            choice = (
                _take_choice(file, section, keys, choices[section])
                if section in choices
                else None
            )
            if choice is not None:
                settings.append(choice)
            settings += file.settings(keys, (section,), f"{section}.")
        elif value is not None or "." in section:
            settings += file.settings({section: value})
    return settings


def _take_choice(
    file: YAMLFile, section: str, keys: dict[str, Any], names: "list[str]"
) -> Setting | None:
    """Take name and family out of a section; return the choice that they mean."""
    from .choices import BASE, schema_name
    from .schema import SCHEMAS

    name = keys.pop("name", None)
    family = keys.pop("family", None) if section == "model" else None
    origin = file.origin(section, "name" if name is not None else "family")
    if family is None:
        return (
            None
            if name is None
            else Setting(f"{section}={override_text(section, name)}", origin)
        )
    families = list(SCHEMAS["model"])
    if family not in families:
        near = near_miss(str(family), families)
        fix = f"did you mean {near}?" if near else "write the name of a preset instead"
        raise ConfigError(
            f"{file.origin(section, 'family')}: model.family={value_text(family, quote=True)} must "
            f"be one of {', '.join(families)}; {fix}"
        )
    if name in names and schema_name("model", name) == family:
        return Setting(f"model={name}", origin)
    if name is not None:
        keys["name"] = name
    own = family in registered("model")
    return Setting(f"model={family if own else f'{BASE}{family}'}", origin)
