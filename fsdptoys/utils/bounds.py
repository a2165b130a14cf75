"""Checks of settings: ranges, declared as ``field(default=4, metadata=at_least(1))``, and valid
text and paths.

``check_bounds`` checks a section of the configuration, ``from_tree.build`` a file. Upper bounds of
settings exceed any real run, and exclude values that overflow an index, exhaust the memory or hang
before the first message.
"""

import dataclasses
import math
import os
from typing import Any, NamedTuple

from fsdptoys.errors import ConfigError

from .text import printable, value_text

MOST_STEPS = 10**12  # upper bound of step counts
MOST_SECONDS = 30 * 24 * 3600
"""Upper bound of a collective's timeout, which timers store as an integer."""
MOST_RANKS = 10**6  # upper bound of ranks, and of nodes
MOST_TOKENS = 2**30  # upper bound of the tokens of one sequence
# upper bounds from here on only guard against overflow; documentation omits them
GUARD = 2**16
FILE_BYTES = 200  # longest path of a file relative to its run directory, in bytes


class Bounds(NamedTuple):
    """Range of a field's finite numbers, and maximum length of its text, list or mapping."""

    least: float = -math.inf
    most: float = math.inf
    longest: float = math.inf
    above: bool = False  # exclude ``least`` itself
    below: bool = False  # exclude ``most`` itself
    other: float | None = None  # a valid value outside of the range

    def holds(self, value: float) -> bool:
        """Return whether a number is finite and within the range; False for nan."""
        low = value > self.least if self.above else self.least <= value
        high = value < self.most if self.below else value <= self.most
        return (low and high and -math.inf < value < math.inf) or value == self.other

    def __str__(self) -> str:
        low = (
            f"{'above' if self.above else 'at least'} {self.least}"
            if self.least > -math.inf
            else ""
        )
        high = (
            f"{'below' if self.below else 'at most'} {self.most}"
            if self.most < GUARD
            else ""
        )
        if low and high and not (self.above or self.below):
            low = f"between {self.least}"
            high = f"{self.most}"
        return " and ".join(filter(None, (low, high))) + (
            "" if self.other is None else f", or {self.other}"
        )


def at_least(
    least: float, most: float = math.inf, *, other: float | None = None
) -> dict[str, Bounds]:
    """Field metadata: each number is finite and at least ``least``, or ``other``."""
    return {"bounds": Bounds(least, most, other=other)}


def above(least: float, most: float = math.inf) -> dict[str, Bounds]:
    """Field metadata: each number is finite and above ``least``."""
    return {"bounds": Bounds(least, most, above=True)}


def open_between(least: float, most: float) -> dict[str, Bounds]:
    """Field metadata: each number is above ``least`` and below ``most``."""
    return {"bounds": Bounds(least, most, above=True, below=True)}


def between(
    least: float, most: float, longest: float = math.inf, *, below: bool = False
) -> dict[str, Bounds]:
    """Field metadata: each number is from ``least`` to ``most``; a list has at most ``longest``
    numbers."""
    return {"bounds": Bounds(least, most, longest, below=below)}


def max_length(longest: int) -> dict[str, Bounds]:
    """Field metadata: at most ``longest`` printable characters, elements or keys."""
    return {"bounds": Bounds(longest=longest)}


def bounds_of(field: "dataclasses.Field[Any]") -> Bounds:
    """Return the bounds in a field's metadata."""
    return Bounds(*field.metadata.get("bounds", ()))


def check_bounds(section: str, config: Any) -> None:
    """Check a section of the configuration against the bounds of its fields; None passes."""
    for field in dataclasses.fields(config):
        bounds = bounds_of(field)
        value = getattr(config, field.name)
        key = f"{section}.{field.name}"
        if "bounds" not in field.metadata or value is None or bounds.holds(value):
            continue
        if GUARD <= bounds.most < value < math.inf:
            most = (
                f"{bounds.most:.15g}" if isinstance(bounds.most, float) else bounds.most
            )
            raise ConfigError(
                f"{key}={value} must be at most {most}; set {key} to that or less"
            )
        is_count = isinstance(value, int) and value < bounds.least
        fix = value_text(bounds.least if is_count else field.default, quote=True)
        raise ConfigError(f"{key}={value} must be {bounds}; set {key}={fix}")


def check_text(key: str, text: str) -> None:
    """Check that text is valid UTF-8 without NUL characters; invalid bytes of the command line are
    surrogates in it."""
    setting = f"{key}={printable(text)}" if key else printable(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{setting} is not valid UTF-8, as a run's config.yaml is; use another name"
        ) from None
    if "\0" in text:
        raise ConfigError(
            f"{setting} holds a NUL character, which no path may have; leave it out"
        )


def check_home(key: str, path: str) -> None:
    """Check that a path's leading ``~`` or ``~user``, if any, can be expanded."""
    if path.startswith("~") and os.path.expanduser(path) == path:
        user = path.partition("/")[0]
        raise ConfigError(
            f"{key}={path} starts with {user}, whose home folder is not known; write the "
            "folder's path"
        )


def check_length(
    key: str, path: str | os.PathLike[str], directory: str | os.PathLike[str]
) -> None:
    """Check that the path of a directory leaves room for its files' names.

    Args:
        key: key of the setting with its value, for the message.
        path: absolute; need not exist.
        directory: the nearest existing parent.
    """
    longest_name = os.pathconf(directory, "PC_NAME_MAX")
    longest_path = os.pathconf(directory, "PC_PATH_MAX")
    encoded = os.fsencode(path)
    longest = max(map(len, encoded.split(b"/")))
    if longest > longest_name:
        raise ConfigError(
            f"{key} has a name of {longest} bytes, and the file system takes {longest_name} at "
            "most; use a shorter one"
        )
    most = longest_path - 1 - FILE_BYTES
    if len(encoded) > most:
        raise ConfigError(
            f"{key} is a path of {len(encoded)} bytes, and a run directory may have {most} at "
            "most; use a shorter one"
        )
