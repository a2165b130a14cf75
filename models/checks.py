"""Checks of model settings; each error names key, value and fix."""

import math

MOST_LAYERS = 10_000
"""Blocks are built one by one, even on the meta device."""

MOST_CHANNELS = 2**20
"""Bound of the width and the number of heads."""

MOST_HIDDEN = 2**22
"""Bound of a feed-forward's width; within these bounds a weight's bytes fit an index."""

MOST_EXPERTS = 2**16

MOST_TOKENS = 2**30
"""Bound of settings in tokens of one sequence."""


def check_at_least_one(config: object, *names: str) -> None:
    """Refuse counts below 1.

    Raises:
        ValueError: for the first field below 1.
    """
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"model.{name}={getattr(config, name)} must be at least 1; set model.{name}=1")


def check_at_most(config: object, prefix: str = "", **bounds: float) -> None:
    """Check numbers against upper bounds, beyond which building the model would take minutes or overflow.

    Args:
        config: has the fields; None passes.
        prefix: of the keys, within ``model``.
        bounds: field → largest value.

    Raises:
        ValueError: for the first value over its bound.
    """
    for name, most in bounds.items():
        value = getattr(config, name)
        if value is not None and value > most:
            key = f"model.{prefix}{name}"
            raise ValueError(f"{key}={value} must be at most {most:.15g}; set {key} to that or less")


def check_positive(*checks: tuple[str, float, float]) -> None:
    """Refuse numbers that are not finite and above 0.

    Args:
        checks: key, value, and a valid value.

    Raises:
        ValueError: for the first such number.
    """
    for name, value, fix in checks:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"model.{name}={value} must be a finite number above 0; set model.{name}={fix}")
