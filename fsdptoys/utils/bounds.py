"""Ranges of fields, declared in the field's metadata: ``field(default=4, metadata=at_least(1))``.

``check_bounds`` checks a section of the configuration, ``from_tree.build`` a file. Upper bounds of settings exceed any
real run, and exclude values that overflow an index, exhaust the memory or hang before the first message.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from fsdptoys.errors import ConfigError

MOST_STEPS = 10**12
"""Upper bound of step counts."""

MOST_SECONDS = 30 * 24 * 3600
"""Upper bound of a collective's timeout, which timers store as an integer."""

MOST_TOKENS = 2**30
"""Upper bound of the tokens of one sequence."""


class Bounds(NamedTuple):
    """Inclusive range of a field's numbers, and maximum length of its text, list or mapping."""

    least: float = -math.inf
    most: float = math.inf
    longest: float = math.inf


def at_least(least: float) -> dict[str, Bounds]:
    """Field metadata: each number is finite and at least ``least``."""
    return {"bounds": Bounds(least)}


def at_most(most: float) -> dict[str, Bounds]:
    """Field metadata: each number is finite and at most ``most``."""
    return {"bounds": Bounds(most=most)}


def between(least: float, most: float, longest: float = math.inf) -> dict[str, Bounds]:
    """Field metadata: each number is from ``least`` to ``most``; a list has at most ``longest`` numbers."""
    return {"bounds": Bounds(least, most, longest)}


def max_length(longest: int) -> dict[str, Bounds]:
    """Field metadata: at most ``longest`` printable characters, elements or keys."""
    return {"bounds": Bounds(longest=longest)}


def bounds_of(field: "dataclasses.Field[Any]") -> Bounds:
    """The bounds in a field's metadata."""
    found: Bounds = field.metadata.get("bounds", Bounds())
    return found


def check_bounds(section: str, config: Any) -> None:
    """Check a section of the configuration against the bounds of its fields; None passes."""
    for field in dataclasses.fields(config):
        bounds, value = bounds_of(field), getattr(config, field.name)
        if bounds.most < math.inf:
            check_at_most(section, config, **{field.name: bounds.most})
        if bounds.least > -math.inf and value is not None:
            check_at_least(f"{section}.{field.name}", value, bounds.least)


def check_at_most(section: str, config: object, **bounds: float) -> None:
    """Check numbers of a section against their upper bounds, by field; None passes."""
    for name, most in bounds.items():
        value = getattr(config, name)
        if value is not None and value > most:
            key = f"{section}.{name}"
            raise ConfigError(f"{key}={value} must be at most {most:.15g}; set {key} to that or less")


def check_at_least(key: str, value: float, least: float) -> None:
    """Check that a number is finite and not below its lower bound."""
    if not least <= value < math.inf:
        raise ConfigError(f"{key}={value} must be at least {least}; set {key}={least}")
