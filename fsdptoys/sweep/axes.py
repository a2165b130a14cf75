"""Parse overrides with several values, in Hydra's sweep syntax, into the axes of a sweep.

``a=1,2``, ``a=choice(1,2)``, ``a=range(1,4)`` and ``parallel=glob(fsdp*)`` give several values; quoted text and lists
are one value, including commas. ``interval`` is rejected, since it has no discrete values.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep, Transformer
from hydra.errors import HydraException

from fsdptoys.config.overrides import parse_overrides
from fsdptoys.errors import ConfigError

from .definition import SweepDefinition
from .grid import MOST_COMBINATIONS, Axis, Row

SET_BY_SWEEP = {
    "metrics.run_dir": "each job of a sweep has a run directory of its own",
    "checkpoint.folder": "the jobs of a sweep would write into one folder",
    "checkpoint.resume": "each job of a sweep starts a new run",
}
"""Key that the sweep sets for each job → reason."""

Choices = Mapping[str, Sequence[str]]
"""Group → names of its YAML files."""


def read_axes(words: Sequence[str], choices: Choices) -> list[Axis]:
    """Parse the words of a command line.

    Args:
        words: ``KEY=VALUE`` and ``KEY=VALUE,VALUE``.
        choices: used to expand globs and to suggest a fix for a word without ``=``.

    Raises:
        ConfigError: for the first malformed word.
    """
    axes: list[Axis] = []
    for index, word in enumerate(words):
        if word.partition("=")[0].lstrip("+") == "sweep":
            raise ConfigError(
                f"{word} names a sweep as if it were a setting; write fsdptoys sweep {word.partition('=')[2] or 'NAME'}"
            )
        axis = _read_axis(word, words[index + 1 :], choices)
        for other in axes:
            if other.key == axis.key and other != axis:
                both = ",".join([*other.values, *axis.values])
                raise ConfigError(
                    f"{axis.key} is given twice, as {other.key}={','.join(other.values)} and as {word}; "
                    f"write {axis.key}={both} for all of these"
                )
        if axis not in axes:
            axes.append(axis)
    return axes


def read_base(definition: SweepDefinition, where: str, choices: Choices) -> tuple[list[Axis], list[Row]]:
    """Parse the axes and rows of a sweep's file, named ``where`` in messages.

    Raises:
        ConfigError: for the first mistake.
    """
    try:
        base = read_axes(definition.base, choices)
        grid = [
            Axis(key, tuple(value for text in values for value in _one_value(f"{key}={text}", choices)))
            for key, values in definition.grid.items()
        ]
        rows = [tuple(read_axes(row, choices)) for row in definition.rows]
        several = [axis for axes in (base, *rows) for axis in axes if len(axis.values) > 1]
        if several:
            raise ConfigError(
                f"{several[0].key}={','.join(several[0].values)} gives several values; write them under grid"
            )
        twice = [axis.key for axis in base if axis.key in definition.grid]
        if twice:
            raise ConfigError(f"{twice[0]} is set in base and in grid; keep one of them")
    except ConfigError as mistake:
        raise ConfigError(f"the sweep {where} says: {mistake}") from mistake
    return [*base, *grid], rows


def _one_value(word: str, choices: Choices) -> tuple[str, ...]:
    axis = _read_axis(word, (), choices)
    if len(axis.values) > 1:
        text = word.partition("=")[2]
        raise ConfigError(
            f"{word} gives several values where one is expected; write them one by one, or '\"{text}\"' for one text"
        )
    return axis.values


def _read_axis(word: str, later: Sequence[str], choices: Choices) -> Axis:
    override = _parse(word)
    if override is None and re.search(r"=\s*,|,\s*(,|$)", word):
        raise ConfigError(f"{word} has an empty value; leave out the comma, or write '' for an empty text")
    if override is None or not override.is_sweep_override():
        key, _, value = word.partition("=")
        # The words after a word without a value show the intended one.
        parse_overrides([word] if value else [word, *later[:2]], choices)
        axis = Axis(key, (value,))
    else:
        key = word.partition("=")[0]
        axis = Axis(key, tuple(_values(override, word, choices)))
        for one in axis.words:
            parse_overrides([one], choices)
    reason = SET_BY_SWEEP.get(key.lstrip("+"))
    if reason is not None:
        raise ConfigError(f"{word} is not for a sweep, since {reason}; leave it out")
    return axis


def _parse(word: str) -> Override | None:
    """Parse a word with Hydra; None if that fails, which ``parse_overrides`` reports."""
    try:
        return OverridesParser.create().parse_override(word) if "=" in word else None
    except HydraException:
        return None


def _values(override: Override, word: str, choices: Choices) -> list[str]:
    key = word.partition("=")[0]
    typed = override.value()
    if isinstance(typed, Glob):
        names = typed.filter(list(choices.get(override.key_or_group, ())))
        if not names:
            raise ConfigError(f"{word} matches no choice of a group; write {key}=VALUE,VALUE")
        return [str(name) for name in names]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{word} has no values that could be counted; write {key}=range(START,STOP,STEP) or {key}=VALUE,VALUE"
        )
    if isinstance(typed, RangeSweep):
        if not typed.step:
            raise ConfigError(f"{word} has steps of 0, which never end; write {key}=range(START,STOP)")
        # Counted first, since shuffling a range materializes it.
        if sum(1 for _ in itertools.islice(typed.range(), MOST_COMBINATIONS + 1)) > MOST_COMBINATIONS:
            raise ConfigError(
                f"{word} has more than the {MOST_COMBINATIONS} values that a sweep may have; write "
                f"{key}=range(START,STOP,STEP) with fewer"
            )
    values = [_as_typed(value) for value in override.sweep_iterator()]
    if not values:
        raise ConfigError(f"{word} holds no value; write {key}=VALUE,VALUE")
    return values


def _as_typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"  # a range's sums have rounding errors
    return str(Transformer.str(value))
