"""Main numbers of a run; its ending, reference losses and operators, from ``result.json``.

Directories of versions before it have them only in ``summary.md``, which is parsed instead.
"""

import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.metrics.config import SUMMARY_FILE
from fsdptoys.metrics.results import RunResult, RunResults, read_result
from fsdptoys.metrics.summary import ending_line, operator_rows
from fsdptoys.sweep import JobStatus
from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import gib_text, one_line

LARGEST_FILE_BYTES = 2**24
# Heading in ``summary.md`` of this version, and of earlier ones
RESULTS_HEADINGS = "Results|What came out"
PROFILE_HEADINGS = "Profile|Where the time and the memory went"

STEPS = re.compile(r"([0-9]{1,16}) of ([0-9]{1,16}); ")
GAVE_UP = re.compile(r"\(train\.max_skipped(_in_a_row)?=")


@dataclass(frozen=True)
class Ending:
    """How a run with results ended."""

    status: JobStatus
    text: str | None  # Steps and reason; None if unknown


def main_numbers(results: RunResults) -> list[tuple[str, str, str]]:
    """Title, value and details of the main numbers that a run has."""
    numbers = []
    if results.last_loss is not None:
        first = f"nats per token; first {results.first_loss:.4f}"
        numbers.append(("last loss", f"{results.last_loss:.4f}", first))
    if results.eval_loss is not None:
        after = f"after step {results.eval_step}"
        numbers.append(("held-out loss", f"{results.eval_loss:.4f}", after))
    for title, spread, factor, digits, unit in (
        ("step time", results.step_time_seconds, 1e3, 1, " ms"),
        ("tokens/s, all ranks", results.tokens_per_second, 1, 0, ""),
        ("MFU", results.mfu, 100, 1, "%"),
    ):
        if spread is not None:
            low, median, high = (
                f"{value * factor:,.{digits}f}{unit}"
                for value in (spread.p10, spread.median, spread.p90)
            )
            numbers.append((title, median, f"median; 10% to 90%: {low} to {high}"))
    if results.data_stall is not None:
        share = f"{results.data_stall:.2%}"
        numbers.append(("waiting for data", share, "of the step time, on rank 0"))
    parts = ", ".join(
        f"{name} {gib_text(size)}" for name, size in results.memory_parts.items()
    )
    resident = results.resident_set_peak_gib or results.resident_set_gib
    for title, gib, more in (
        ("device memory reserved", results.memory_reserved_gib, "on rank 0"),
        ("peak memory in tensors", results.memory_peak_gib, parts or "on rank 0"),
        ("resident set, highest", resident, "of rank 0, Python included"),
    ):
        if gib is not None:
            numbers.append((title, gib_text(gib), more))
    if results.skipped_steps:
        numbers.append(
            ("skipped steps", f"{results.skipped_steps:,}", "without an update")
        )
    if results.spikes:
        numbers.append(
            ("loss spikes", f"{results.spikes:,}", "far above the losses before")
        )
    return numbers


def read_ending(run_dir: Path) -> Ending:
    """How a run with results ended; from its summary if ``result.json`` cannot be read."""
    with contextlib.suppress(ForeignError):
        result = read_result(run_dir)
        if result is not None:
            return Ending(JobStatus(result.status.value), one_line(ending_line(result)))
    return _summary_ending(run_dir)


def references(result: RunResult | None, run_dir: Path) -> dict[str, float]:
    """Label → nats per token of the finite reference losses."""
    nats_by_label = (
        result.references_nats if result is not None else _summary_references(run_dir)
    )
    return {
        one_line(label): float(nats)
        for label, nats in nats_by_label.items()
        if math.isfinite(nats)
    }


def operators(result: RunResult | None, run_dir: Path) -> list[list[str]]:
    """Heading and rows of the slowest operators; empty for a run without a profile."""
    if result is None:
        return _summary_table(run_dir, PROFILE_HEADINGS)
    slowest = result.profile.operators if result.profile is not None else ()
    return (
        [[one_line(cell) for cell in row] for row in operator_rows(slowest)]
        if slowest
        else []
    )


def _summary_ending(run_dir: Path) -> Ending:
    """Ending of a run without ``result.json``; done if the summary states no reason."""
    rows = _summary_table(run_dir, RESULTS_HEADINGS)
    line = next((row[1] for row in rows if len(row) > 1 and row[0] == "steps"), None)
    if line is None:
        return Ending(JobStatus.completed, None)
    steps = STEPS.match(line)
    if GAVE_UP.search(line):
        return Ending(JobStatus.failed, line)
    if steps and steps[1] != steps[2] and "train.max_seconds" not in line:
        return Ending(JobStatus.stopped, line)
    return Ending(JobStatus.completed, line)


def _summary_references(run_dir: Path) -> dict[str, float]:
    nats_by_label = {}
    for row in _summary_table(run_dir, RESULTS_HEADINGS)[1:]:
        if row[0].startswith("reference: ") and len(row) > 1:
            with contextlib.suppress(ValueError, IndexError):
                nats_by_label[row[0].removeprefix("reference: ")] = float(
                    row[1].split()[0]
                )
    return nats_by_label


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
