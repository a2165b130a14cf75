"""Build the table of a sweep or of any runs: one row each, with the varying settings and the results.

Values equal in all rows are listed above the table, and empty columns are left out; CSV and JSON keep all columns, with
raw values and units in the names. Numbers of unfinished rows cover the steps they completed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdptoys.sweep import JobStatus, Skipped
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.text import value_text

from .columns import (
    TableCell,
    TableColumn,
    common_step,
    forecast_columns,
    loss_columns,
    measured_columns,
    measured_steps,
    name_column,
    setting_column,
    status_column,
)
from .comparability import source_notes
from .loss_agreement import Disagreement, find_disagreements
from .runs_table import Collection, Record
from .setting_diff import HEADINGS, Settings, as_word, differing, own_key, settings_of

MARK = " ≠"
"""Appended to the name of a row whose losses disagree with its reference."""


@dataclass(frozen=True)
class Table:
    """Rows, columns and notes."""

    title: str
    records: list[Record]
    settings: list[Settings]
    """All effective settings of each row."""
    columns: list[TableColumn]
    """Displayed columns."""
    everything: list[TableColumn]
    """All columns, including empty ones and those equal in all rows."""
    everywhere: list[str]
    """Values equal in all rows, as texts."""
    loss_step: int | None
    """Step of the loss column; None if no row has steps."""
    notes: list[str]
    """Sentences on definitions, comparability, disagreements and failures."""
    disagreements: dict[str, Disagreement] = field(default_factory=dict)
    """Row name → first difference from its reference."""
    skipped: list[Skipped] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def make_table(collection: Collection) -> Table:
    """Build the table of a collection."""
    records = collection.records
    settings = [settings_of(record) for record in records]
    step = common_step(records)
    disagreements = {found.name: found for found in find_disagreements(records)}
    varied = list(dict.fromkeys(own_key(key) for record in records for key in record.varied or {}))
    chosen = _chosen(settings, varied, records)
    measured = [*measured_columns(records), *loss_columns(records, step), *forecast_columns(records)]
    everything = [name_column(records), *chosen, status_column(records), *measured]
    shown, everywhere = _fold(everything, records)
    return Table(
        title=value_text(collection.title),
        records=list(records),
        settings=settings,
        columns=[_mark(column, records, disagreements) for column in shown],
        everything=everything,
        everywhere=everywhere,
        loss_step=step,
        notes=[
            *_how(records, shown, everywhere, step),
            *source_notes(records),
            *(value_text(note) for record in records if record.run is not None for note in record.run.notes),
            *(found.sentence for found in disagreements.values()),
            *(
                f"{value_text(each.name)} {each.status.value}: {value_text(each.reason)}"
                for each in records
                if each.reason
            ),
        ],
        disagreements=disagreements,
        skipped=list(collection.skipped),
        commands=list(collection.commands),
    )


def _chosen(settings: Sequence[Settings], varied: Sequence[str], records: Sequence[Record]) -> list[TableColumn]:
    """Columns of the settings in ``HEADINGS``, then of varied and differing ones; empty columns are left out."""
    known = [row for row, record in zip(settings, records, strict=True) if record.run is not None]
    keys = [*HEADINGS, *(key for key in [*varied, *differing(known, varied)] if key not in HEADINGS)]
    columns = [setting_column(key, settings, records) for key in dict.fromkeys(keys)]
    return [column for column in columns if not column.empty]


def _fold(columns: Sequence[TableColumn], records: Sequence[Record]) -> tuple[list[TableColumn], list[str]]:
    """Split columns into those that differ among the rows, and texts for those that do not."""
    shown, settings, numbers = [], [], []
    for column in columns:
        told = [cell for cell, record in zip(column.cells, records, strict=True) if _is_told(cell, record)]
        same = len({(str(cell.value) if column.setting else cell.text) for cell in told}) == 1
        if column.empty and column.name != "run":
            continue
        if column.setting and same:
            value = told[0].value
            if value is not None:
                settings.append(as_word(column.name, value))
        elif column.name == "status":
            if any(record.status is not JobStatus.done for record in records):
                shown.append(column)
        elif column.name != "run" and same and len(told) > 1:
            numbers.append(f"{column.heading} {told[0].text}")
        else:
            shown.append(column)
    return shown, [*([" ".join(settings)] if settings else []), *numbers]


def _is_told(cell: TableCell, record: Record) -> bool:
    """Whether a row counts in comparisons: a row without a recorded run and without a value does not."""
    return cell.value is not None or record.run is not None


def _mark(column: TableColumn, records: Sequence[Record], disagreements: dict[str, Disagreement]) -> TableColumn:
    if column.name != "run" or not disagreements:
        return column
    cells = [
        TableCell(cell.value, cell.text + MARK * (record.name in disagreements))
        for cell, record in zip(column.cells, records, strict=True)
    ]
    return TableColumn(column.name, column.heading, cells, column.numeric, column.weight, column.setting)


def _is_profiled(run: RecordedRun) -> bool:
    profile = run.tree.get("profile")
    measured = run.results.step_time_seconds is not None
    return measured and isinstance(profile, dict) and profile.get("enabled") is True


def _how(
    records: Sequence[Record], shown: Sequence[TableColumn], everywhere: Sequence[str], step: int | None
) -> list[str]:
    runs = [record.run for record in records if record.run is not None and record.run.steps]
    counts = sorted({measured_steps(run) for run in runs if run.results.step_time_seconds is not None})
    warmups = sorted({run.results.warmup_steps for run in runs})
    names = {column.name for column in shown}
    told = " ".join(everywhere)
    notes = []
    if counts:
        over = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        first = f"{warmups[0]}" if len(warmups) == 1 else f"{warmups[0]} to {warmups[-1]}"
        notes.append(
            f"Step time, tokens/s and MFU are medians over {over} step{'s' * (counts[-1] != 1)} of a row, without the "
            f"first {first} of each start; in brackets the 10th and the 90th percentile."
        )
        profiled = [value_text(each.name) for each in records if each.run is not None and _is_profiled(each.run)]
        if profiled:
            notes.append(
                f"Steps under the profiler (profile.enabled=true) are slower, and are in the medians of "
                f"{', '.join(profiled)}."
            )
    elif runs:
        notes.append("No row has a step after its warm-up (metrics.warmup_steps), so there is no step time.")
    if "loss" in names or "Loss after" in told:
        notes.append(f"The loss after {step} step{'s' * (step != 1)} is that of step {step}, before its update.")
    if any(name.startswith("memory_") for name in names) or "Memory " in told:
        notes.append(
            "Memory is rank 0's: allocated after the last step, the highest reserved, and the allocator's peak."
        )
    if any(name.startswith("resident_set") for name in names) or "esident set" in told:
        on_cpu = any(run.device_type == "cpu" for run in runs)
        notes.append(
            ("There is no device memory on a CPU; in its place stands" if on_cpu else "Of host memory it tells")
            + " the resident set of rank 0's process."
        )
    if any(name.startswith("predicted_") for name in names) or "Predicted" in told:
        notes.append("What was predicted stands with the share by which it is over what was measured.")
    return notes
