"""Options with dashes, which commands beside ``train`` have; settings of a run have none."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .errors import ConfigError


def take_options(
    words: Sequence[str], flags: Sequence[str] = (), values: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], dict[str, str]]:
    """Take dashed options out of the words; an unknown one stays, and is refused as every setting with dashes is.

    Args:
        words: as typed.
        flags: options without a value.
        values: options with one, ``--out FILE`` or ``--out=FILE`` → what it is called, ``FILE``.

    Returns:
        The other words, and option → value, which is empty for a flag.

    Raises:
        ConfigError: for an option without its value, or with another option in its place.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word in flags:
            options[word] = ""
        elif name in values:
            if not equals:
                value = queue.pop(0) if queue else ""
            if not value or value.startswith("--"):
                raise ConfigError(f"{name} has no value; write {name} {values[name]}")
            options[name] = value
        else:
            rest.append(word)
    return rest, options


def take_repeated(words: Sequence[str], option: str, meaning: str) -> tuple[list[str], list[str]]:
    """Take an option that may be given several times out of the words.

    Args:
        words: as typed.
        option: with its dashes.
        meaning: what its value is called.

    Returns:
        The other words, and the option's values in their order.

    Raises:
        ConfigError: for an option without its value.
    """
    rest: list[str] = []
    values: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
        elif word == option:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(
                    f"{option} has no value; write {option} {meaning}, or {option}=--x for one with dashes"
                )
            values.append(queue.pop(0))
        else:
            rest.append(word)
    return rest, values


def refuse_unknown(command: str, words: Sequence[str], options: Sequence[str]) -> None:
    """Refuse dashed words that are no options, and settings, which are of other commands.

    Raises:
        ConfigError: with the option that was probably meant.
    """
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            near = near_miss(name, options)
            if near == name:  # a flag with a value
                raise ConfigError(f"{word} gives a value to {name}, which takes none; write {name}")
            fix = f"did you mean {near}?" if near else f"see fsdptoys {command} --help"
            raise ConfigError(f"{word} is not an option of fsdptoys {command}; {fix}")
        if equals and f"--{name}" in options:
            raise ConfigError(f"{word} lacks its dashes; write --{name} {value}")


def read_number(
    options: Mapping[str, str],
    option: str,
    default: float,
    *,
    least: float,
    most: float = math.inf,
    above: bool = False,
) -> float:
    """The number that an option gives.

    Args:
        options: as typed.
        option: which.
        default: where it was not typed.
        least: that it must be.
        most: that it may be.
        above: whether it must be more than ``least``.

    Raises:
        ConfigError: if it is none, or another.
    """
    typed = options.get(option)
    if typed is None:
        return default
    try:
        number = float(typed)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most) or (above and number == least):
        bounds = f"{'above' if above else 'of at least'} {least:g}" + (
            f" and at most {most:g}" if most < math.inf else ""
        )
        raise ConfigError(f"{option} {typed} must be a number {bounds}; write {option} {default:g}")
    return number


def read_integer(options: Mapping[str, str], option: str, default: int, *, least: int) -> int:
    """The whole number that an option gives.

    Raises:
        ConfigError: if it is none, or less than it must be.
    """
    typed = options.get(option)
    if typed is None:
        return default
    if not re.fullmatch(r"-?\d{1,18}", typed) or int(typed) < least:
        fix = f"write {option} {max(default, least)}"
        raise ConfigError(f"{option} {typed} must be a whole number of at least {least}; {fix}")
    return int(typed)


def near_miss(word: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The name that the word was most likely meant to be; ``cutoff`` is the least likeness, 0 to 1."""
    matches = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return matches[0] if matches else None
