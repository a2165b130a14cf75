"""Text output of ``fsdptoys compare``."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from fsdptoys.utils.options import Effect
from fsdptoys.utils.tables import print_grid
from fsdptoys.utils.text import counted, value_text

from .compare import Course, Difference, RunComparison
from .table_terminal import print_line

REASONS = {
    Effect.training: "Settings that change the training",
    Effect.format: "Dtypes, which change losses by their rounding",
    Effect.rounding: "Settings that change the order of summation, or a kernel: the last bits",
    Effect.none: "Settings that change no bit",
}

COURSE_HEAD = ("", "first", "A", "B", "relative", "steps", "most")


def print_comparison(
    comparison: RunComparison, names: tuple[str, str], console: Console
) -> None:
    """Print the verdict, the numbers behind it, and possible causes; ``names`` are those of the
    runs."""
    print_line(verdict(comparison), console, "bold")
    for steps, letter in ((comparison.only_first, "A"), (comparison.only_second, "B")):
        if steps:
            count = counted(len(steps), "step")
            span = f"{steps[0]} to {steps[-1]}"
            print_line(f"{letter} has {count} that the other lacks: {span}.", console)
    for note in comparison.notes:
        print_line(value_text(note), console)
    console.print()
    for letter, name in zip("AB", names, strict=True):
        print_line(f"{letter}: {value_text(name)}", console)
    console.print()
    rows = [COURSE_HEAD, *map(_course_row, comparison.courses)]
    print_grid(rows, "lrrrrrr", console, headed=True, wraps=())
    for effect, title in REASONS.items():
        changes = [
            (change.key.removesuffix(".name"), change.first, change.second)
            for change in comparison.changes
            if change.effect is effect
        ]
        _print_changes(title, changes, console)
    _print_changes("Environments", comparison.environment, console)
    if not comparison.changes and not comparison.environment:
        console.print()
        print_line("All settings, versions and machines are equal.", console)


def verdict(comparison: RunComparison) -> str:
    """Summarize the comparison in one sentence."""
    steps = counted(comparison.courses[0].steps, "step")
    how = (
        f"within {comparison.tolerance:g} relative"
        if comparison.tolerance
        else "equal in every bit"
    )
    if comparison.same:
        return f"Same: {steps}, {how}."
    if comparison.first_difference is None:
        why = "not all lines can be read" if comparison.unread else "one has more"
        return f"The {steps} that both have are {how}, but {why}."
    course, difference = comparison.first_difference
    return (
        f"They differ from step {difference.step} on, first in the {course.quantity}: "
        f"{_number(difference.first)} and {_number(difference.second)}, {_apart(difference)}; "
        f"{steps} were compared."
    )


def _course_row(course: Course) -> tuple[str, ...]:
    example = course.first or course.largest
    if example is None or course.largest is None:
        return (course.quantity, "-", "equal", "equal", "0", "0", "0")
    return (
        course.quantity,
        str(course.first.step) if course.first else "-",
        _number(example.first),
        _number(example.second),
        f"{example.relative:.2g}",
        f"{course.differing:,}",
        f"{course.largest.relative:.2g}",
    )


def _apart(difference: Difference) -> str:
    if not math.isfinite(difference.relative):
        return "which are not both finite"
    return f"{difference.absolute:.2g} apart ({difference.relative:.2g} relative)"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.9g}"


def _print_changes(
    title: str, changes: Sequence[tuple[str, Any, Any]], console: Console
) -> None:
    """Print key and both values of each change below a title; nothing without changes."""
    if not changes:
        return
    console.print()
    print_line(title, console, "bold")
    rows = [["", "A", "B"]]
    for change in changes:
        rows.append(["-" if value is None else value_text(value) for value in change])
    print_grid(rows, "lll", console, headed=True, wraps=range(3))
