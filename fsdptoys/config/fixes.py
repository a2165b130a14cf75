"""Overrides to type in place of a name that is no setting: a familiar name of another framework, a
key without its section, or a misspelled one."""

import contextlib
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fsdptoys.register import live_cache, registered
from fsdptoys.utils.bounds import bounds_of
from fsdptoys.utils.options import default_of
from fsdptoys.utils.text import near_miss

from .choices import (
    built_in_names,
    list_choices,
    list_defaults,
    own_schemas,
    schema_name,
)
from .familiar_names import find_familiar
from .option_values import SWITCHES, Option, example, mismatch, read_value


class Fix(NamedTuple):
    """Overrides in place of a name that is no key."""

    overrides: str
    reason: str = ""  # why they do not mean the same
    verb: str = ""  # "" for that of the caller

    def clause(self, verb: str, command: str = "") -> str:
        """The end of the sentence; ``command`` comes before the overrides."""
        if not self.overrides:
            return f"{self.reason}, leave it out"
        verb = self.verb or verb
        return (
            f"{self.reason}{', ' * bool(self.reason)}{verb} "
            f"{command}{self.overrides}{'?' * (verb == 'did you mean')}"
        )


def find_fix(
    name: str, raw: str | None, chosen: Mapping[str, str | None]
) -> Fix | None:
    """Return the overrides that an unknown name stands for; None if nothing is close.

    Args:
        name: a familiar name of another framework, a key without its section, a misspelled key, a
            section or a choice.
        raw: its value; None if none was typed.
        chosen: group → chosen YAML file, if not the default.
    """
    choices = list_choices()
    options, needed = all_options(tuple(chosen.items()))
    name = name.lower().replace("-", "_")
    state = "true" if raw is None else SWITCHES.get(raw.strip("'\"").lower(), raw)

    def assign(key: str) -> str:
        return (
            _assign(key, raw, state, options[key])
            if key in options
            else _choose(key, raw, choices[key])
        )

    familiar = find_familiar(name, state)
    if familiar is None and name not in options:
        familiar = find_familiar(name.rpartition(".")[2], state)
    if familiar is not None:
        overrides, reason = familiar
        if reason and (state == "false" or not overrides):
            return Fix("", reason)
        key, star, rest = overrides.partition("=*")
        if star and (key in options or key in choices):
            overrides = assign(key)
            overrides += rest.replace("*", overrides.partition("=")[2])
        overrides = overrides.replace("*", (raw or "VALUE").strip("[]"))
        return Fix(
            needed.get(overrides.partition("=")[0], "") + overrides, reason, "write"
        )
    below = next((key for key in options if key.startswith(f"{name}.")), None)
    is_key = any(key.rpartition(".")[2] == name for key in options)
    if name not in choices and below is not None and not is_key:
        is_flag = options[below].annotation is bool
        return Fix(assign(below) if is_flag else example(below, options[below]))
    candidates = [*(key for key in options if key not in needed), *choices]
    for keys in (candidates, list(options)):
        if same := [
            key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2]
        ]:
            key = str(near_miss(name, same, cutoff=0.0))
            return Fix(needed.get(key, "") + assign(key))
    group = next((group for group, names in choices.items() if name in names), None)
    if state == "true" and group is not None:
        return Fix(f"{group}={name}")
    near = _nearest_key(name, candidates)
    return None if near is None else Fix(assign(near), verb="did you mean")


def list_options(schema: type, prefix: str) -> dict[str, Option]:
    """All keys of a dataclass, including those of nested dataclasses."""
    hints = typing.get_type_hints(schema)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(schema):
        key = f"{prefix}.{field.name}"
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            options |= list_options(annotation, key)
        else:
            options[key] = Option(annotation, default_of(field), bounds_of(field))
    return options


def all_options(
    chosen: tuple[tuple[str, str | None], ...],
) -> tuple[dict[str, Option], dict[str, str]]:
    """Return all keys of all choices, and key → the words before it that choose what has it, unless
    chosen already."""
    return _all_options(chosen, tuple(own_schemas().items()))


@live_cache
def _all_options(
    chosen: tuple[tuple[str, str | None], ...],
    own: tuple[tuple[tuple[str, str], str], ...],
) -> tuple[dict[str, Option], dict[str, str]]:
    from .named_lists import named_schemas
    from .schema import (  # imports torch, which help does without
        ROOT_OPTIONS,
        SCHEMAS,
        Config,
    )

    options = dict(ROOT_OPTIONS)
    needed = dict[str, str]()
    schemas = dict(own)
    first_choices = list_defaults() | dict(chosen)
    for section, kind in typing.get_type_hints(Config).items():
        if section in SCHEMAS:
            first = str(first_choices[section])
            names = sorted(
                {
                    *built_in_names(section),
                    *registered(section),
                    *(name for group, name in schemas if group == section),
                }
            )
            for choice in (first, *names):
                kind_name = schemas.get((section, choice))
                kind_name = kind_name or schema_name(section, choice)
                of_choice = list_options(SCHEMAS[section][kind_name], section)
                new = [key for key in of_choice if key not in options]
                options |= {key: of_choice[key] for key in new}
                needed |= {
                    key: f"{section}={choice} " for key in new if choice != first
                }
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
            options |= list_options(kind, section)
    for prefix, named_schema in named_schemas().items():
        options |= list_options(named_schema, prefix)
    return options, needed


def _assign(key: str, raw: str | None, state: str, option: Option) -> str:
    """``key=value`` with the typed value where it is valid, else a corrected one."""
    if familiar := find_familiar(key, state):
        return familiar[0]
    if raw is None:
        override_text = example(key, option, "true")
        is_enum = isinstance(option.default, Enum)
        return (
            override_text
            if option.base_type is bool or is_enum
            else f"{override_text}, for example"
        )
    override = None
    with contextlib.suppress(HydraException, ValueError):
        override = OverridesParser.create().parse_override(f"{key}={raw}")
    if override is None or override.is_sweep_override():
        return f"{key}={raw}"
    expected, corrected = mismatch(option, read_value(key, override.value()), raw)
    if expected is None:
        return f"{key}={raw}"
    return (
        f"{key}={corrected}" if corrected is not None else example(key, option, state)
    )


def _choose(group: str, raw: str | None, names: Sequence[str]) -> str:
    if raw is not None and (raw in names or "," in raw):
        return f"{group}={raw}"
    return (
        f"{group}={near_miss(raw or '', names) or list_defaults()[group] or names[0]}"
    )


def _nearest_key(key: str, candidates: Sequence[str]) -> str | None:
    """Closest key: one with a similar last part in the same section, else anywhere."""
    section, _, last = key.rpartition(".")
    parts = {name: name.rpartition(".")[2] for name in candidates}
    in_section = [name for name in candidates if name.rpartition(".")[0] == section]
    for names in (in_section, candidates):
        if word := near_miss(last, [parts[name] for name in names], cutoff=0.7):
            return near_miss(
                key, [name for name in names if parts[name] == word], cutoff=0.0
            )
    return near_miss(key, candidates, cutoff=0.75)
