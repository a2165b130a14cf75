"""Inputs of the comparison figures: labeled runs, and the memory measure they have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdptoys.metrics.results import RunResults
from fsdptoys.train.recorded_run import RecordedRun


@dataclass(frozen=True)
class PlottedRun:
    """A run with steps and its label in figures."""

    name: str
    run: RecordedRun
    settings: tuple[str, ...]
    """``key=value`` of the settings that differ among the runs."""
    done: bool = True
    """Whether it finished; unfinished runs are drawn but not ranked."""


@dataclass(frozen=True)
class Measure:
    """A memory measure for comparing runs."""

    title: str
    of: Callable[[RunResults], float | None]
    caption: str


MEASURES = (
    Measure(
        "device memory reserved",
        lambda results: results.memory_reserved_gib,
        "Memory: the maximum reserved by the device's allocator on rank 0.",
    ),
    Measure(
        "peak resident set",
        lambda results: results.resident_set_peak_gib,
        "Memory: the peak resident set of rank 0's process, including Python.",
    ),
    Measure(
        "largest resident set after a step",
        lambda results: results.resident_set_gib,
        "Memory: the largest resident set of rank 0's process after a step.",
    ),
)


def common_measure(runs: Sequence[RecordedRun]) -> Measure | None:
    """The measure that most runs have, device memory first; None if no run has any."""
    counts = [sum(measure.of(run.results) is not None for run in runs) for measure in MEASURES]
    return MEASURES[counts.index(max(counts))] if max(counts, default=0) else None
