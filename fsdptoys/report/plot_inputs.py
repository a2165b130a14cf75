"""Runs as pictures show them, and the memory that they can be compared by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdptoys.metrics.results import (
    RunResults,
)
from fsdptoys.train.recorded_run import RecordedRun


@dataclass(frozen=True)
class Shown:
    """A run with steps, under the name that it has in pictures."""

    name: str
    run: RecordedRun
    settings: tuple[str, ...]
    """``key=value`` of what makes it another than the others."""
    done: bool = True
    """Whether it came to its end; what ended early has numbers, and is no winner."""


@dataclass(frozen=True)
class Measure:
    """Memory that runs can be compared by."""

    title: str
    of: Callable[[RunResults], float | None]
    caption: str


MEASURES = (
    Measure(
        "device memory reserved",
        lambda results: results.memory_reserved_gib,
        "Memory: the most that the device's allocator held on rank 0.",
    ),
    Measure(
        "peak resident set",
        lambda results: results.resident_set_peak_gib,
        "Memory: on a CPU, the most that the process of rank 0 had in RAM, Python included.",
    ),
    Measure(
        "largest resident set after a step",
        lambda results: results.resident_set_gib,
        "Memory: on a CPU, what the process of rank 0 had in RAM after a step, at most.",
    ),
)


def measure_of(runs: Sequence[RecordedRun]) -> Measure | None:
    """What memory most of the runs can be compared by: the device's where there is one."""
    counts = [sum(measure.of(run.results) is not None for run in runs) for measure in MEASURES]
    return MEASURES[counts.index(max(counts))] if max(counts, default=0) else None
