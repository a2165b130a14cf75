"""Columns of a table: headings, raw and formatted cells, and the order in which narrow terminals drop them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.device import GIB
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.results import Spread
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.text import value_text

from .runs_table import Record
from .setting_diff import Settings, heading, own_key

NOTHING = "–"
"""Shown in cells without a value."""


@dataclass(frozen=True)
class TableCell:
    """One value of a row."""

    value: Any
    """Raw, in the unit given by the column's name; None if the row has none."""
    text: str
    """Formatted, in the unit of the heading."""
    brief: str | None = None
    """Shorter text for narrow terminals."""


EMPTY = TableCell(None, NOTHING)


@dataclass(frozen=True)
class TableColumn:
    """One cell per row, in row order."""

    name: str
    """Key in CSV and JSON; its suffix is the unit of the raw values."""
    heading: str
    """Displayed; names the unit of the formatted texts."""
    cells: list[TableCell]
    numeric: bool
    weight: int
    """Narrow terminals drop the lightest columns first, and never those of ``STAYS`` or more."""
    setting: bool = False
    """Whether it holds a setting and not a measurement."""

    @property
    def values(self) -> list[Any]:
        """The raw values."""
        return [cell.value for cell in self.cells]

    @property
    def empty(self) -> bool:
        """Whether no row has a value."""
        return all(cell.value is None for cell in self.cells)


STAYS = 100
"""Weight of columns that are never dropped."""


@dataclass(frozen=True)
class Measure:
    """A measured quantity of a run."""

    name: str
    heading: str
    read: Callable[[RecordedRun], float | Spread | None]
    weight: int
    factor: float = 1.0
    """Converts the raw unit to the unit of the heading."""
    shows_spread: bool = False


@dataclass(frozen=True)
class Forecast:
    """A predicted quantity of a run and its measured counterpart."""

    name: str
    heading: str
    predicted: Callable[[RecordedRun], float | None]
    measured: Callable[[RecordedRun], float | None]
    weight: int
    factor: float = 1.0


def _on_device(run: RecordedRun) -> bool:
    return run.device_type != "cpu"


def _median(spread: Spread | None) -> float | None:
    return spread.median if spread is not None else None


MEASURES = (
    Measure("step_time_seconds", "Step Time (ms)", lambda run: run.results.step_time_seconds, STAYS, 1e3, True),
    Measure("memory_allocated_gib", "Memory allocated (GiB)", lambda run: run.results.memory_allocated_gib, 60),
    Measure("memory_reserved_gib", "Memory Reserved (GiB)", lambda run: run.results.memory_reserved_gib, 90),
    Measure("memory_peak_gib", "Peak memory (GiB)", lambda run: run.results.memory_peak_gib, 80),
    Measure("resident_set_gib", "Resident set (GiB)", lambda run: run.results.resident_set_gib, 20),
    Measure("resident_set_peak_gib", "Peak resident set (GiB)", lambda run: run.results.resident_set_peak_gib, 85),
    Measure("tokens_per_second", "tokens/s", lambda run: run.results.tokens_per_second, 70),
    Measure("mfu", "MFU (%)", lambda run: run.results.mfu, 65, 100.0),
    Measure("data_stall", "Data stall (%)", lambda run: run.results.data_stall, 25, 100.0),
)

FORECASTS = (
    Forecast(
        "predicted_step_time_seconds",
        "Predicted step (ms)",
        lambda run: run.prediction.time.step_seconds if run.prediction else None,
        lambda run: _median(run.results.step_time_seconds),
        40,
        1e3,
    ),
    Forecast(
        "predicted_memory_peak_gib",
        "Predicted peak (GiB)",
        lambda run: run.prediction.memory.peak_bytes / GIB if run.prediction and _on_device(run) else None,
        lambda run: run.results.memory_peak_gib,
        30,
    ),
    Forecast(
        "predicted_memory_reserved_gib",
        "Predicted reserved (GiB)",
        lambda run: run.prediction.memory.reserved_bytes / GIB if run.prediction and _on_device(run) else None,
        lambda run: run.results.memory_reserved_gib,
        35,
    ),
)


def name_column(records: Sequence[Record]) -> TableColumn:
    """Names of the rows."""
    return TableColumn(
        "run", "Run", [TableCell(record.name, value_text(record.name)) for record in records], False, STAYS
    )


def status_column(records: Sequence[Record]) -> TableColumn:
    """Status of each row."""
    return TableColumn(
        "status", "Status", [TableCell(each.status.value, each.status.value) for each in records], False, STAYS
    )


def setting_column(key: str, settings: Sequence[Settings], records: Sequence[Record]) -> TableColumn:
    """One setting of every row; rows without a recorded run fall back to the overrides of their sweep job."""
    cells = []
    for row, record in zip(settings, records, strict=True):
        typed = {own_key(word): text for word, text in (record.varied or {}).items()}
        value = row.get(key, typed.get(key)) if record.run is None else row.get(key)
        if value is None and not (record.run is not None and key in row):
            cells.append(EMPTY)
        else:
            cells.append(TableCell(value if value is not None else "null", _shown(value)))
    numeric = all(isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool) for cell in cells)
    return TableColumn(key, heading(key), cells, numeric, STAYS, setting=True)


def measured_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Medians and memory; resident set columns only if a run uses a CPU device or offloads to the host."""
    columns = {measure.name: _measured(measure, records) for measure in MEASURES}
    runs = [record.run for record in records if record.run is not None]
    if not any(not _on_device(run) or _offloads(run) for run in runs):
        del columns["resident_set_gib"], columns["resident_set_peak_gib"]
    elif all(run.results.resident_set_peak_gib is not None for run in runs):
        del columns["resident_set_gib"]  # the peak is more informative
    return list(columns.values())


def forecast_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Predictions, each with its relative error."""
    return [_foretold(forecast, records) for forecast in FORECASTS]


def loss_columns(records: Sequence[Record], step: int | None) -> list[TableColumn]:
    """Loss at ``step`` (from :func:`common_step`; None omits the column), and the last held-out loss."""
    columns = []
    if step is not None:
        losses = [_number_cell(_loss_at(record, step), 4) for record in records]
        plural = "s" * (step != 1)
        columns.append(TableColumn("loss", f"Loss after {step} step{plural}", losses, True, 88))
    held_out = [_number_cell(each.run.results.eval_loss if each.run else None, 4) for each in records]
    columns.append(TableColumn("eval_loss", "Held-out loss", held_out, True, 50))
    return columns


def common_step(records: Sequence[Record]) -> int | None:
    """Last step of the shortest finished row, or of the shortest row if none has finished."""
    runs = [record.run for record in records if record.run is not None and record.run.steps]
    done = [record.run for record in records if record.status is JobStatus.done and record.run in runs]
    return min((run.steps[-1].step for run in done or runs if run is not None), default=None)


def measured_steps(run: RecordedRun) -> int:
    """Number of steps in the medians: not skipped, and after the warm-up of each start."""
    results = run.results
    return sum(
        not metrics.skipped and not _warms_up(metrics, results.starts, results.warmup_steps) for metrics in run.steps
    )


def spread_of(run: RecordedRun, name: str) -> Spread | None:
    """Median and percentiles of a measure; None for one with a single value."""
    value = next(measure.read(run) for measure in MEASURES if measure.name == name)
    return value if isinstance(value, Spread) else None


def forecast_difference(run: RecordedRun, name: str) -> float | None:
    """Relative error of a prediction, ``predicted / measured - 1``."""
    forecast = next(forecast for forecast in FORECASTS if forecast.name == name)
    predicted, measured = forecast.predicted(run), forecast.measured(run)
    return predicted / measured - 1 if predicted is not None and measured else None


def _warms_up(metrics: StepMetrics, starts: Sequence[int], warmup_steps: int) -> bool:
    return any(start < metrics.step <= start + warmup_steps for start in starts)


def _offloads(run: RecordedRun) -> bool:
    memory = run.tree.get("memory")
    return isinstance(memory, dict) and any(
        memory.get(switch) is True for switch in ("cpu_offload", "optimizer_offload", "activation_offload")
    )


def _measured(measure: Measure, records: Sequence[Record]) -> TableColumn:
    read = [measure.read(record.run) if record.run is not None else None for record in records]
    medians = [value.median if isinstance(value, Spread) else value for value in read]
    shown = [value * measure.factor if value is not None else None for value in medians]
    digits = _digits(shown)
    cells = []
    for value, median in zip(read, medians, strict=True):
        if median is None:
            cells.append(EMPTY)
            continue
        brief = _number(median * measure.factor, digits)
        if measure.shows_spread and isinstance(value, Spread):
            low, high = (_number(part * measure.factor, digits) for part in (value.p10, value.p90))
            cells.append(TableCell(median, f"{brief} ({low}–{high})", brief))
        else:
            cells.append(TableCell(median, brief))
    return TableColumn(measure.name, measure.heading, cells, True, measure.weight)


def _foretold(forecast: Forecast, records: Sequence[Record]) -> TableColumn:
    predicted = [forecast.predicted(record.run) if record.run is not None else None for record in records]
    digits = _digits([value * forecast.factor if value is not None else None for value in predicted])
    cells = []
    for record, value in zip(records, predicted, strict=True):
        if value is None or record.run is None:
            cells.append(EMPTY)
            continue
        brief = _number(value * forecast.factor, digits)
        difference = forecast_difference(record.run, forecast.name)
        cells.append(TableCell(value, f"{brief} ({difference:+.0%})" if difference is not None else brief, brief))
    return TableColumn(forecast.name, forecast.heading, cells, True, forecast.weight)


def _loss_at(record: Record, step: int) -> float | None:
    steps = record.run.steps if record.run is not None else []
    return next((metrics.loss for metrics in steps if metrics.step == step), None)


def _number_cell(value: float | None, digits: int) -> TableCell:
    return EMPTY if value is None else TableCell(value, _number(value, digits))


def _digits(values: Sequence[float | None]) -> int:
    """Decimals that give the smallest number three significant digits, at most three."""
    smallest = min((abs(value) for value in values if value and math.isfinite(value)), default=1.0)
    return min(3, max(0, 2 - math.floor(math.log10(smallest))))


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)


def _shown(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else value_text(value)
