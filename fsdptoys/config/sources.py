"""Origins of the values of a configuration, and the keys in which two configurations differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_yaml

from .choices import BASE, find_file, list_choices, list_defaults
from .compose import Composition, compose, compose_config
from .schema import Config
from .settings import Settings

COMMAND_LINE = "command line"
DEFAULT = "default"
ABSENT = object()
"""In origin of the value of a key that a configuration does not have."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map the dotted keys of nested mappings to their values."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def find_sources(
    settings: Settings, overrides: Sequence[str], config: Config
) -> dict[str, str]:
    """Map each key of a run to the origin of its value.

    Args:
        settings: of the command.
        overrides: those of ``settings``, and those that the program has added.
        config: validated, with every ``auto`` resolved.
    """
    composition = compose(overrides)
    composed = flatten(composition.config.to_dict())
    defaults = flatten(composition.config.defaults())
    by_file = _values_of_files(composition)
    added = {
        word.partition("=")[0]: word
        for word in overrides
        if word not in settings.overrides
    }
    origins = {key: origin or COMMAND_LINE for key, origin in settings.origins.items()}
    groups = list_choices()
    sources = {}
    for key, value in flatten(config.to_dict()).items():
        section = key.partition(".")[0]
        is_choice = key in (f"{section}.name", f"{section}.family")
        if key in origins:
            sources[key] = origins[key]
        elif is_choice and section in groups:
            choice = composition.choices[section]
            by_default = choice == list_defaults()[section]
            chosen = DEFAULT if by_default else f"{section}={choice}"
            sources[key] = origins.get(section, chosen)
        elif key in added:
            sources[key] = "chosen for this machine"
        elif value != composed.get(key):
            sources[key] = f"resolved from {_text(composed.get(key))}"
        elif key in by_file and not (
            value == defaults.get(key)
            and by_file[key] == f"{section}={list_defaults()[section]}"
        ):
            sources[key] = by_file[key]
        else:
            sources[key] = DEFAULT if value == defaults.get(key, value) else "resolved"
    return sources


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _values_of_files(composition: Composition) -> dict[str, str]:
    """Map each key that a chosen file of a group sets to that choice; experiments win."""
    keys: dict[str, str] = {}
    for group, choice in composition.choices.items():
        names = [] if choice is None or choice.startswith(BASE) else [choice]
        own_keys: dict[str, str] = {}
        while names:
            name = names.pop()
            path = find_file(group, name)
            if not path.is_file():  # a class that own code has registered
                continue
            tree = parse_yaml(path.read_text(encoding="utf-8"))
            entries = tree.pop("defaults")
            prefix = "" if group == "experiment" else f"{group}."
            for key in flatten(tree, prefix):
                own_keys.setdefault(key, f"{group}={choice}")
            names += [
                entry
                for entry in entries
                if isinstance(entry, str) and not entry.startswith(("_", BASE))
            ]
        keys |= own_keys
    return keys


def without_equal(settings: Settings) -> list[str]:
    """Return the overrides without keys of files that have these values anyway.

    A search varies what the rest leaves open, and a file may list every key of a run. The overrides
    must name the training, since an experiment could set these keys otherwise.
    """
    groups = list_choices()
    few = [
        setting.word
        for setting in settings.settings
        if not setting.origin or setting.key in groups
    ]
    if len(few) == len(settings.settings):
        return settings.overrides
    full = flatten(compose_config(settings.overrides).to_dict())
    try:
        base = flatten(compose_config(few).to_dict())
    except ConfigError:  # such as a value that another one of the files allows
        return settings.overrides
    changed = [
        setting.word
        for setting in settings.settings
        if setting.origin
        and setting.key not in groups
        and full.get(setting.key) != base.get(setting.key)
    ]
    return [*few, *changed]


def differences(first: Config, second: Config) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two configurations differ, with both values; ``ABSENT`` for a key
    that one lacks."""
    values = flatten(first.to_dict())
    others = flatten(second.to_dict())
    return [
        (key, values.get(key, ABSENT), others.get(key, ABSENT))
        for key in dict.fromkeys([*values, *others])
        if values.get(key, ABSENT) != others.get(key, ABSENT)
    ]
