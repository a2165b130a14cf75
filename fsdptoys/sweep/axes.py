"""Parse overrides with several values, in Hydra's sweep syntax, into axes, and expand these into
combinations.

``a=1,2``, ``a=choice(1,2)``, ``a=range(1,4)`` and ``parallel=glob(fsdp*)`` give several values;
quoted text and lists are one value, including commas. ``interval`` is rejected, since it has no
discrete values. The user's values of a key replace those of the sweep's file.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep, Transformer
from hydra.errors import HydraException

from fsdptoys.config.overrides import parse_overrides
from fsdptoys.errors import ConfigError

from .definition import SweepDefinition

SET_BY_SWEEP = {
    "metrics.run_dir": "each job of a sweep has a run directory of its own",
    "checkpoint.folder": "the jobs of a sweep would write into one folder",
    "checkpoint.resume": "each job of a sweep starts a new run",
}
"""Key that the sweep sets for each job → reason."""

MOST_COMBINATIONS = 10_000
"""Limit of a sweep; all combinations are composed before the first runs."""

Choices = Mapping[str, Sequence[str]]
"""Group → names of its YAML files."""


@dataclass(frozen=True)
class Axis:
    """A key and its values, each as typed after the ``=``."""

    key: str
    """Key, including a typed ``+``."""
    values: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """One override for each value."""
        return [f"{self.key}={value}" for value in self.values]


@dataclass(frozen=True)
class Combination:
    """The overrides of one job."""

    overrides: tuple[str, ...]
    varied: dict[str, str]

    @property
    def keys(self) -> list[str]:
        """The overrides' keys, without a typed ``+``."""
        return [word.partition("=")[0].lstrip("+") for word in self.overrides]

    def without(self, key: str) -> "Combination":
        """Return the combination without the overrides of a key."""
        overrides = (
            word
            for word, other in zip(self.overrides, self.keys, strict=True)
            if other != key
        )
        return Combination(
            tuple(overrides),
            {name: v for name, v in self.varied.items() if name.lstrip("+") != key},
        )


def read_axes(overrides: Sequence[str], choices: Choices) -> list[Axis]:
    """Parse the overrides of a command line.

    Args:
        overrides: ``KEY=VALUE`` and ``KEY=VALUE,VALUE``.
        choices: used to expand globs and to suggest a fix for a word without ``=``.

    Raises:
        ConfigError: for the first malformed word.
    """
    axes: list[Axis] = []
    for index, word in enumerate(overrides):
        key, _, value = word.partition("=")
        if key.lstrip("+") == "sweep":
            raise ConfigError(
                f"{word} names a sweep as if it were a setting; write fsdptoys sweep "
                f"{value or 'NAME'}"
            )
        axis = _read_axis(word, overrides[index + 1 :], choices)
        for other in axes:
            if other.key == axis.key and other != axis:
                both = ",".join([*other.values, *axis.values])
                raise ConfigError(
                    f"{axis.key} is given twice, as {other.key}={','.join(other.values)} and as "
                    f"{word}; write {axis.key}={both} for all of these"
                )
        if axis not in axes:
            axes.append(axis)
    return axes


def read_base(
    definition: SweepDefinition, where: str, choices: Choices
) -> tuple[list[Axis], list[tuple[Axis, ...]]]:
    """Parse the axes and rows of a sweep's file, named ``where`` in messages.

    Raises:
        ConfigError: for the first mistake.
    """
    try:
        base = read_axes(definition.base, choices)
        grid = [
            Axis(
                key,
                tuple(_one_value(f"{key}={text}", choices) for text in values),
            )
            for key, values in definition.grid.items()
        ]
        rows = [tuple(read_axes(row, choices)) for row in definition.rows]
        if several := [
            axis for axes in (base, *rows) for axis in axes if len(axis.values) > 1
        ]:
            raise ConfigError(
                f"{several[0].key}={','.join(several[0].values)} gives several values; write "
                "them under grid"
            )
        if twice := [axis.key for axis in base if axis.key in definition.grid]:
            raise ConfigError(
                f"{twice[0]} is set in base and in grid; keep one of them"
            )
    except ConfigError as mistake:
        raise ConfigError(f"the sweep {where} says: {mistake}") from mistake
    return [*base, *grid], rows


def _one_value(word: str, choices: Choices) -> str:
    axis = _read_axis(word, (), choices)
    if len(axis.values) > 1:
        text = word.partition("=")[2]
        raise ConfigError(
            f"{word} gives several values where one is expected; write them one by one, or "
            f"'\"{text}\"' for one text"
        )
    return axis.values[0]


def _read_axis(word: str, later: Sequence[str], choices: Choices) -> Axis:
    key, equals, value = word.partition("=")
    override = None
    with contextlib.suppress(HydraException):  # parse_overrides reports it
        override = OverridesParser.create().parse_override(word) if equals else None
    if override is None and re.search(r"=\s*,|,\s*(,|$)", word):
        raise ConfigError(
            f"{word} has an empty value; leave out the comma, or write '' for an empty text"
        )
    if override is None or not override.is_sweep_override():
        # The overrides after a word without a value show the intended one.
        parse_overrides([word] if value else [word, *later[:2]], choices)
        axis = Axis(key, (value,))
    else:
        axis = Axis(key, tuple(_values(override, key, word, choices)))
        for single in axis.overrides:
            parse_overrides([single], choices)
    if reason := SET_BY_SWEEP.get(key.lstrip("+")):
        raise ConfigError(f"{word} is not for a sweep, since {reason}; leave it out")
    return axis


def _values(override: Override, key: str, word: str, choices: Choices) -> list[str]:
    values = override.value()
    if isinstance(values, Glob):
        names = values.filter(list(choices.get(override.key_or_group, ())))
        if not names:
            raise ConfigError(
                f"{word} matches no choice of a group; write {key}=VALUE,VALUE"
            )
        return [str(name) for name in names]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{word} has no values that could be counted; write {key}=range(START,STOP,STEP) or "
            f"{key}=VALUE,VALUE"
        )
    most = MOST_COMBINATIONS
    if isinstance(values, RangeSweep):
        # Counted first, since shuffling a range materializes it.
        count = (
            len(list(itertools.islice(values.range(), most + 1))) if values.step else 0
        )
        if not 0 < count <= most:
            raise ConfigError(
                f"{word} has no value, or more than the {most} that a sweep may have; write "
                f"{key}=range(START,STOP,STEP)"
            )
    return [_as_typed(value) for value in override.sweep_iterator()]


def _as_typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"  # a range's sums have rounding errors
    return str(Transformer.str(value))


def combine(
    base: Sequence[Axis], rows: Sequence[Sequence[Axis]], user_axes: Sequence[Axis]
) -> list[Combination]:
    """Expand a sweep into its combinations.

    Args:
        base: keys of the sweep's file in order, shared by all jobs (one value) or varied (several).
        rows: rows of the sweep's file, which vary slower than the typed keys; may be empty.
        user_axes: the user's keys, which replace those of the file.

    Returns:
        The combinations, the last key varying fastest. Words are in the file's order, then the
        user's.

    Raises:
        ConfigError: for more than ``MOST_COMBINATIONS``.
    """
    by_key = {axis.key: axis for axis in user_axes}
    kept_rows = [[axis for axis in row if axis.key not in by_key] for row in rows] or [
        []
    ]
    in_rows = {axis.key for row in kept_rows for axis in row}
    shared = [
        *(by_key.pop(axis.key, axis) for axis in base if axis.key not in in_rows),
        *by_key.values(),
    ]
    in_base = {axis.key: axis for axis in base if axis.key in in_rows}
    count = len(kept_rows) * math.prod(len(axis.values) for axis in shared)
    if count > MOST_COMBINATIONS:
        longest = max(
            shared, key=lambda axis: len(axis.values), default=Axis("rows", ())
        )
        raise ConfigError(
            f"the sweep has {count} combinations, {len(longest.values)} of them by {longest.key} "
            f"alone, and may have {MOST_COMBINATIONS}; give fewer values of {longest.key}"
        )
    combinations = []
    for row in kept_rows:
        # Keys of other rows that this row lacks get their value from the base.
        rest = [
            in_base[key] for key in in_base if key not in {axis.key for axis in row}
        ]
        axes = [*rest, *shared]
        for values in itertools.product(*(axis.values for axis in axes)):
            pairs = list(zip(axes, values, strict=True))
            overrides = [f"{axis.key}={value}" for axis, value in pairs]
            overrides[len(rest) : len(rest)] = (
                word for axis in row for word in axis.overrides
            )
            varied = {axis.key: axis.values[0] for axis in row}
            varied |= {axis.key: value for axis, value in pairs if len(axis.values) > 1}
            combinations.append(Combination(tuple(overrides), varied))
    return combinations
