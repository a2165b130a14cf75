"""Check command line overrides before Hydra composes them, and report each mistake in one sentence with a fix.

Hydra's parser reads the overrides; the results are then checked against the choices of groups and the dataclasses of
the chosen ones. Hydra and OmegaConf would find most of these mistakes as well, but name neither the value nor the fix,
and they accept some (``+new.key=1``, ``cpu_offload=2``). Values with an interpolation (``${...}``) are type-checked by
OmegaConf when it resolves them.
"""

import contextlib
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import check_text
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.text import near_miss, value_text

CONFIGS = Path(__file__).parents[1] / "configs"

HELP = "see fsdptoys train --help for all keys"

SWITCHES = {
    **dict.fromkeys(["true", "yes", "y", "on", "1", "enable", "enabled"], "true"),
    **dict.fromkeys(["false", "no", "n", "off", "0", "disable", "disabled"], "false"),
}
"""Spellings of booleans → their value."""

SWITCHED_CHOICES = {"memory.gradient_checkpointing": {"true": "full", "false": "none"}}
"""Key with choices that also takes a boolean → boolean → its choice."""

SYNONYMS = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp16": "float16"}
SYNONYMS |= {"fp64": "float64"}
"""Common synonyms of choices, too different in spelling for a closest match → the choice."""

Choices = Mapping[str, Sequence[str]]  # group → names of its YAML files


class Option(NamedTuple):
    """A configuration key."""

    annotation: Any
    default: Any  # In its dataclass; ``dataclasses.MISSING`` if it has none


def list_choices() -> dict[str, list[str]]:
    """Map each group to the sorted names of its YAML files."""
    return {group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) for group in sorted(list_defaults())}


def schema_name(group: str, choice: str) -> str:
    """Name of the schema of a group's YAML file: ``llama`` if its defaults begin with ``base_llama``."""
    first = parse_yaml((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))["defaults"][0]
    return str(first).removeprefix("base_")


def list_defaults() -> dict[str, str | None]:
    """Map each group to its default choice, in the order of ``config.yaml``."""
    entries = parse_yaml((CONFIGS / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}


def parse_overrides(words: Sequence[str], choices: Choices) -> list[Override]:
    """Parse ``key=value`` overrides; ConfigError, with a fix among ``choices``, for other arguments."""
    return [_parse(word, words[index + 1 :], choices) for index, word in enumerate(words)]


def _parse(word: str, later: Sequence[str], choices: Choices) -> Override:
    check_text("", word)
    key, equals, value = word.partition("=")
    if word.startswith("-"):
        bare = word.lstrip("-")
        fix = f"write {bare}" if equals else HELP
        raise ConfigError(f"{word} is not an option, since settings have no dashes before them; {fix}")
    if word.startswith("~"):
        raise ConfigError(f"{word} would take a key away, which every run needs; write KEY=null or a value instead")
    if not equals:
        raise ConfigError(f"{word} has no value; write {_with_value(word, later, choices)}")
    if re.search(r"\s", key) or (not value and later and "=" not in later[0]):
        spaced = value.strip() or (later[0] if later else "VALUE")
        bare = (key.split() or ["KEY"])[-1]
        raise ConfigError(f"'{word}' has spaces before or after the = sign; write {bare}={spaced}")
    try:
        override = OverridesParser.create().parse_override(word)
    except ValueError as error:  # int() refuses more than a few thousand digits
        raise ConfigError(f"{key} has a number of {len(value)} digits; write {key}=VALUE with fewer") from error
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{word} cannot be read ({reason}); put quotes around the value: '{key}=\"...\"'") from error
    if override.is_sweep_override():
        raise ConfigError(f"{word} gives several values, a run takes one; write {key}={_first(value)}")
    if override.package is not None:
        raise ConfigError(
            f"{word} names a package, and every group has its fixed place; write {key.partition('@')[0]}={value}"
        )
    return override


def _with_value(word: str, later: Sequence[str], choices: Choices) -> str:
    if len(later) >= 2 and later[0] == "=":
        return f"{word}={later[1]} without spaces"
    return next((f"{group}={word}" for group, names in choices.items() if word in names), f"{word}=VALUE")


def _first(sweep: str) -> str:
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", sweep):
        return sweep.replace(",", "")  # thousands separators
    return re.split(r"[,)]", sweep.rpartition("(")[2])[0].strip() or "VALUE"


def check_groups(overrides: Sequence[Override], choices: Choices, defaults: Mapping[str, str | None]) -> None:
    """Check every ``group=choice``; ConfigError for an unknown choice, or a group with two different choices."""
    seen: dict[str, str] = {}
    for override in overrides:
        group = override.key_or_group
        if group not in choices:
            continue
        typed = str(override.input_line)
        _refuse_plus(override)
        if group in seen and seen[group] != typed:
            raise ConfigError(f"{seen[group]} and {typed} exclude each other; keep one of them")
        seen[group] = typed
        choice, names = override.value(), choices[group]
        if choice in names or (choice is None and group == "experiment"):
            continue
        near = near_miss(choice, names) if isinstance(choice, str) else None
        fix = f"did you mean {group}={near}?" if near else f"set {group}={value_text(defaults[group], quote=True)}"
        listed = "a preset that fsdptoys models lists" if group == "model" else _one_of(names)
        raise ConfigError(f"{typed} must be {listed}{' or null' if group == 'experiment' else ''}; {fix}")


def _refuse_plus(override: Override) -> None:
    typed = str(override.input_line)
    if override.type is not OverrideType.CHANGE:
        raise ConfigError(f"{typed} would add a key that exists already; write {typed.lstrip('+')}")


def check_values(
    overrides: Sequence[Override],
    sections: Mapping[str, type],
    roots: Mapping[str, Option],
    choices: Choices,
    chosen: Mapping[str, str | None],
    schemas: Mapping[str, Mapping[str, type]],
) -> None:
    """Check every key outside of groups, and the type of its value; ConfigError for the first mistake.

    Args:
        sections: section → chosen dataclass.
        roots: keys outside of any section.
        chosen: group → chosen YAML file.
        schemas: group → name of a schema → dataclass; an experiment has none, since it overrides other groups.
    """
    options = dict(roots)
    for section, schema in sections.items():
        options |= list_options(schema, section)
    for override in overrides:
        key = override.key_or_group
        if key in choices:
            continue
        typed = str(override.input_line)
        raw = typed.partition("=")[2]
        if key not in options:
            section = key.partition(".")[0]
            of_group = schemas.get(section, {})
            having = {name for name, schema in of_group.items() if key in list_options(schema, section)}
            if belongs := [name for name in choices.get(section, ()) if schema_name(section, name) in having]:
                raise ConfigError(
                    f"{typed} is not an option of {section}={chosen[section]}, it belongs to {', '.join(belongs)}; "
                    f"set {section}={belongs[0]} or leave it out"
                )
            raise ConfigError(_unknown_key(typed, key, raw, options, list(choices)))
        _refuse_plus(override)
        _check_value(key, raw, read_value(key, override.value()), options[key])


def read_value(key: str, value: Any) -> Any:
    """Return the choice that a boolean, or a spelling of one, means for ``key``; other values unchanged."""
    return SWITCHED_CHOICES.get(key, {}).get(SWITCHES.get(str(value).strip().lower(), ""), value)


def list_options(schema: type, prefix: str) -> dict[str, Option]:
    """All keys of a dataclass, including those of nested dataclasses."""
    hints = typing.get_type_hints(schema)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(schema):
        key, annotation = f"{prefix}.{field.name}", hints[field.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            options |= list_options(annotation, key)
        else:
            factory = field.default_factory
            options[key] = Option(annotation, field.default if factory is dataclasses.MISSING else factory())
    return options


def _unknown_key(typed: str, key: str, raw: str, options: Mapping[str, Option], groups: Sequence[str]) -> str:
    if key.partition(".")[0] == "hydra":
        return f"{typed} is Hydra's own setting, which every rank needs as it is; leave it out"
    if re.search(r"(^|\.)_\w+_$", key):
        return f"{typed} would run code that the configuration names, which is not supported; leave it out"
    if below := next((option for option in options if option.startswith(f"{key}.")), None):
        example = _example(below, options[below])
        return f"{typed} sets a whole section, but keys are set one by one; set for example {example}"
    near = _nearest_key(key, [*options, *groups])
    return f"{typed} names a key that does not exist; " + (f"did you mean {near}={raw}?" if near else HELP)


def _nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Closest key: one with the same last part, else a similar one in the same section, else anywhere."""
    section, _, last = key.rpartition(".")
    parts = {name: name.rpartition(".")[2] for name in known}
    if same := [name for name in known if parts[name] == last]:
        return near_miss(key, same, cutoff=0.0)
    in_section = [name for name in known if name.rpartition(".")[0] == section]
    for names in (in_section, known):
        if word := near_miss(last, [parts[name] for name in names], cutoff=0.7):
            return near_miss(key, [name for name in names if parts[name] == word], cutoff=0.0)
    return near_miss(key, known, cutoff=0.75)


def _check_value(key: str, raw: str, value: Any, option: Option) -> None:
    if isinstance(value, str) and "${" in value:
        return
    wanted, nullable = _without_none(option.annotation)
    if value is None and nullable:
        return
    if wanted is Any and isinstance(option.default, int):
        wanted = int | str  # declared as Any, since OmegaConf does not support this union
    expected, corrected = _mismatch(wanted, value, raw)
    if expected is None:
        return
    if wanted is bool and corrected is None:
        fix = f"set {key}=true or {key}=false"
    elif corrected is None:
        fix = f"set {_example(key, option)}"
    elif isinstance(wanted, type) and issubclass(wanted, Enum):
        fix = f"did you mean {key}={corrected}?"
    else:
        fix = f"set {key}={corrected}"
    raise ConfigError(f"{key}={raw} must be {expected}{' or null' if nullable else ''}; {fix}")


def _mismatch(wanted: Any, value: Any, raw: str) -> tuple[str | None, str | None]:
    """Return the expected kind of value (None if it matches) and a corrected value (None if there is no guess)."""
    word = str(value).strip().lower()
    if wanted is bool:
        return (None if isinstance(value, bool) else "true or false"), SWITCHES.get(word)
    if wanted in (int, float):
        if _is_item(value, wanted):
            return None, None
        meant = _number_meant(value)
        corrected = None if meant is None else str(round(meant) if wanted is int else meant)
        return "an integer" if wanted is int else "a finite number", corrected
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        names = [member.name for member in wanted]
        corrected = SYNONYMS[word] if SYNONYMS.get(word) in names else near_miss(word, names)
        return (None if value in names else _one_of(names)), corrected
    if typing.get_origin(wanted) is list:
        (kind,) = typing.get_args(wanted)
        if isinstance(value, list) and all(_is_item(item, kind) for item in value):
            return None, None
        corrected = f"[{raw}]" if _is_item(value, kind) else None
        return {int: "a list of integers", float: "a list of finite numbers"}.get(kind, "a list"), corrected
    if wanted == int | str:  # the dataclass checks the words themselves
        return (None if isinstance(value, str) or type(value) is int else "an integer or a word"), None
    if wanted is Any:  # one word, or several
        words = value if isinstance(value, list) else [value]
        return (None if all(isinstance(word, str) for word in words) else "a word or a list of words"), None
    assert wanted is str, f"no option may have the type {wanted}"
    return (None if isinstance(value, (str, int, float)) else "text"), None


def _number_meant(value: Any) -> int | float | None:
    """The finite number most likely meant by quoted text, another base or another numeric type; None if unclear."""
    for read in (functools.partial(int, base=0), int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return _number_meant(read(value.strip()))
    return value if _is_item(value, float) else None


def _is_item(value: Any, kind: type) -> bool:
    if kind is float:
        with contextlib.suppress(OverflowError):  # integers too large for a float
            return type(value) in (int, float) and math.isfinite(value)
        return False
    return type(value) is int if kind is int else isinstance(value, (str, int, float))


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (wanted,) = (part for part in typing.get_args(annotation) if part is not type(None))
        return wanted, True
    return annotation, False


def _example(key: str, option: Option) -> str:
    return f"{key}={'VALUE' if option.default is dataclasses.MISSING else value_text(option.default, quote=True)}"


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
