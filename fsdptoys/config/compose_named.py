"""Compose the options of names in lists (``named_lists``) from YAML files and the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.utils.text import value_text

from .named_lists import NAMED_LISTS, NamedList


def compose_named(tree: DictConfig, options: Mapping[str, Any]) -> None:
    """Give each name of the lists its dataclass, with values of files and of the command line.

    Args:
        tree: composed configuration.
        options: ``section.name.key`` → value, of the command line; they win.

    Raises:
        ConfigError: for options of a name that does not exist, or that the list does not have.
    """
    for name_list in NAMED_LISTS:
        values = _values_of_files(tree, name_list)
        for key, value in options.items():
            section, name, option = key.split(".", 2)
            if section == name_list.section:
                values.setdefault(name, {})[option] = value
        names = [str(name) for name in OmegaConf.select(tree, name_list.key)]
        _check(name_list, names, values)
        tree[name_list.section] = {
            name: OmegaConf.merge(
                OmegaConf.structured(name_list.classes[name]), values.get(name, {})
            )
            for name in names
            if name
            in name_list.classes  # the list itself says what is wrong with others
        }


def _values_of_files(
    tree: DictConfig, name_list: NamedList
) -> dict[str, dict[str, Any]]:
    """Return name → key → value of the YAML files."""
    values = OmegaConf.to_container(tree[name_list.section], resolve=False)
    assert isinstance(values, dict)
    options_by_name = {str(name): options for name, options in values.items()}
    for name, options in options_by_name.items():
        if not isinstance(options, dict):
            raise ConfigError(
                f"{name_list.section}.{name}={value_text(options)} must map options to values; "
                f"write {name_list.section}.{name}.KEY=VALUE"
            )
    return {name: dict(options) for name, options in options_by_name.items()}


def _check(
    name_list: NamedList, names: Sequence[str], values: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, options in values.items():
        if name not in name_list.classes:
            raise ConfigError(
                f"{name_list.section}.{name} has options, and nothing is registered as {name}; "
                f"leave it out, or add the --import of the code that registers {name}"
            )
        if name in names:
            continue
        for option, value in options.items():
            raise UnusedKeyError(
                f"{name_list.section}.{name}.{option}={value_text(value)} has no effect unless "
                f"{name_list.key} names {name}; set "
                f"{name_list.key}=[{','.join([*names, name])}] or leave it out"
            )
