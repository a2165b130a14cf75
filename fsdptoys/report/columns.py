"""Columns of a table: headings, raw and formatted cells, and the order in which narrow terminals
drop them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.metrics.results import Spread
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.from_tree import look_up
from fsdptoys.utils.text import counted, fitting_unit, value_text

from .runs_table import Record
from .setting_diff import HEADINGS, Settings, own_key

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
    factor: float = 1.0  # Converts the raw unit to the unit of the heading; memory has its own
    shows_spread: bool = False

    def read(self, run: RecordedRun | None) -> float | Spread | None:
        """The value of a run, in the raw unit."""
        return getattr(run.results, self.name) if run is not None else None


@dataclass(frozen=True)
class PredictedMeasure:
    """A predicted quantity of a run and its measured counterpart."""

    measure: str  # Name of the measured counterpart
    heading: str
    weight: int
    read: Callable[[Prediction], float]
    factor: float = 1.0

    @property
    def name(self) -> str:
        """Name of the prediction in CSV and JSON."""
        return f"predicted_{self.measure}"

    def predicted(self, run: RecordedRun | None) -> float | None:
        """The prediction for a run; None without one, and for reserved memory on a CPU, whose
        allocator keeps none."""
        if run is None or run.prediction is None:
            return None
        if self.measure == "memory_reserved_gib" and run.device_type == "cpu":
            return None
        return self.read(run.prediction)

    def difference(self, run: RecordedRun | None) -> float | None:
        """Relative error, ``predicted / measured - 1``."""
        predicted = self.predicted(run)
        measured = _median(getattr(run.results, self.measure)) if run is not None else None
        return predicted / measured - 1 if predicted is not None and measured else None


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

PREDICTED_MEASURES = (
    PredictedMeasure(
        "step_time_seconds", "Predicted step (ms)", 40, lambda each: each.time.step_seconds, 1e3
    ),
    PredictedMeasure(
        "memory_peak_gib", "Predicted peak", 30, lambda each: each.memory.peak_bytes / GIB
    ),
    PredictedMeasure(
        "memory_reserved_gib",
        "Predicted reserved",
        35,
        lambda each: each.memory.reserved_bytes / GIB,
    ),
)


def text_column(name: str, heading: str, texts: Sequence[str]) -> TableColumn:
    """Names or statuses of the rows."""
    return TableColumn(
        name, heading, [TableCell(text, value_text(text)) for text in texts], False, STAYS
    )


def setting_column(
    key: str, settings: Sequence[Settings], records: Sequence[Record]
) -> TableColumn:
    """One setting of every row; rows without a recorded run fall back to the overrides of their
    sweep job."""
    cells = []
    for row, record in zip(settings, records, strict=True):
        typed = {own_key(word): text for word, text in (record.varied or {}).items()}
        value = row.get(key, typed.get(key)) if record.run is None else row.get(key)
        if value is None and not (record.run is not None and key in row):
            cells.append(EMPTY)
        else:
            text = ("yes" if value else "no") if isinstance(value, bool) else value_text(value)
            cells.append(TableCell(value if value is not None else "null", text))
    numeric = all(
        isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool) for cell in cells
    )
    heading = HEADINGS.get(key, value_text(key.removesuffix(".name")))
    return TableColumn(key, heading, cells, numeric, STAYS, setting=True)


def measured_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Medians and memory; columns of host memory only if a run uses a CPU device or offloads."""
    columns = {}
    for measure in MEASURES:
        values = [measure.read(record.run) for record in records]
        values = values if measure.shows_spread else list(map(_median, values))
        columns[measure.name] = _number_column(measure, values, [None] * len(values))
    runs = [record.run for record in records if record.run is not None]
    if not any(run.device_type == "cpu" or _offloads(run) for run in runs):
        del columns["resident_set_gib"], columns["resident_set_peak_gib"]
    elif all(run.results.resident_set_peak_gib is not None for run in runs):
        del columns["resident_set_gib"]  # the peak is more informative
    if not any(run.results.memory_host_gib for run in runs):
        del columns["memory_host_gib"]
    return list(columns.values())


def predicted_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Predictions, each with its relative error."""
    runs = [record.run for record in records]
    return [
        _number_column(
            measure, list(map(measure.predicted, runs)), list(map(measure.difference, runs))
        )
        for measure in PREDICTED_MEASURES
    ]


def loss_columns(records: Sequence[Record], step: int | None) -> list[TableColumn]:
    """Loss at ``step`` (from :func:`common_step`; None omits the column), and the held-out loss of
    a common step.

    Without a common step, each row has its last held-out loss, and the heading says so.
    """
    runs = [record.run for record in records]
    evaluated = [_held_out_losses(run) if run else {} for run in runs]
    columns = []
    if step is not None:
        losses = [
            next((metrics.loss for metrics in run.steps if metrics.step == step), None)
            if run
            else None
            for run in runs
        ]
        heading = f"Loss after {counted(step, 'step')}"
        columns.append(TableColumn("loss", heading, list(map(_loss_cell, losses)), True, 88))
    last = {max(losses) for losses in evaluated if losses}
    if len(last) <= 1:
        heading, held_out = (
            "Held-out loss",
            [losses[max(losses)] if losses else None for losses in evaluated],
        )
    elif (common := common_eval_step(records)) is not None:
        heading = f"Held-out loss after {counted(common, 'step')}"
        held_out = [losses.get(common) for losses in evaluated]
    else:
        heading = f"Held-out loss (of steps {min(last)} to {max(last)})"
        held_out = [losses[max(losses)] if losses else None for losses in evaluated]
    return [*columns, TableColumn("eval_loss", heading, list(map(_loss_cell, held_out)), True, 50)]


def common_eval_step(records: Sequence[Record]) -> int | None:
    """Last step after which all finished rows, or all rows if none has finished, have a held-out
    loss."""
    rows = [
        (record.status is JobStatus.done, _held_out_losses(record.run))
        for record in records
        if record.run
    ]
    done = [losses.keys() for finished, losses in rows if finished and losses]
    steps = done or [losses.keys() for _, losses in rows if losses]
    return max(set.intersection(*map(set, steps)), default=None) if steps else None


def _held_out_losses(run: RecordedRun) -> dict[int, float]:
    return {
        metrics.step: metrics.eval_loss for metrics in run.steps if metrics.eval_loss is not None
    }


def common_step(records: Sequence[Record]) -> int | None:
    """Last step of the shortest finished row, or of the shortest row if none has finished."""
    runs = [record.run for record in records if record.run is not None and record.run.steps]
    done = [
        record.run for record in records if record.status is JobStatus.done and record.run in runs
    ]
    return min((run.steps[-1].step for run in done or runs if run is not None), default=None)


def measured_steps(run: RecordedRun) -> int:
    """Number of steps in the medians: not skipped, and after the warm-up of each start."""
    starts, warmup = run.results.starts, run.results.warmup_steps
    return sum(
        not metrics.skipped and not any(start < metrics.step <= start + warmup for start in starts)
        for metrics in run.steps
    )


def _offloads(run: RecordedRun) -> bool:
    switches = ("cpu_offload", "optimizer_offload", "activation_offload")
    return any(look_up(run.tree, f"memory.{switch}") is True for switch in switches)


def _number_column(
    measure: Measure | PredictedMeasure,
    values: Sequence[float | Spread | None],
    differences: Sequence[float | None],
) -> TableColumn:
    """Numbers or medians, each followed by the ends of its spread or its relative difference in
    brackets."""
    medians = list(map(_median, values))
    heading, factor = measure.heading, measure.factor
    if measure.name.endswith("_gib"):
        unit, size = fitting_unit(
            GIB * max(filter(math.isfinite, filter(None, medians)), default=0.0)
        )
        heading, factor = f"{heading} ({unit})", GIB / size
    digits = _digits(medians, factor)
    cells = []
    for value, median, difference in zip(values, medians, differences, strict=True):
        if median is None:
            cells.append(EMPTY)
            continue
        brief, bracket = _number(median * factor, digits), ""
        if isinstance(value, Spread):
            low, high = (_number(part * factor, digits) for part in (value.p10, value.p90))
            bracket = f" ({low}–{high})"
        elif difference is not None:
            bracket = f" ({difference:+.0%})"
        cells.append(TableCell(median, brief + bracket, brief))
    return TableColumn(measure.name, heading, cells, True, measure.weight)


def _median(value: float | Spread | None) -> float | None:
    return value.median if isinstance(value, Spread) else value


def _loss_cell(value: float | None) -> TableCell:
    return EMPTY if value is None else TableCell(value, _number(value, 4))


def _digits(values: Sequence[float | None], factor: float) -> int:
    """Decimals that give the smallest number three significant digits, at most six."""
    sizes = (abs(value * factor) for value in values if value)
    # Products may overflow, or be zero
    smallest = min(filter(math.isfinite, sizes), default=1.0) or 1.0
    return min(6, max(0, 2 - math.floor(math.log10(smallest))))


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)
