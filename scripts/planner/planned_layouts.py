"""Published runs with several axes of parallelism against the planner, for ``validate_plan
--layouts``.

Today's trainer is predicted with each row's layout, batch, sequence and checkpointing, as
``fsdptoys plan`` does, on the row's machine, and compared in reserved memory and in tokens per
second of one GPU. Speed is also compared after fitting the speed of matmuls to one row of a
machine, and by rank correlation over the layouts of one machine and model.

torchtitan's selective checkpointing recomputes every other matmul, and its loss of a split
vocabulary is PyTorch's (``loss_parallel``); the trainer has no setting for either, so torchtitan's
rows are predicted with them. Rows that differ only in settings that no prediction has (float8,
compilation, asynchronous tensor parallelism) share one. Rows that cannot be planned are listed with
the reason.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware
from fsdptoys.loss import vocabulary
from fsdptoys.memory import activation_checkpointing
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.calibrate import Case, calibrate, choose_parameters
from fsdptoys.plan.estimate import unit_traces
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.trace.fake_device import replaced
from fsdptoys.utils.tables import markdown_table
from scripts.common.progress import unit
from scripts.planner.loss_parallel import LossParallel
from scripts.planner.published_layouts import MACHINES, PublishedLayout, machine
from scripts.planner.published_torchtitan import keep_every_other_product

MEMORY_BAR = 0.08
RANK_BAR = 0.8
LEAST_ROWS = 3
"""Fewest layouts with a rank correlation."""


def predict_row(row: PublishedLayout, hardware: Hardware) -> Prediction:
    """Predict a row on a machine; caches of blocks and heads would take the row's for the
    trainer's, and are emptied."""
    parts: list[tuple[Any, str, Any]] = []
    if row.loss_parallel:
        parts.append((vocabulary, "_LogitsLoss", LossParallel))
    if row.checkpointing == "selective_torchtitan":
        contexts = "create_selective_checkpoint_contexts"
        parts.append(
            (activation_checkpointing, contexts, lambda _: keep_every_other_product())
        )
    with replaced(*parts):
        _forget()
        try:
            return fast_estimate(row.config(), hardware, row.gpus)
        finally:
            _forget()


def _forget() -> None:
    unit_traces._head.cache_clear()
    unit_traces._block.cache_clear()


@dataclass(frozen=True)
class PlannedLayout:
    """A row and its prediction."""

    row: PublishedLayout
    memory_gib: float
    tokens_per_second: float
    """Of one GPU, with nothing fitted."""
    fitted: float | None
    """The same with the speed of matmuls fitted to another row of the machine; None for that
    row."""

    @property
    def memory_met(self) -> bool | None:
        """Whether the memory is within its bar; None if none was published."""
        published = self.row.memory_gib
        return (
            None
            if published is None
            else abs(self.memory_gib / published - 1) <= MEMORY_BAR
        )

    def cells(self) -> list[str]:
        """Cells of the table."""
        row = self.row
        sizes = f"{row.batch_size} × {row.seq_len:,}"
        if row.micro_batches > 1:
            sizes += f" × {row.micro_batches}"
        memory = ["", f"{self.memory_gib:.1f}", "", ""]
        if row.memory_gib is not None:
            memory[0] = f"{row.memory_gib:.1f}"
            memory[2] = f"{self.memory_gib / row.memory_gib:.2f}"
            memory[3] = "met" if self.memory_met else "**missed**"
        speeds = [f"{row.speed:,.0f}", f"{self.tokens_per_second:,.0f}"]
        speeds += [
            f"{self.tokens_per_second / row.speed:.2f}",
            "fit" if row.fit else "",
        ]
        if self.fitted is not None:
            speeds[3] = f"{self.fitted / row.speed:.2f}"
        return [row.name, row.layout, sizes, *memory, *speeds, ", ".join(row.missing)]


@dataclass
class LayoutResults:
    """Predictions, and notes on fits."""

    planned: list[PlannedLayout] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def count_traces(rows: Sequence[PublishedLayout]) -> int:
    """Number of different layouts to trace."""
    return len({row.trace_key for row in rows if not row.unplanned})


def plan_layouts(rows: Sequence[PublishedLayout]) -> LayoutResults:
    """Predict the rows that can be planned, those with the fit of a machine first."""
    results = LayoutResults()
    fits: dict[str, Hardware] = {}
    predictions: dict[tuple[str, ...], tuple[float, float, float | None]] = {}
    planned: dict[str, PlannedLayout] = {}
    for row in sorted(
        (row for row in rows if not row.unplanned), key=lambda row: not row.fit
    ):
        key = row.trace_key
        if key not in predictions:
            with unit(row.name):
                hardware = machine(row.machine)
                if row.fit:
                    fits[row.machine] = fit_compute(row, hardware)
                    share = fits[row.machine].matmul_efficiency.value
                    results.notes.append(
                        f"{MACHINES[row.machine]}: {share:.3f} of the peak in matmuls, from "
                        f"“{row.name}”"
                    )
                plain = predict_row(row, hardware)
                seconds = None
                if row.machine in fits:
                    seconds = predict_row(row, fits[row.machine]).time.step_seconds
                memory = plain.memory.reserved_bytes / GIB
                predictions[key] = memory, plain.time.step_seconds, seconds
        memory, plain_seconds, seconds = predictions[key]
        fitted = None if row.fit or seconds is None else row.tokens / seconds
        planned[row.name] = PlannedLayout(
            row, memory, row.tokens / plain_seconds, fitted
        )
    results.planned = [planned[row.name] for row in rows if row.name in planned]
    return results


def fit_compute(row: PublishedLayout, hardware: Hardware) -> Hardware:
    """Fit the speed of matmuls to a row."""

    def seconds(changed: Hardware) -> float:
        return predict_row(row, changed).time.step_seconds

    case = Case(seconds, row.tokens / row.speed, row.name)
    return calibrate([case], hardware, choose_parameters(["compute"])).hardware


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. NaN if all values of
    one are equal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: np.ndarray = (counts.cumsum() - (counts + 1) / 2)[places.reshape(-1)]
    return shared


@dataclass(frozen=True)
class Ranking:
    """Rank correlation of tokens per second over the rows of one machine and model."""

    title: str
    rows: int
    value: float

    @property
    def met(self) -> bool:
        """Whether it is at least its bar."""
        return self.value >= RANK_BAR

    def cells(self) -> list[str]:
        """Cells of the table."""
        verdict = "met" if self.met else "**missed**"
        return [self.title, str(self.rows), f"{self.value:.2f}", str(RANK_BAR), verdict]


def rankings(planned: Sequence[PlannedLayout]) -> list[Ranking]:
    """Correlations over rows of equal numerics, and over all rows of a machine and model."""
    groups: defaultdict[tuple[str, str, str], list[PlannedLayout]] = defaultdict(list)
    for layout in planned:
        row = layout.row
        for numerics in ("all rows", row.numerics):
            groups[row.machine, row.model, numerics].append(layout)
    correlations = []
    for (key, model, numerics), members in groups.items():
        layouts = {(member.row.layout, member.tokens_per_second) for member in members}
        if len(layouts) >= LEAST_ROWS:
            published = [member.row.speed for member in members]
            value = rank_correlation(
                published, [member.tokens_per_second for member in members]
            )
            correlations.append(
                Ranking(f"{MACHINES[key]}, {model}, {numerics}", len(members), value)
            )
    return correlations


HEADER = [
    "row",
    "layout",
    "batch × tokens (× micro-batches)",
    "GiB: published",
    "predicted",
]
HEADER += ["ratio", "", "tokens/s: published", "predicted", "ratio", "ratio with fit"]
HEADER += ["not in the trace"]


def render_layouts(
    rows: Sequence[PublishedLayout], results: LayoutResults
) -> tuple[str, bool]:
    """The section, and whether every bar was met."""
    parts = ["\n".join(f"- Fitted: {note}" for note in results.notes)]
    for key, title in MACHINES.items():
        cells = [
            layout.cells() for layout in results.planned if layout.row.machine == key
        ]
        if cells:
            right = (2, 3, 4, 5, 7, 8, 9, 10)
            parts += [f"### {title}", markdown_table([HEADER, *cells], right)]
    ranked = rankings(results.planned)
    if ranked:
        cells = [["rows", "number", "Spearman", "bar", ""], *map(Ranking.cells, ranked)]
        parts += [
            "### Rank correlation of tokens/s",
            markdown_table(cells, right=(1, 2, 3)),
        ]
    unplanned = [_unplanned_cells(row) for row in rows if row.unplanned]
    if unplanned:
        cells = [["row", "machine", "layout", "tokens/s", "GiB", "reason"], *unplanned]
        parts += ["### Not planned", markdown_table(cells, right=(3, 4))]
    sources = dict.fromkeys(f"- {row.source}, {row.date}" for row in rows)
    met = [
        layout.memory_met for layout in results.planned if layout.memory_met is not None
    ]
    parts += ["### Sources", "\n".join(sources)]
    parts += [
        f"{met.count(False)} of {len(met)} memories are off by more than {MEMORY_BAR:.0%}."
    ]
    return "\n\n".join(filter(None, parts)), all(met) and all(
        ranking.met for ranking in ranked
    )


def _unplanned_cells(row: PublishedLayout) -> list[str]:
    speed = f"{row.mfu:.0%} MFU" if row.mfu is not None else ""
    if row.tokens_per_second is not None:
        speed = f"{row.tokens_per_second:,.0f}"
    memory = "" if row.memory_gib is None else f"{row.memory_gib:.1f}"
    return [row.name, MACHINES[row.machine], row.layout, speed, memory, row.unplanned]
