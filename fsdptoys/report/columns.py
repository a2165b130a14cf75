"""Columns of a table: headings, raw and formatted cells, and the order in which narrow terminals
drop them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from fsdptoys.device import GIB
from fsdptoys.metrics.results import RunResults, Spread
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.text import counted, fitting_unit, value_text

from .runs_table import Record
from .setting_diff import HEADINGS, Settings

STAYS = 100  # Weight of columns that are never dropped


@dataclass(frozen=True)
class TableCell:
    """One value of a row."""

    value: Any  # Raw, in the unit given by the column's name; None if the row has none
    text: str  # Formatted, in the unit of the heading
    brief: str | None = None  # Shorter text for narrow terminals


EMPTY = TableCell(None, "–")


@dataclass(frozen=True)
class TableColumn:
    """One cell per row, in row order."""

    name: str  # Key in CSV and JSON; its suffix is the unit of the raw values
    heading: str  # Displayed; names the unit of the formatted texts
    cells: list[TableCell]
    numeric: bool
    weight: int
    """Narrow terminals drop the lightest columns first, and never those of ``STAYS`` or more."""
    setting: bool = False  # Whether it holds a setting and not a measurement

    @property
    def values(self) -> list[Any]:
        """The raw values."""
        return [cell.value for cell in self.cells]

    @property
    def empty(self) -> bool:
        """Whether no row has a value."""
        return all(cell.value is None for cell in self.cells)


@dataclass(frozen=True)
class Measure:
    """A measured quantity of a run."""

    name: str  # Attribute of :class:`~fsdptoys.metrics.results.RunResults`
    heading: str  # Without the unit of memory, which fits the largest value
    weight: int
    # Converts the raw unit to the unit of the heading; memory has its own
    factor: float = 1.0
    shows_spread: bool = False  # Whether cells show the percentiles of a spread

    def read(self, run: RecordedRun | None) -> float | Spread | None:
        """The value of a run, in the raw unit."""
        return getattr(run.results, self.name) if run is not None else None

    def export(self, run: RecordedRun | None) -> dict[str, float | None]:
        """Key → raw number, with a key for each percentile of a spread; None without a value."""
        value = self.read(run)
        if get_type_hints(RunResults)[self.name] != Spread | None:
            return {self.name: _median(value)}
        return {
            f"{self.name}_{part}": getattr(value, part, None)
            for part in ("median", "p10", "p90")
        }


MEASURES = (
    Measure("step_time_seconds", "Step Time (ms)", STAYS, 1e3, True),
    Measure("memory_allocated_gib", "Memory allocated", 60),
    Measure("memory_reserved_gib", "Memory Reserved", 90),
    Measure("memory_peak_gib", "Peak memory", 80),
    Measure("memory_host_gib", "Offloaded", 30),
    Measure("resident_set_gib", "Resident set", 20),
    Measure("resident_set_peak_gib", "Peak resident set", 55),
    Measure("tokens_per_second", "tokens/s", 70),
    Measure("mfu", "MFU (%)", 65, 100.0),
    Measure("data_stall", "Data stall (%)", 25, 100.0),
)


def text_column(name: str, heading: str, texts: Sequence[str]) -> TableColumn:
    """Names or statuses of the rows."""
    return TableColumn(
        name,
        heading,
        [TableCell(text, value_text(text)) for text in texts],
        False,
        STAYS,
    )


def setting_column(key: str, settings: Sequence[Settings]) -> TableColumn:
    """One setting of every row."""
    cells = []
    for row in settings:
        value = row.get(key)
        text = (
            ("yes" if value else "no") if isinstance(value, bool) else value_text(value)
        )
        cell = TableCell("null" if value is None else value, text)
        cells.append(cell if key in row else EMPTY)
    numeric = all(type(cell.value) in (int, float) for cell in cells)
    heading = HEADINGS.get(key, value_text(key.removesuffix(".name")))
    return TableColumn(key, heading, cells, numeric, STAYS, setting=True)


def measured_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Medians and memory; columns of host memory only if a run uses a CPU device or offloads."""
    columns = {
        measure.name: _number_column(
            measure, [measure.read(record.run) for record in records]
        )
        for measure in MEASURES
    }
    runs = [record.run for record in records if record.run is not None]
    if not any(run.device_type == "cpu" or _offloads(run) for run in runs):
        del columns["resident_set_gib"], columns["resident_set_peak_gib"]
    elif all(run.results.resident_set_peak_gib is not None for run in runs):
        del columns["resident_set_gib"]  # the peak is more informative
    if not any(run.results.memory_host_gib for run in runs):
        del columns["memory_host_gib"]
    return list(columns.values())


def loss_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Loss and held-out loss, each at its last common step.

    Without a common step, each row has its last value, and the heading says so.
    """
    columns = []
    for name, title, weight in (
        ("loss", "Loss", 88),
        ("eval_loss", "Held-out loss", 50),
    ):
        losses = [_losses(record, name) for record in records]
        step = common_step(records, name)
        where = "of the last step" if step is None else f"after {counted(step, 'step')}"
        cells = []
        for by_step in losses:
            value = by_step.get(step or max(by_step, default=0))
            cells.append(
                EMPTY if value is None else TableCell(value, _number(value, 4))
            )
        columns.append(TableColumn(name, f"{title} {where}", cells, True, weight))
    return columns


def _losses(record: Record, name: str) -> dict[int, float]:
    """Step → loss, or held-out loss, of a row."""
    steps = record.run.steps if record.run is not None else ()
    losses = {metrics.step: getattr(metrics, name) for metrics in steps}
    return {step: loss for step, loss in losses.items() if loss is not None}


def common_step(records: Sequence[Record], name: str = "loss") -> int | None:
    """Last step with a loss in all finished rows, or in all rows if none has finished."""
    losses_of_rows = [
        (record.status, losses)
        for record in records
        if (losses := _losses(record, name))
    ]
    finished_steps = [
        losses.keys()
        for status, losses in losses_of_rows
        if status is JobStatus.completed
    ]
    steps = finished_steps or [losses.keys() for _, losses in losses_of_rows]
    return max(set.intersection(*map(set, steps)), default=None) if steps else None


def measured_steps(run: RecordedRun) -> int:
    """Number of steps in the medians: not skipped, and after the warm-up of each start."""
    starts = run.results.starts
    warmup = run.results.warmup_steps
    return sum(
        not metrics.skipped
        and not any(start < metrics.step <= start + warmup for start in starts)
        for metrics in run.steps
    )


def _offloads(run: RecordedRun) -> bool:
    switches = ("cpu_offload", "optimizer_offload", "activation_offload")
    return any(look_up(run.tree, f"memory.{switch}") is True for switch in switches)


def _number_column(
    measure: Measure, values: Sequence[float | Spread | None]
) -> TableColumn:
    """Numbers or medians, some with the ends of their spread in brackets."""
    medians = list(map(_median, values))
    heading = measure.heading
    factor = measure.factor
    if measure.name.endswith("_gib"):
        unit, size = fitting_unit(
            GIB * max(filter(math.isfinite, filter(None, medians)), default=0.0)
        )
        heading, factor = f"{heading} ({unit})", GIB / size
    digits = _digits(medians, factor)
    cells = []
    for value, median in zip(values, medians, strict=True):
        if median is None:
            cells.append(EMPTY)
            continue
        brief = _number(median * factor, digits)
        text = brief
        if measure.shows_spread and isinstance(value, Spread):
            low, high = (
                _number(part * factor, digits) for part in (value.p10, value.p90)
            )
            text = f"{brief} ({low}–{high})"
        cells.append(TableCell(median, text, brief))
    return TableColumn(measure.name, heading, cells, True, measure.weight)


def _median(value: float | Spread | None) -> float | None:
    return value.median if isinstance(value, Spread) else value


def _digits(values: Sequence[float | None], factor: float) -> int:
    """Decimals that give the smallest number three significant digits, at most six."""
    sizes = (abs(value * factor) for value in values if value)
    # Products may overflow, or be zero
    smallest = min(filter(math.isfinite, sizes), default=1.0) or 1.0
    return min(6, max(0, 2 - math.floor(math.log10(smallest))))


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)
