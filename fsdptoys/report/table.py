"""Build the table of a sweep or of any runs: one row each, with the varying settings and the
results.

Values equal in all rows are listed above the table, and empty columns are left out; CSV and JSON
keep all columns, with raw values and units in the names. Numbers of unfinished rows cover the steps
they completed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fsdptoys.sweep import JobStatus, Skipped
from fsdptoys.utils.text import value_text

from .columns import (
    TableColumn,
    common_step,
    loss_columns,
    measured_columns,
    setting_column,
    text_column,
)
from .loss_agreement import Disagreement, find_disagreements
from .run_figures import is_profiled
from .runs_table import Collection, Record
from .setting_diff import (
    HEADINGS,
    Settings,
    as_override,
    differing,
    own_key,
    settings_of,
    source_notes,
)

MARK = " ≠"  # Appended to the name of a row whose losses disagree with its reference


@dataclass(frozen=True)
class Table:
    """Rows, columns and notes."""

    title: str
    records: list[Record]
    settings: list[Settings]  # All effective settings of each row
    columns: list[TableColumn]  # Displayed columns
    everything: list[TableColumn]  # Including empty ones and those equal in all rows
    everywhere: list[str]  # Values equal in all rows, as texts
    loss_step: int | None  # Step of the loss column; None if no row has steps
    notes: list[str]  # On definitions, comparability, disagreements and failures
    disagreements: dict[str, Disagreement] = field(default_factory=dict)
    """Row name → first difference from its reference."""
    skipped: list[Skipped] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def make_table(collection: Collection) -> Table:
    """Build the table of a collection."""
    records = collection.records
    settings = [settings_of(record) for record in records]
    step = common_step(records)
    disagreements = {
        disagreement.name: disagreement for disagreement in find_disagreements(records)
    }
    varied = list(
        dict.fromkeys(own_key(key) for record in records for key in record.varied or {})
    )
    chosen = _chosen(settings, varied, records)
    names = text_column("run", "Run", [record.name for record in records])
    statuses = text_column(
        "status", "Status", [record.status.value for record in records]
    )
    everything = [
        names,
        *chosen,
        statuses,
        *measured_columns(records),
        *loss_columns(records),
    ]
    displayed, everywhere = _fold(everything, records)
    displayed[0] = replace(
        names,
        cells=[
            replace(cell, text=cell.text + MARK * (cell.value in disagreements))
            for cell in names.cells
        ],
    )
    return Table(
        title=value_text(collection.title),
        records=list(records),
        settings=settings,
        columns=displayed,
        everything=everything,
        everywhere=everywhere,
        loss_step=step,
        notes=[
            *_definitions(records, everything),
            *source_notes(records),
            *(
                value_text(note)
                for record in records
                if record.run is not None
                for note in record.run.notes
            ),
            *(disagreement.sentence for disagreement in disagreements.values()),
            *(
                f"{value_text(record.name)} {record.status.value}: {value_text(record.reason)}"
                for record in records
                if record.reason
            ),
        ],
        disagreements=disagreements,
        skipped=list(collection.skipped),
        commands=list(collection.commands),
    )


def _chosen(
    settings: Sequence[Settings], varied: Sequence[str], records: Sequence[Record]
) -> list[TableColumn]:
    """Columns of the settings in ``HEADINGS``, then of varied and differing ones; empty columns are
    left out."""
    run_settings = [
        row
        for row, record in zip(settings, records, strict=True)
        if record.run is not None
    ]
    keys = [
        *HEADINGS,
        *(
            key
            for key in [*varied, *differing(run_settings, varied)]
            if key not in HEADINGS
        ),
    ]
    columns = [setting_column(key, settings) for key in dict.fromkeys(keys)]
    return [column for column in columns if not column.empty]


def _fold(
    columns: Sequence[TableColumn], records: Sequence[Record]
) -> tuple[list[TableColumn], list[str]]:
    """Split columns into those that differ among the rows, and texts for those that do not."""
    displayed = []
    settings = []
    numbers = []
    for column in columns:
        # A row without a recorded run and without a value does not count.
        cells = zip(column.cells, records, strict=True)
        counted = [
            cell
            for cell, record in cells
            if cell.value is not None or record.run is not None
        ]
        same = (
            len(
                {(str(cell.value) if column.setting else cell.text) for cell in counted}
            )
            == 1
        )
        if column.empty and column.name != "run":
            continue
        if column.setting and same:
            value = counted[0].value
            if value is not None:
                settings.append(as_override(column.name, value))
        elif column.name == "status":
            if any(record.status is not JobStatus.completed for record in records):
                displayed.append(column)
        elif column.name != "run" and same and len(counted) > 1:
            numbers.append(f"{column.heading} {counted[0].text}")
        else:
            displayed.append(column)
    return displayed, [*([" ".join(settings)] if settings else []), *numbers]


DEFINITIONS = {
    "step_time": (
        "Step time, tokens/s and MFU are medians without the first steps of each start "
        "(metrics.warmup_steps); in brackets the 10th and the 90th percentile."
    ),
    "loss": "A loss is the mean over the global batch of its step, before the update.",
    "memory_": (
        "Memory is rank 0's: allocated after the last step, the highest reserved, and the "
        "allocator's peak. On a CPU it is counted in some steps."
    ),
    "resident_set": "Host memory is the resident set of rank 0's process, including Python.",
}
"""Beginning of the names of columns → sentence that defines their numbers."""


def _definitions(
    records: Sequence[Record], columns: Sequence[TableColumn]
) -> list[str]:
    """Sentences that define the numbers of the rows."""
    names = [column.name for column in columns if not column.empty]
    notes = [
        sentence
        for prefix, sentence in DEFINITIONS.items()
        if any(name.startswith(prefix) for name in names)
    ]
    if "loss" in names and "step_time_seconds" not in names:
        notes.append(
            "No row has a step after its warm-up (metrics.warmup_steps), so there is no step time."
        )
    profiled = [
        value_text(record.name)
        for record in records
        if record.run is not None
        and record.run.results.step_time_seconds is not None
        and is_profiled(record.run)
    ]
    if profiled:
        notes.append(
            "Steps under the profiler (profile.enabled=true) are slower; the medians include "
            f"them: {', '.join(profiled)}."
        )
    return notes
