"""Ranges of model settings, declared in the field's metadata and checked by ``check_bounds``."""

import dataclasses
import math
from typing import Any

MOST_LAYERS = 10_000
"""Blocks are built one by one, even on the meta device."""

MOST_CHANNELS = 2**20
"""Bound of the width and the number of heads."""

MOST_HIDDEN = 2**22
"""Bound of a feed-forward's width; within these bounds a weight's bytes fit an index."""

MOST_EXPERTS = 2**16

MOST_TOKENS = 2**30
"""Bound of settings in tokens of one sequence."""


def at_least(least: float, most: float = math.inf) -> dict[str, tuple[float, ...]]:
    """Field metadata: a number from ``least`` to ``most``."""
    return {"bounds": (least, most)}


def above(least: float, most: float = math.inf) -> dict[str, tuple[float, ...]]:
    """Field metadata: a number above ``least``, at most ``most``."""
    return {"bounds": (least, most, math.inf, True)}


def check_bounds(config: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass against their bounds, also where a subclass changes the
    default; None passes.

    Args:
        config: the dataclass.
        prefix: of its keys, within ``model``.

    Raises:
        ValueError: for the first number outside, with key, value and fix.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"model.{prefix}{field.name}"
        owners = [
            owner for owner in type(config).__mro__ if dataclasses.is_dataclass(owner)
        ]
        declared = [
            owner.__dataclass_fields__.get(field.name, field).metadata
            for owner in owners
        ]
        bounds = next(
            (metadata["bounds"] for metadata in declared if "bounds" in metadata), None
        )
        if bounds is None or value is None:
            continue
        least = bounds[0]
        most = bounds[1]
        excluded = len(bounds) > 2
        if most < value < math.inf:
            raise ValueError(
                f"{key}={value} must be at most {most:.15g}; set {key} to that or less"
            )
        if not (least < value if excluded else least <= value) or value == math.inf:
            default = "null" if field.default is None else field.default
            raise ValueError(
                f"{key}={value} must be {'above' if excluded else 'at least'} {least}; set "
                f"{key}={default}"
            )
