"""Upper bounds of the numbers in a configuration, each declared by the class that has the field.

A bound is generous: it lies beyond any real run and below the values that overflow an index, fill the memory or keep
the machine busy before the first message.
"""

import math

from fsdptoys.errors import ConfigError

MOST_STEPS = 10**12
"""Bound of everything that counts optimizer steps."""

MOST_SECONDS = 30 * 24 * 3600
"""Bound of a collective's time: longer than any, and no more than the integers of timers hold."""

MOST_TOKENS = 2**30
"""Bound of everything that counts the tokens of one sequence."""


def check_at_most(section: str, config: object, **bounds: float) -> None:
    """Check numbers of a section against their upper bounds.

    Args:
        section: first part of the keys.
        config: has the fields; a field that is None passes.
        bounds: field → largest value that it may have.

    Raises:
        ConfigError: for the first value over its bound.
    """
    for name, most in bounds.items():
        value = getattr(config, name)
        if value is not None and value > most:
            key = f"{section}.{name}"
            raise ConfigError(f"{key}={value} must be at most {most:.15g}; set {key} to that or less")


def check_at_least(key: str, value: float, least: float) -> None:
    """Check a number against its lower bound.

    Raises:
        ConfigError: if it is below, infinite or nan.
    """
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value} must be at least {least}; set {key}={least}")
