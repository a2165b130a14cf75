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
from fsdptoys.register import KINDS
from fsdptoys.utils.bounds import check_text
from fsdptoys.utils.text import near_miss, one_line, value_text

from .choices import BASE, Choices, explain_file, list_choices, list_defaults
from .familiar_names import find_familiar
from .fixes import Fix, all_options, find_fix
from .option_values import SWITCHES, Option, example, mismatch, one_of, read_value

HELP = "see fsdptoys train --help for all keys"


class SeveralValuesError(ConfigError):
    """An override for a sweep where a run takes one value."""

    def __init__(self, message: str, word: str = "", corrected: str = "") -> None:
        super().__init__(message)
        self.word = word
        self.corrected = corrected  # The word with the right key


def check_names(arguments: Sequence[str]) -> None:
    """Name all arguments that are no settings in one ConfigError, with a fix, if there are
    several.

    ``parse_overrides`` and ``check_values`` answer a single one, with a longer sentence.
    """
    options, _ = all_options(())
    groups = list_choices()
    fix_by_word: dict[str, Fix | None] = {}
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.partition("=")
        argument = word
        if (
            word.startswith("-")
            and not equals
            and queue
            and not re.search("^-|=", queue[0])
        ):
            value = queue.pop(0)
            argument = f"{word} {value}"
        is_unknown = (
            bool(equals) and key not in options and re.fullmatch(r"[A-Za-z]\w+", key)
        )
        if (word.startswith("-") or is_unknown) and key not in groups:
            fix_by_word[argument] = find_fix(
                key.lstrip("-"), value if argument != key else None, {}
            )
    if len(fix_by_word) < 2:
        return
    fixes = [fix for fix in fix_by_word.values() if fix is not None]
    write = " ".join(
        fix.overrides.removesuffix(", for example") for fix in fixes if fix.overrides
    )
    clauses = [f"write {write}"] if write else []
    clauses += dict.fromkeys(fix.reason for fix in fixes if fix.reason)
    if unknown := [argument for argument, fix in fix_by_word.items() if fix is None]:
        clauses.append(f"leave out {' '.join(unknown)}" if fixes else HELP)
    raise ConfigError(
        f"{', '.join(fix_by_word)} are not settings; {', and '.join(clauses)}"
    )


def parse_overrides(overrides: Sequence[str], choices: Choices) -> list[Override]:
    """Parse ``key=value`` overrides; ConfigError, with a fix, for other arguments."""
    values = {
        override.partition("=")[0]: override.partition("=")[2] for override in overrides
    }
    chosen = {
        group: values[group]
        for group, names in choices.items()
        if values.get(group) in names
    }
    return [
        _parse(override, overrides[index + 1 :], chosen)
        for index, override in enumerate(overrides)
    ]


def _parse(
    word: str, later: Sequence[str], chosen: Mapping[str, str | None]
) -> Override:
    check_text("", word)
    key, equals, value = word.partition("=")

    def suggest(value: str | None) -> str:
        fix = find_fix(key, value, chosen) if key else None
        return (
            fix.overrides
            if fix and fix.overrides
            else f"{key or 'KEY'}={value or 'VALUE'}"
        )

    if word.startswith("-"):
        raise ConfigError(without_dashes(word, later, chosen))
    has_blanks = later[:1] == ["="] or re.search(r"\s", key) is not None
    if has_blanks or (equals and not value and later and "=" not in later[0]):
        key = (key.split() or [""])[-1]
        value = value.strip() or next(
            (text for text in later[:2] if text != "="), "VALUE"
        )
        raise ConfigError(
            f"'{word}' has spaces before or after the = sign; write {suggest(value)}"
        )
    if word.startswith("~"):
        raise ConfigError(
            f"{word} would take a key away, which every run needs; write KEY=null or a value "
            "instead"
        )
    if not equals:
        if file := explain_file(word):
            raise ConfigError(f"{word} is a file and no setting; {file}")
        raise ConfigError(f"{word} has no value; write {suggest(None)}")
    try:
        override = OverridesParser.create().parse_override(word)
    except (HydraException, ValueError) as error:  # ValueError: thousands of digits
        reason = one_line(str(error).splitlines()[0])
        raise ConfigError(
            f"{one_line(word)} cannot be read ({reason}); put quotes around the value: "
            f"'{key}=\"...\"'"
        ) from error
    if override.is_sweep_override():
        first = re.split(r"[,)]", value.rpartition("(")[2])[0].strip()
        if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", value):
            first = value.replace(",", "")  # thousands separators
        raise SeveralValuesError(
            f"{word} gives several values, a run takes one; write {suggest(first or 'VALUE')}",
            word,
            suggest(value),
        )
    if override.package is not None:
        raise ConfigError(
            f"{word} names a package, and every group has its fixed place; write "
            f"{key.partition('@')[0]}={value}"
        )
    return override


def without_dashes(
    word: str, later: Sequence[str], chosen: Mapping[str, str | None], command: str = ""
) -> str:
    """The sentence on a flag, with the override to type; ``later`` may begin with its value."""
    key, equals, value = word.partition("=")
    follows = later[0] if later and not re.search("^-|=", later[0]) else None
    if file := explain_file(value or follows or "", command=command):
        return f"{key} {value or follows} is not an option; {file}"
    fix = find_fix(key.lstrip("-"), value if equals else follows, chosen)
    clause = fix.clause("write", command) if fix is not None else HELP
    return (
        f"{word} is not an option, since settings have no dashes before them; {clause}"
    )


def check_groups(overrides: Sequence[Override]) -> None:
    """Check every ``group=choice``; ConfigError for an unknown choice."""
    choices = list_choices()
    for override in overrides:
        group = override.key_or_group
        if group not in choices:
            continue
        _refuse_sign(override)
        argument = str(override.input_line)
        choice = override.value()
        names = choices[group]
        if choice in names or (choice is None and group == "experiment"):
            continue
        if str(choice).startswith(BASE) and _is_schema(group, str(choice)):
            continue
        word = str(choice).lower()
        if file := explain_file(str(choice), group):
            raise ConfigError(
                f"{argument} must be a name, without a path or an ending; {file}"
            )
        familiar = find_familiar(group, word) or find_familiar(
            group, SWITCHES.get(word, word)
        )
        if familiar is not None:
            fix = Fix(familiar[0].replace("*", word), familiar[1]).clause("write")
        elif near := near_miss(word, names):
            fix = f"did you mean {group}={near}?"
        else:
            fix = f"set {group}={value_text(list_defaults()[group], quote=True)}"
            registers = group in {kind.group for kind in KINDS.values()}
            if registers and isinstance(choice, str) and choice.isidentifier():
                fix += f", or add the --import of the code that registers {word}"
        listed = (
            "a preset that fsdptoys models lists" if group == "model" else one_of(names)
        )
        or_null = " or null" if group == "experiment" else ""
        raise ConfigError(f"{argument} must be {listed}{or_null}; {fix}")


def _is_schema(group: str, choice: str) -> bool:
    """Return whether a choice is a schema itself, as of a recorded model without a preset."""
    from .schema import SCHEMAS

    return choice.removeprefix(BASE) in SCHEMAS.get(group, {})


def _refuse_sign(override: Override) -> None:
    """Refuse ``+key`` and ``~key``, by which Hydra adds and takes away keys."""
    if override.type is not OverrideType.CHANGE:
        argument = str(override.input_line)
        raise ConfigError(
            f"{argument} would add or take away a key, and every run has the same; write "
            f"{override.key_or_group}={argument.partition('=')[2]}"
        )


def check_values(
    overrides: Sequence[Override], chosen: Mapping[str, str | None]
) -> None:
    """Check every key outside of groups, and the type of its value; ConfigError for the first
    mistake.

    Args:
        overrides: the parsed ones.
        chosen: group → chosen YAML file.
    """
    options, needed = all_options(tuple(chosen.items()))
    for override in overrides:
        key = override.key_or_group
        argument = str(override.input_line)
        raw = argument.partition("=")[2]
        if key in chosen:
            continue
        if key in needed:
            section = key.partition(".")[0]
            raise UnusedKeyError(
                f"{argument} is not an option of {section}={chosen[section]}; set "
                f"{needed[key].strip()} or leave it out"
            )
        if key not in options:
            if key.partition(".")[0] == "hydra":
                raise ConfigError(
                    f"{argument} is Hydra's own setting, which every rank needs as it is; leave "
                    "it out"
                )
            if re.search(r"(^|\.)_\w+_$", key):
                raise ConfigError(
                    f"{argument} would run code that the configuration names, which is not "
                    "supported; leave it out"
                )
            fix = find_fix(key, raw, chosen)
            clause = fix.clause("did you mean") if fix is not None else HELP
            raise ConfigError(f"{argument} names a key that does not exist; {clause}")
        _refuse_sign(override)
        _check_value(key, raw, read_value(key, override.value()), options[key])


def _check_value(key: str, raw: str, value: Any, option: Option) -> None:
    if isinstance(value, str) and "${" in value:
        return
    expected, corrected = mismatch(option, value, raw)
    if expected is None:
        return
    state = SWITCHES.get(str(value).lower(), "")
    familiar = find_familiar(key, state) if corrected is None else None
    if familiar is not None:
        fix = f"set {familiar[0]}"
    elif corrected is None:
        fix = f"set {example(key, option, state)}"
    elif isinstance(option.base_type, type) and issubclass(option.base_type, Enum):
        fix = f"did you mean {key}={corrected}?"
    else:
        fix = f"set {key}={corrected}"
    raise ConfigError(
        f"{key}={raw} must be {expected}{' or null' if option.nullable else ''}; {fix}"
    )
