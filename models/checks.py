"""Checks of values that a user sets, each with the one sentence that names key, value and fix."""

import math


def check_at_least_one(config: object, *names: str) -> None:
    """Refuse counts below 1.

    Raises:
        ValueError: for the first of the fields that is.
    """
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"model.{name}={getattr(config, name)} must be at least 1; set model.{name}=1")


def check_positive(*checks: tuple[str, float, float]) -> None:
    """Refuse numbers that are not finite and above 0.

    Args:
        checks: key, value, and what to set it to.

    Raises:
        ValueError: for the first of them.
    """
    for name, value, fix in checks:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"model.{name}={value} must be a finite number above 0; set model.{name}={fix}")
