"""Compare two runs step by step: first difference, its size, and the settings that could explain
it.

Steps are matched by number. Runs with unequal step numbers or unreadable lines are never the same,
even if all common steps are equal. Held-out losses are compared at common steps if they are over
the same samples. Possible causes are sorted by strength: settings that change the training come
first, and among equals those that act nearest to the stage of the step in which the difference
first shows.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from fsdptoys.config.declared_options import option_defaults
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.config import METRICS_FILE
from fsdptoys.metrics.resume_log import changed_settings
from fsdptoys.sweep import is_sweep_dir
from fsdptoys.sweep.folder import RUN_FOLDER
from fsdptoys.train.recorded_run import RecordedRun, is_run_dir, read_recorded_run
from fsdptoys.utils.options import Effect, Stage

from .loss_agreement import HELD_OUT, QUANTITIES, Difference
from .setting_diff import EXCLUDED, RANKS, Settings, effective
from .setting_effects import (
    effect_of,
    global_batch,
    held_out_samples,
    stage_of,
    usual_formats,
)

EXCLUDED_FROM_ENVIRONMENT = ("started_at", "command", "world_size")


@dataclass(frozen=True)
class Course:
    """One quantity over the common steps."""

    quantity: str
    steps: int  # Number of steps compared
    differing: int  # Number of steps beyond the tolerance
    first: Difference | None
    # Largest relative difference over all steps; None if all are bitwise equal
    largest: Difference | None
    is_finite: bool  # Whether no value is NaN or infinite


@dataclass(frozen=True)
class Change:
    """A setting that differs; its value is None in a run without it."""

    key: str
    first: Any
    second: Any
    effect: Effect


@dataclass(frozen=True)
class RunComparison:
    """Result of comparing two runs."""

    tolerance: float
    courses: list[Course]
    only_first: list[int]  # Steps missing in the second run
    only_second: list[int]
    changes: list[Change]  # Most likely causes first
    environment: list[tuple[str, Any, Any]]  # Key, and its value in either run
    notes: list[str]  # Sentences about unreadable lines and quantities left out
    unread: bool  # Whether a run has unreadable metrics lines

    @property
    def first_difference(self) -> tuple[Course, Difference] | None:
        """The earliest differing step; at equal steps, the quantity that comes first in
        ``QUANTITIES``."""
        differences = [
            (course, course.first)
            for course in self.courses
            if course.first is not None
        ]
        return min(differences, key=lambda pair: pair[1].step, default=None)

    @property
    def same(self) -> bool:
        """Whether both have the same steps, all readable and within the tolerance."""
        return self.first_difference is None and not (
            self.only_first or self.only_second or self.unread
        )


def open_run(path: Path) -> RecordedRun:
    """Read a run directory, or the run in a sweep's job folder.

    Raises:
        ConfigError: if the path holds no run, or the run has no step.
    """
    if is_sweep_dir(path):
        raise ConfigError(
            f"{path} is a sweep, and two runs are compared; give one of its jobs, as {path}/jobs/01"
        )
    if not is_run_dir(path) and is_run_dir(path / RUN_FOLDER):
        path = path / RUN_FOLDER
    if not is_run_dir(path):
        raise ConfigError(
            f"{path} holds no run; give a folder that fsdptoys train has written, as runs/NAME"
        )
    run = read_recorded_run(path)
    if not run.steps:
        raise ConfigError(
            f"{path} has no step that could be compared; give a run that has taken some"
        )
    return run


def compare_runs(
    first: RecordedRun, second: RecordedRun, tolerance: float = 0.0
) -> RunComparison:
    """Compare two runs; numbers within a relative ``tolerance`` count as equal.

    Raises:
        ConfigError: if they have no step in common.
    """
    first_steps, second_steps = (
        {metrics.step: metrics for metrics in run.steps} for run in (first, second)
    )
    common = sorted(first_steps.keys() & second_steps.keys())
    if not common:
        raise ConfigError(
            f"{first.path} and {second.path} have no step in common: steps {min(first_steps)} to "
            f"{max(first_steps)} and {min(second_steps)} to {max(second_steps)}; compare runs that "
            "overlap"
        )
    pairs = [(first_steps[step], second_steps[step]) for step in common]
    courses = [_course(quantity, pairs, tolerance) for quantity in QUANTITIES]
    courses = [course for course in courses if course.steps]
    unreadable = [note for run in (first, second) for note in run.notes]
    notes = [f"{note.removesuffix('.')}." for note in unreadable]
    samples = held_out_samples(first.tree, first.world_size)
    if samples is None or samples != held_out_samples(second.tree, second.world_size):
        if any(course.quantity == HELD_OUT for course in courses):
            notes.append(
                "Their held-out losses are over different samples and were not compared."
            )
        courses = [course for course in courses if course.quantity != HELD_OUT]
    notes += [
        f"The {course.quantity} is NaN or infinite in some steps; NaN counts as equal to NaN."
        for course in courses
        if not course.is_finite
    ]
    environment = changed_settings(first.environment, second.environment)
    return RunComparison(
        tolerance=tolerance,
        courses=courses,
        only_first=sorted(first_steps.keys() - second_steps.keys()),
        only_second=sorted(second_steps.keys() - first_steps.keys()),
        changes=_changes(first, second, courses),
        environment=[
            (key, *pair)
            for key, pair in environment.items()
            if key not in EXCLUDED_FROM_ENVIRONMENT
        ],
        notes=list(dict.fromkeys(notes)),
        unread=any(METRICS_FILE in note for note in unreadable),
    )


def _course(
    quantity: str, pairs: Sequence[tuple[StepMetrics, StepMetrics]], tolerance: float
) -> Course:
    """Compare one quantity in the steps in which both runs have it."""
    read = QUANTITIES[quantity]
    values = [(one.step, read(one), read(other)) for one, other in pairs]
    differences = [
        Difference(step, a, b)
        for step, a, b in values
        if a is not None and b is not None
    ]
    over = [difference for difference in differences if difference.relative > tolerance]
    largest = max(differences, key=lambda difference: difference.relative, default=None)
    return Course(
        quantity=quantity,
        steps=len(differences),
        differing=len(over),
        first=over[0] if over else None,
        largest=largest if largest is not None and largest.relative else None,
        is_finite=all(
            math.isfinite(value)
            for difference in differences
            for value in (difference.first, difference.second)
        ),
    )


def _changes(
    first: RecordedRun, second: RecordedRun, courses: Sequence[Course]
) -> list[Change]:
    first_settings, second_settings = (
        usual_formats() | {RANKS: run.world_size} | effective(run.tree)
        for run in (first, second)
    )
    same_batch = global_batch(first_settings) == global_batch(second_settings)
    changes = [
        Change(key, old, new, effect_of(key, same_batch))
        for key, (old, new) in changed_settings(first_settings, second_settings).items()
        if key not in EXCLUDED
        and (old, new) != (None, None)
        and not _only_switched(key, first_settings, second_settings)
    ]
    stage = _stage(courses)
    return sorted(
        changes, key=lambda change: (change.effect, abs(stage_of(change.key) - stage))
    )


def _only_switched(key: str, first: Settings, second: Settings) -> bool:
    """Return whether one run lacks a setting, since its switch is off, and the other has the
    default."""
    if (key in first) == (key in second):
        return False
    return (first | second)[key] == option_defaults().get(key, MISSING)


def _stage(courses: Sequence[Course]) -> Stage:
    """Estimate the stage of a step in which the runs first differ."""
    steps = {
        course.quantity: course.first.step
        for course in courses
        if course.first is not None
        and course.quantity != HELD_OUT  # evaluated after the optimizer step
    }
    if 1 not in steps.values() or steps.get("learning rate") == 1:
        return Stage.update
    return (
        Stage.forward
        if steps.get("loss") == 1 or steps.get("valid tokens") == 1
        else Stage.gradient
    )
