"""Expand a sweep (shared words, keys with several values, and rows) into combinations.

The user's values of a key replace those of the sweep's file.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.errors import ConfigError

MOST_COMBINATIONS = 10_000
"""Limit of a sweep; all combinations are composed before the first runs."""


@dataclass(frozen=True)
class Axis:
    """A key and its values, each as typed after the ``=``."""

    key: str
    """Key, including a typed ``+``."""
    values: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """One word for each value."""
        return [f"{self.key}={value}" for value in self.values]


Row = tuple[Axis, ...]
"""Keys with one value each."""


@dataclass(frozen=True)
class Combination:
    """The words of one job."""

    words: tuple[str, ...]
    varied: dict[str, str]


def combine(base: Sequence[Axis], rows: Sequence[Row], typed: Sequence[Axis]) -> list[Combination]:
    """Expand a sweep into its combinations.

    Args:
        base: keys of the sweep's file in order, shared by all jobs (one value) or varied (several).
        rows: rows of the sweep's file, which vary slower than the typed keys; may be empty.
        typed: the user's keys, which replace those of the file.

    Returns:
        The combinations, the last key varying fastest. Words are in the file's order, then the user's.

    Raises:
        ConfigError: for more than ``MOST_COMBINATIONS``.
    """
    own = {axis.key: axis for axis in typed}
    kept_rows = [tuple(axis for axis in row if axis.key not in own) for row in rows] or [()]
    in_rows = {axis.key for row in kept_rows for axis in row}
    shared = [own.pop(axis.key, axis) for axis in base if axis.key not in in_rows]
    shared += own.values()
    in_base = {axis.key: axis for axis in base if axis.key in in_rows}
    count = len(kept_rows) * math.prod(len(axis.values) for axis in shared)
    if count > MOST_COMBINATIONS:
        longest = max(shared, key=lambda axis: len(axis.values), default=Axis("rows", ()))
        raise ConfigError(
            f"the sweep has {count} combinations, {len(longest.values)} of them by {longest.key} alone, and may have "
            f"{MOST_COMBINATIONS}; give fewer values of {longest.key}"
        )
    combinations = []
    for row in kept_rows:
        # Keys of other rows that this row lacks get their value from the base.
        rest = [in_base[key] for key in in_base if key not in {axis.key for axis in row}]
        axes = [*rest, *shared]
        for values in itertools.product(*(axis.words for axis in axes)):
            words = [*values[: len(rest)], *(word for axis in row for word in axis.words), *values[len(rest) :]]
            varied = {axis.key: axis.values[0] for axis in row}
            varied |= {
                axis.key: word.partition("=")[2]
                for axis, word in zip(axes, values, strict=True)
                if len(axis.values) > 1
            }
            combinations.append(Combination(tuple(words), varied))
    return combinations
