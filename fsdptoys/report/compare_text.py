"""Text output of ``fsdptoys compare``."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from fsdptoys.utils.options import Effect
from fsdptoys.utils.tables import GAP, align_columns, print_grid
from fsdptoys.utils.text import counted, value_text

from .compare import Course, Difference, RunComparison
from .table_terminal import print_line

REASONS = {
    Effect.training: "Settings that change the training",
    Effect.format: "Dtypes, which change losses by their rounding",
    Effect.rounding: "Settings that change the order of summation, or a kernel: the last bits",
    Effect.none: "Settings that change no bit",
}

COURSE_HEAD = ("", "first", "A", "B", "apart", "relative", "steps", "most", "at step")

DISPENSABLE = ("apart", "steps", "relative", "at step", "most")
"""Columns to drop, in this order, from lines wider than the terminal; numbers are never wrapped."""


def print_comparison(found: RunComparison, names: tuple[str, str], console: Console) -> None:
    """Print the verdict, the numbers behind it, and possible causes; ``names`` are those of the
    runs."""
    print_line(verdict(found), console, "bold")
    for sentence in [*_ends(found, names), *_not_finite(found), *map(value_text, found.notes)]:
        print_line(sentence, console)
    console.print()
    for letter, name in zip("AB", names, strict=True):
        print_line(f"{letter}: {value_text(name)}", console)
    console.print()
    _print_courses([COURSE_HEAD, *map(_course_row, found.courses)], console)
    for effect, title in REASONS.items():
        changes = [each for each in found.changes if each.effect is effect]
        _print_changes(
            title,
            [(each.key.removesuffix(".name"), each.first, each.second) for each in changes],
            console,
        )
    _print_changes("Environments", found.environment, console)
    if not found.changes and not found.environment:
        console.print()
        print_line("All settings, versions and machines are equal.", console)


def verdict(found: RunComparison) -> str:
    """Summarize the comparison in one sentence."""
    steps = counted(found.courses[0].steps, "step")
    how = f"within {found.tolerance:g} relative" if found.tolerance else "equal in every bit"
    first = found.first_difference
    if first is None:
        common = f"The {steps} that both have are {how}"
        if found.only_first or found.only_second:
            return f"{common}, but one has more."
        return (
            f"{common}, but not all lines can be read."
            if found.unread
            else f"Same: {steps}, {how}."
        )
    course, difference = first
    return (
        f"They differ from step {difference.step} on, first in the {course.quantity}: "
        f"{_number(difference.first)} and {_number(difference.second)}, {_apart(difference)}; "
        f"{steps} were compared."
    )


def _ends(found: RunComparison, names: tuple[str, str]) -> list[str]:
    sentences = []
    for steps, letter, name in (
        (found.only_first, "A", names[0]),
        (found.only_second, "B", names[1]),
    ):
        if steps:
            span = (
                f"step {steps[0]}"
                if len(steps) == 1
                else f"{len(steps):,} steps, {steps[0]} to {steps[-1]},"
            )
            sentences.append(f"{letter} ({value_text(name)}) has {span} that the other lacks.")
    return sentences


def _not_finite(found: RunComparison) -> list[str]:
    return [
        (
            f"The {course.quantity} is NaN or infinite in {course.not_finite[0]:,} of A's and "
            f"{course.not_finite[1]:,} of B's {course.steps:,} steps; NaN counts as equal to NaN."
        )
        for course in found.courses
        if any(course.not_finite)
    ]


def _course_row(course: Course) -> tuple[str, ...]:
    first, largest = course.first, course.largest
    shown = first or largest
    if shown is None:
        return (course.quantity, "-", "equal", "equal", "0", "0", "0", "0", "-")
    assert largest is not None
    return (
        course.quantity,
        str(first.step) if first else "-",
        _number(shown.first),
        _number(shown.second),
        _short(shown.absolute),
        _short(shown.relative),
        f"{course.differing:,}",
        _short(largest.relative),
        str(largest.step),
    )


def _apart(difference: Difference) -> str:
    if not math.isfinite(difference.relative):
        return "which are not both finite"
    return f"{_short(difference.absolute)} apart ({_short(difference.relative)} relative)"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.9g}"


def _short(value: float) -> str:
    return f"{value:.2g}"


def _print_courses(rows: Sequence[Sequence[str]], console: Console) -> None:
    columns = list(zip(*rows, strict=True))
    widths = {column[0]: max(map(len, column)) for column in columns}
    for name in DISPENSABLE:
        if sum(widths.values()) + GAP * (len(widths) - 1) > console.width:
            del widths[name]
    kept = [column for column in columns if column[0] in widths]
    for index, line in enumerate(align_columns(list(zip(*kept, strict=True)), range(1, len(kept)))):
        print_line(line, console, "" if index else "dim")


def _print_changes(title: str, changes: Sequence[tuple[str, Any, Any]], console: Console) -> None:
    """Print key and both values of each change below a title; nothing without changes."""
    if not changes:
        return
    console.print()
    print_line(title, console, "bold")
    rows = [["", "A", "B"]]
    for change in changes:
        rows.append(["-" if value is None else value_text(value) for value in change])
    print_grid(rows, "lll", console, headed=True, wraps=range(3))
