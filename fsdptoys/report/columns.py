"""The columns of a table: what each is called, its cells raw and as shown, and which stay where room is short."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.device import GIB
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.results import (
    Spread,
)
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.text import value_text

from .runs_table import Record
from .setting_diff import Settings, heading, own_key

NOTHING = "–"
"""Stands where a row has no value."""


@dataclass(frozen=True)
class Cell:
    """One value of a row."""

    value: Any
    """Raw, in the unit that the column's name tells; None where there is none."""
    text: str
    """As shown, in the unit of the heading."""
    brief: str | None = None
    """As shown where room is short."""


EMPTY = Cell(None, NOTHING)


@dataclass(frozen=True)
class Column:
    """One number or word of every row, in the order of the rows."""

    name: str
    """For programs, with the unit of the values."""
    heading: str
    """For people, with the unit of the texts."""
    cells: list[Cell]
    numeric: bool
    weight: int
    """Where room is short the lightest go first; those from ``STAYS`` on never do."""
    setting: bool = False
    """Whether it was chosen rather than measured."""

    @property
    def values(self) -> list[Any]:
        """The raw values."""
        return [cell.value for cell in self.cells]

    @property
    def empty(self) -> bool:
        """Whether no row has a value."""
        return all(cell.value is None for cell in self.cells)


STAYS = 100
"""Weight of what a table cannot do without."""


@dataclass(frozen=True)
class Measure:
    """A number of every run."""

    name: str
    heading: str
    read: Callable[[RecordedRun], float | Spread | None]
    weight: int
    factor: float = 1.0
    """From the unit of the value to that of the heading."""
    shows_spread: bool = False


@dataclass(frozen=True)
class Forecast:
    """A number that was predicted, and what it is held against."""

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


def name_column(records: Sequence[Record]) -> Column:
    """What the rows are called."""
    return Column("run", "Run", [Cell(record.name, value_text(record.name)) for record in records], False, STAYS)


def status_column(records: Sequence[Record]) -> Column:
    """How the rows ended."""
    return Column("status", "Status", [Cell(each.status.value, each.status.value) for each in records], False, STAYS)


def setting_column(key: str, settings: Sequence[Settings], records: Sequence[Record]) -> Column:
    """One setting of every row; of those that wrote nothing, what a sweep varies and its words say."""
    cells = []
    for row, record in zip(settings, records, strict=True):
        typed = {own_key(word): text for word, text in (record.varied or {}).items()}
        value = row.get(key, typed.get(key)) if record.run is None else row.get(key)
        if value is None and not (record.run is not None and key in row):
            cells.append(EMPTY)
        else:
            cells.append(Cell(value if value is not None else "null", _shown(value)))
    numeric = all(isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool) for cell in cells)
    return Column(key, heading(key), cells, numeric, STAYS, setting=True)


def measured_columns(records: Sequence[Record]) -> list[Column]:
    """Medians and memory; the resident set where the device is the host, or something is offloaded to it."""
    columns = {measure.name: _measured(measure, records) for measure in MEASURES}
    runs = [record.run for record in records if record.run is not None]
    if not any(not _on_device(run) or _offloads(run) for run in runs):
        del columns["resident_set_gib"], columns["resident_set_peak_gib"]
    elif all(run.results.resident_set_peak_gib is not None for run in runs):
        del columns["resident_set_gib"]  # what the peak tells better
    return list(columns.values())


def forecast_columns(records: Sequence[Record]) -> list[Column]:
    """What was predicted, with its share over what was measured."""
    return [_foretold(forecast, records) for forecast in FORECASTS]


def loss_columns(records: Sequence[Record], step: int | None) -> list[Column]:
    """The loss of one step, which all finished rows have done, and the last on the held-out part."""
    columns = []
    if step is not None:
        losses = [_number_cell(_loss_at(record, step), 4) for record in records]
        plural = "s" * (step != 1)
        columns.append(Column("loss", f"Loss after {step} step{plural}", losses, True, 88))
    held_out = [_number_cell(each.run.results.eval_loss if each.run else None, 4) for each in records]
    columns.append(Column("eval_loss", "Held-out loss", held_out, True, 50))
    return columns


def common_step(records: Sequence[Record]) -> int | None:
    """The fewest steps of a finished row, or of any where none has finished."""
    runs = [record.run for record in records if record.run is not None and record.run.steps]
    done = [record.run for record in records if record.status is JobStatus.done and record.run in runs]
    return min((run.steps[-1].step for run in done or runs if run is not None), default=None)


def measured_steps(run: RecordedRun) -> int:
    """How many steps medians are over: those that made an update, after the warm-up of each start."""
    results = run.results
    return sum(
        not metrics.skipped and not _warms_up(metrics, results.starts, results.warmup_steps) for metrics in run.steps
    )


def spread_of(run: RecordedRun, name: str) -> Spread | None:
    """Median and percentiles of a measure that has them."""
    value = next(measure.read(run) for measure in MEASURES if measure.name == name)
    return value if isinstance(value, Spread) else None


def forecast_difference(run: RecordedRun, name: str) -> float | None:
    """Share of what was measured by which a prediction is over it."""
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


def _measured(measure: Measure, records: Sequence[Record]) -> Column:
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
            cells.append(Cell(median, f"{brief} ({low}–{high})", brief))
        else:
            cells.append(Cell(median, brief))
    return Column(measure.name, measure.heading, cells, True, measure.weight)


def _foretold(forecast: Forecast, records: Sequence[Record]) -> Column:
    predicted = [forecast.predicted(record.run) if record.run is not None else None for record in records]
    digits = _digits([value * forecast.factor if value is not None else None for value in predicted])
    cells = []
    for record, value in zip(records, predicted, strict=True):
        if value is None or record.run is None:
            cells.append(EMPTY)
            continue
        brief = _number(value * forecast.factor, digits)
        difference = forecast_difference(record.run, forecast.name)
        cells.append(Cell(value, f"{brief} ({difference:+.0%})" if difference is not None else brief, brief))
    return Column(forecast.name, forecast.heading, cells, True, forecast.weight)


def _loss_at(record: Record, step: int) -> float | None:
    steps = record.run.steps if record.run is not None else []
    return next((metrics.loss for metrics in steps if metrics.step == step), None)


def _number_cell(value: float | None, digits: int) -> Cell:
    return EMPTY if value is None else Cell(value, _number(value, digits))


def _digits(values: Sequence[float | None]) -> int:
    """Decimals with which the smallest of the numbers has three digits that count, three at most."""
    smallest = min((abs(value) for value in values if value and math.isfinite(value)), default=1.0)
    return min(3, max(0, 2 - math.floor(math.log10(smallest))))


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)


def _shown(value: Any) -> str:
    """A setting in a cell: a switch as yes or no."""
    return ("yes" if value else "no") if isinstance(value, bool) else value_text(value)
