"""Ending, reference losses and operators of a run, from ``result.json``.

Directories of versions before it have them only in ``summary.md``, which is parsed instead.
"""

import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.metrics.config import SUMMARY_FILE
from fsdptoys.metrics.results import RunResult, read_result
from fsdptoys.metrics.summary import ending_line, operator_rows
from fsdptoys.sweep import JobStatus
from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

LARGEST_FILE_BYTES = 2**24
# Heading in ``summary.md`` of this version, and of earlier ones
RESULTS_HEADINGS = "Results|What came out"
PROFILE_HEADINGS = "Profile|Where the time and the memory went"

STEPS = re.compile(r"(?P<done>[0-9]{1,16}) of (?P<planned>[0-9]{1,16}); (?P<why>.+)")
PLANNED_END = re.compile(r"all steps done|train\.max_seconds=\S+ reached")
GAVE_UP = re.compile(r"\(train\.max_skipped(_in_a_row)?=")


@dataclass(frozen=True)
class Ending:
    """How a run with results ended."""

    status: JobStatus
    text: str | None  # Steps and reason; None if unknown


def read_ending(run_dir: Path) -> Ending:
    """How a run with results ended; from its summary if ``result.json`` cannot be read."""
    with contextlib.suppress(ForeignError):
        result = read_result(run_dir)
        if result is not None:
            return Ending(JobStatus(result.status.value), one_line(ending_line(result)))
    return _summary_ending(run_dir)


def references(result: RunResult | None, run_dir: Path) -> dict[str, float]:
    """Label → nats per token of the finite reference losses."""
    found = result.references_nats if result is not None else _summary_references(run_dir)
    return {one_line(label): float(nats) for label, nats in found.items() if math.isfinite(nats)}


def operators(result: RunResult | None, run_dir: Path) -> list[list[str]]:
    """Heading and rows of the slowest operators; empty for a run without a profile."""
    if result is None:
        return _summary_table(run_dir, PROFILE_HEADINGS)
    found = result.profile.operators if result.profile is not None else ()
    return [[one_line(cell) for cell in row] for row in operator_rows(found)] if found else []


def _summary_ending(run_dir: Path) -> Ending:
    """Ending of a run without ``result.json``; done if the summary states no reason."""
    rows = _summary_table(run_dir, RESULTS_HEADINGS)
    line = next((row[1] for row in rows if len(row) > 1 and row[0] == "steps"), None)
    match = STEPS.fullmatch(line) if line is not None else None
    status = JobStatus.done
    if match is not None and GAVE_UP.search(match["why"]):
        status = JobStatus.failed
    elif (
        match is not None
        and not PLANNED_END.fullmatch(match["why"])
        and int(match["done"]) < int(match["planned"])
    ):
        status = JobStatus.stopped
    return Ending(status, line)


def _summary_references(run_dir: Path) -> dict[str, float]:
    found = {}
    for row in _summary_table(run_dir, RESULTS_HEADINGS)[1:]:
        if row[0].startswith("reference: ") and len(row) > 1:
            with contextlib.suppress(ValueError, IndexError):
                found[row[0].removeprefix("reference: ")] = float(row[1].split()[0])
    return found


def _summary_table(run_dir: Path, headings: str) -> list[list[str]]:
    """First Markdown table below one of the headings, without separator line and backticks; empty
    if there is none."""
    try:
        text = read_regular(run_dir / SUMMARY_FILE, LARGEST_FILE_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return []
    _, *below = re.split(rf"^## (?:{headings})\n", text, maxsplit=1, flags=re.MULTILINE)
    rows = []
    for line in "".join(below).partition("\n## ")[0].splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append([cell.strip().replace(r"\|", "|").strip("`") for cell in cells])
        elif rows:
            break
    return [row for index, row in enumerate(rows) if index != 1]
