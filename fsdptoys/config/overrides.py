"""Check command line overrides before Hydra composes them, and report each mistake in one sentence
with a fix.

Hydra's parser reads the overrides; the results are then checked against the choices of groups and
the dataclasses of the chosen ones. Hydra and OmegaConf would find most of these mistakes as well,
but name neither the value nor the fix, and they accept some (``+new.key=1``, ``cpu_offload=2``).
Values with an interpolation (``${...}``) are type-checked by OmegaConf when it resolves them.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.utils.bounds import check_text
from fsdptoys.utils.text import near_miss, value_text

from .choices import Choices, explain_file, schema_name
from .familiar_names import find_familiar
from .fixes import Fix, all_options, find_fix, list_options
from .option_values import SWITCHES, Option, example, mismatch, one_of, read_value

HELP = "see fsdptoys train --help for all keys"


class SeveralValuesError(ConfigError):
    """An override for a sweep where a run takes one value."""

    def __init__(self, message: str, word: str = "", corrected: str = "") -> None:
        super().__init__(message)
        self.word = word
        self.corrected = corrected  # The word with the right key


def check_names(words: Sequence[str], choices: Choices) -> None:
    """Name all words that are no settings in one ConfigError, with the words to type, if there are
    several.

    ``parse_overrides`` and ``check_values`` answer a single one, with a longer sentence.
    """
    options, _ = all_options(())
    found: list[tuple[str, Fix | None]] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.partition("=")
        typed = word
        if word.startswith("-") and not equals and queue and not re.search("^-|=", queue[0]):
            value = queue.pop(0)
            typed, equals = f"{word} {value}", "="
        elif not word.startswith("-") and (
            not equals or key in options or not re.fullmatch(r"[A-Za-z]\w+", key)
        ):
            continue  # known, or a mistake of another kind
        if key not in choices:
            found.append((typed, find_fix(key.lstrip("-"), value if equals else None, choices, {})))
    if len(found) < 2:
        return
    fixes = [fix for _, fix in found if fix is not None]
    reasons = dict.fromkeys(fix.reason for fix in fixes if fix.reason)
    write = " ".join(fix.words.removesuffix(", for example") for fix in fixes if fix.words)
    clauses = (
        [f"write {write}" + (f" ({'; '.join(reasons)})" if reasons else "")]
        if write
        else [*reasons]
    )
    unknown = [typed for typed, fix in found if fix is None]
    clauses += [f"leave out {listed(unknown)}" if fixes else HELP] if unknown else []
    raise ConfigError(
        f"{listed([typed for typed, _ in found])} are not settings; {', and '.join(clauses)}"
    )


def listed(names: Sequence[str]) -> str:
    """The names, for a sentence: a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def parse_overrides(words: Sequence[str], choices: Choices) -> list[Override]:
    """Parse ``key=value`` overrides; ConfigError, with a fix among ``choices``, for other
    arguments."""
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    chosen = {group: typed[group] for group, names in choices.items() if typed.get(group) in names}
    return [_parse(word, words[index + 1 :], choices, chosen) for index, word in enumerate(words)]


def _parse(
    word: str, later: Sequence[str], choices: Choices, chosen: Mapping[str, str | None]
) -> Override:
    check_text("", word)
    key, equals, value = word.partition("=")

    def meant(value: str | None) -> str:
        found = find_fix(key, value, choices, chosen) if key.strip() else None
        return (
            found.words
            if found is not None and found.words
            else f"{key.strip() or 'KEY'}={value or 'VALUE'}"
        )

    if word.startswith("-"):
        raise ConfigError(without_dashes(word, later, choices, chosen))
    if word.startswith("~"):
        raise ConfigError(
            f"{word} would take a key away, which every run needs; write KEY=null or a value "
            "instead"
        )
    if not equals:
        if file := explain_file(word):
            raise ConfigError(f"{word} is a file and no setting; {file}")
        spaced = len(later) >= 2 and later[0] == "="
        fix = f"{meant(later[1])} without spaces" if spaced else meant(None)
        raise ConfigError(f"{word} has no value; write {fix}")
    if re.search(r"\s", key) or (not value and later and "=" not in later[0]):
        key, value = (key.split() or [""])[-1], value.strip() or (later[0] if later else "VALUE")
        raise ConfigError(f"'{word}' has spaces before or after the = sign; write {meant(value)}")
    try:
        override = OverridesParser.create().parse_override(word)
    except ValueError as error:  # int() refuses more than a few thousand digits
        raise ConfigError(
            f"{key} has a number of {len(value)} digits; write {key}=VALUE with fewer"
        ) from error
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{word} cannot be read ({reason}); put quotes around the value: '{key}=\"...\"'"
        ) from error
    if override.is_sweep_override():
        raise SeveralValuesError(
            f"{word} gives several values, a run takes one; write {meant(_first(value))}",
            word,
            meant(value),
        )
    if override.package is not None:
        raise ConfigError(
            f"{word} names a package, and every group has its fixed place; write "
            f"{key.partition('@')[0]}={value}"
        )
    return override


def without_dashes(
    word: str,
    later: Sequence[str],
    choices: Choices,
    chosen: Mapping[str, str | None],
    command: str = "",
) -> str:
    """The sentence on a flag, with the words to type; ``later`` may begin with its value."""
    key, equals, value = word.partition("=")
    follows = later[0] if later and not re.search("^-|=", later[0]) else None
    found = find_fix(key.lstrip("-"), value if equals else follows, choices, chosen)
    if file := explain_file(value or follows or "", command=command):
        return (
            f"{key} {value or follows} is not an option, since a run is composed from named "
            f"files; {file}"
        )
    clause = found.clause("write", command) if found is not None else HELP
    return f"{word} is not an option, since settings have no dashes before them; {clause}"


def _first(sweep: str) -> str:
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", sweep):
        return sweep.replace(",", "")  # thousands separators
    return re.split(r"[,)]", sweep.rpartition("(")[2])[0].strip() or "VALUE"


def check_groups(
    overrides: Sequence[Override], choices: Choices, defaults: Mapping[str, str | None]
) -> None:
    """Check every ``group=choice``; ConfigError for an unknown choice."""
    for override in overrides:
        group = override.key_or_group
        if group not in choices:
            continue
        typed = str(override.input_line)
        _refuse_plus(override)
        choice, names = override.value(), choices[group]
        if choice in names or (choice is None and group == "experiment"):
            continue
        if isinstance(choice, str) and (file := explain_file(choice, group)):
            raise ConfigError(f"{typed} must be a name, without a path or an ending; {file}")
        near = near_miss(choice.lower(), names) if isinstance(choice, str) else None
        fix = (
            f"did you mean {group}={near}?"
            if near
            else f"set {group}={value_text(defaults[group], quote=True)}"
        )
        word = str(choice).lower()
        if meant := find_familiar(group, word) or find_familiar(group, SWITCHES.get(word, word)):
            fix = Fix(meant[0].replace("*", word), meant[1]).clause("write")
        listed = "a preset that fsdptoys models lists" if group == "model" else one_of(names)
        raise ConfigError(
            f"{typed} must be {listed}{' or null' if group == 'experiment' else ''}; {fix}"
        )


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
    """Check every key outside of groups, and the type of its value; ConfigError for the first
    mistake.

    Args:
        sections: section → chosen dataclass.
        roots: keys outside of any section.
        chosen: group → chosen YAML file.
        schemas: group → name of a schema → dataclass; an experiment has none, since it overrides
            other groups.
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
            having = {
                name for name, schema in of_group.items() if key in list_options(schema, section)
            }
            if belongs := [
                name for name in choices.get(section, ()) if schema_name(section, name) in having
            ]:
                raise UnusedKeyError(
                    f"{typed} is not an option of {section}={chosen[section]}, it belongs to "
                    f"{', '.join(belongs)}; set {section}={belongs[0]} or leave it out"
                )
            raise ConfigError(_unknown_key(typed, key, raw, choices, chosen))
        _refuse_plus(override)
        _check_value(key, raw, read_value(key, override.value()), options[key])


def _unknown_key(
    typed: str, key: str, raw: str, choices: Choices, chosen: Mapping[str, str | None]
) -> str:
    if key.partition(".")[0] == "hydra":
        return f"{typed} is Hydra's own setting, which every rank needs as it is; leave it out"
    if re.search(r"(^|\.)_\w+_$", key):
        return (
            f"{typed} would run code that the configuration names, which is not supported; leave "
            "it out"
        )
    fix = find_fix(key, raw, choices, chosen)
    if fix is not None and fix.sets_part:
        return (
            f"{typed} sets a whole section, but keys are set one by one; set for example "
            f"{fix.words}"
        )
    return (
        f"{typed} names a key that does not exist; "
        f"{fix.clause('did you mean') if fix is not None else HELP}"
    )


def _check_value(key: str, raw: str, value: Any, option: Option) -> None:
    if isinstance(value, str) and "${" in value:
        return
    expected, corrected = mismatch(option, value, raw)
    if expected is None:
        return
    state = SWITCHES.get(str(value).lower(), "")
    if option.wanted is bool and corrected is None:
        fix = f"set {key}=true or {key}=false"
    elif corrected is None:
        found = find_familiar(key, state)
        fix = f"set {found[0] if found is not None else example(key, option, state)}"
    elif isinstance(option.wanted, type) and issubclass(option.wanted, Enum):
        fix = f"did you mean {key}={corrected}?"
    else:
        fix = f"set {key}={corrected}"
    raise ConfigError(
        f"{key}={raw} must be {expected}{' or null' if option.nullable else ''}; {fix}"
    )
