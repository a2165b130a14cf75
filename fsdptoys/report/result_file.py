"""Read facts found only in ``summary.md``: why a run ended, reference losses, and the profiler's operators."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.metrics.config import SUMMARY_FILE
from fsdptoys.sweep import JobStatus
from fsdptoys.utils.regular_file import read_regular

LARGEST_FILE_BYTES = 2**24

REFERENCE = re.compile(r"reference: (?P<label>.*)")
STEPS = re.compile(r"(?P<done>[0-9]{1,16}) of (?P<planned>[0-9]{1,16}); (?P<why>.+)")
PLANNED_END = re.compile(r"all steps done|train\.max_seconds=\S+ reached")
GAVE_UP = re.compile(r"not finite \(train\.max_skipped")


@dataclass(frozen=True)
class Ending:
    """How a run with a summary ended."""

    status: JobStatus
    text: str | None
    """The summary's text, with steps and reason; None if it has none."""


def read_ending(run_dir: Path) -> Ending:
    """Why a run with a summary ended; done if the summary states no reason."""
    told = [row[1] for row in read_table(run_dir, "What came out") if len(row) > 1 and row[0] == "steps"]
    match = STEPS.fullmatch(told[0]) if told else None
    if match is None:
        return Ending(JobStatus.done, told[0] if told else None)
    if GAVE_UP.search(match["why"]):
        status = JobStatus.failed
    elif PLANNED_END.fullmatch(match["why"]) or int(match["done"]) >= int(match["planned"]):
        status = JobStatus.done
    else:
        status = JobStatus.stopped
    return Ending(status, told[0])


def read_references(run_dir: Path) -> dict[str, float]:
    """Label → nats per token of the reference losses; empty without a summary or such rows."""
    references = {}
    for row in read_table(run_dir, "What came out")[1:]:
        named = REFERENCE.fullmatch(row[0])
        if named and len(row) > 1:
            try:
                nats = float(row[1].split()[0])
            except (ValueError, IndexError):
                continue
            if math.isfinite(nats):
                references[named["label"]] = nats
    return references


def read_operators(run_dir: Path) -> list[list[str]]:
    """Heading and rows of the most expensive operators; empty for a run without a profile."""
    return read_table(run_dir, "Where the time and the memory went")


def read_table(run_dir: Path, heading: str) -> list[list[str]]:
    """First Markdown table below a heading, without separator line and backticks; empty if there is none."""
    try:
        text = read_regular(run_dir / SUMMARY_FILE, LARGEST_FILE_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return []
    _, found, below = text.partition(f"\n## {heading}\n")
    lines = iter(below.partition("\n## ")[0].splitlines())
    rows = []
    for line in lines:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append([cell.strip().replace(r"\|", "|").strip("`") for cell in cells])
        elif rows:
            break
    return [row for index, row in enumerate(rows) if index != 1] if found else []
