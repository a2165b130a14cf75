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

from fsdptoys.device.profile import Hardware
from fsdptoys.loss import vocabulary
from fsdptoys.memory import activation_checkpointing
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.calibrate import Case, calibrate, choose_parameters
from fsdptoys.plan.estimate import unit_traces
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.trace.fake_device import replaced
from scripts.common.progress import unit
from scripts.planner.loss_parallel import LossParallel
from scripts.planner.published_layouts import MACHINES, PublishedLayout, machine
from scripts.planner.published_torchtitan import keep_every_other_product

GIB = 2**30
MEMORY_BAR, RANK_BAR = 0.08, 0.8
LEAST_ROWS = 3
"""Fewest layouts with a rank correlation."""


@dataclass(frozen=True)
class Layout:
    """A row's layout."""

    row: PublishedLayout

    def predict(self, hardware: Hardware) -> Prediction:
        """Predict on a machine; caches of blocks and heads would take the row's for the trainer's,
        and are emptied."""
        loss = [(vocabulary, "_LogitsLoss", LossParallel)] if self.row.loss_parallel else []
        every_other = (
            activation_checkpointing,
            "create_selective_checkpoint_contexts",
            _keep_every_other,
        )
        kept = [every_other] if self.row.checkpointing == "selective_torchtitan" else []
        with replaced(*loss, *kept):
            _forget()
            try:
                return fast_estimate(self.row.config(), hardware, self.row.gpus)
            finally:
                _forget()

    def seconds(self, hardware: Hardware) -> float:
        """Seconds of a step."""
        return self.predict(hardware).time.step_seconds

    def reserved_bytes(self, hardware: Hardware) -> int:
        """Reserved memory of the rank that has most."""
        return self.predict(hardware).memory.reserved_bytes


def _keep_every_other(_: Any) -> Any:
    return keep_every_other_product()


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
        return None if published is None else abs(self.memory_gib / published - 1) <= MEMORY_BAR

    def cells(self) -> list[str]:
        """Cells of the table."""
        row = self.row
        sizes = f"{row.batch_size} × {row.seq_len:,}" + (
            f" × {row.micro_batches}" if row.micro_batches > 1 else ""
        )
        memory = ["", f"{self.memory_gib:.1f}", "", ""]
        if row.memory_gib is not None:
            verdict = "met" if self.memory_met else "**missed**"
            memory = [
                f"{row.memory_gib:.1f}",
                f"{self.memory_gib:.1f}",
                f"{self.memory_gib / row.memory_gib:.2f}",
                verdict,
            ]
        published = row.speed
        speeds = [
            f"{published:,.0f}",
            f"{self.tokens_per_second:,.0f}",
            f"{self.tokens_per_second / published:.2f}",
        ]
        fitted = (
            ["fit" if row.fit else ""]
            if self.fitted is None
            else [f"{self.fitted / published:.2f}"]
        )
        return [row.name, row.layout, sizes, *memory, *speeds, *fitted, ", ".join(row.missing)]


@dataclass
class LayoutResults:
    """Predictions, and notes on fits."""

    planned: list[PlannedLayout] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def count_traces(rows: Sequence[PublishedLayout]) -> int:
    """Number of different layouts to trace."""
    return len({row.trace_key for row in rows if not row.obstacle})


def plan_layouts(rows: Sequence[PublishedLayout]) -> LayoutResults:
    """Predict the rows that can be planned, those with the fit of a machine first."""
    results, fits = LayoutResults(), {}
    made: dict[tuple[str, ...], tuple[float, float, float | None]] = {}
    for row in sorted((row for row in rows if not row.obstacle), key=lambda row: not row.fit):
        if (key := row.trace_key) not in made:
            with unit(row.name):
                traced = Layout(row)
                hardware = machine(row.machine)
                if row.fit:
                    case = Case(traced.seconds, row.tokens / row.speed, row.name)
                    fits[row.machine] = calibrate(
                        [case], hardware, choose_parameters(["compute"])
                    ).hardware
                    share = fits[row.machine].matmul_efficiency.value
                    results.notes.append(
                        f"{MACHINES[row.machine]}: {share:.3f} of the peak in matmuls, from "
                        f"“{row.name}”"
                    )
                seconds = traced.seconds(fits[row.machine]) if row.machine in fits else None
                made[key] = traced.reserved_bytes(hardware) / GIB, traced.seconds(hardware), seconds
        memory, plain, seconds = made[key]
        fitted = None if row.fit or seconds is None else row.tokens / seconds
        results.planned.append(PlannedLayout(row, memory, row.tokens / plain, fitted))
    order = {row.name: index for index, row in enumerate(rows)}
    results.planned.sort(key=lambda planned: order[planned.row.name])
    return results


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. NaN if all values of
    one are equal."""
    ranks = np.array([_ranks(first), _ranks(second)])
    apart = ranks - ranks.mean(1, keepdims=True)
    scale = float(np.sqrt((apart[0] ** 2).sum() * (apart[1] ** 2).sum()))
    return float(apart[0] @ apart[1]) / scale if scale else float("nan")


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

    def line(self) -> str:
        """Cells of the table."""
        return (
            f"| {self.title} | {self.rows} | {self.value:.2f} | {RANK_BAR} | "
            f"{'met' if self.met else '**missed**'} |"
        )


def rankings(planned: Sequence[PlannedLayout]) -> list[Ranking]:
    """Correlations over rows of equal numerics, and over all rows of a machine and model."""
    groups: defaultdict[tuple[str, str, str], list[PlannedLayout]] = defaultdict(list)
    for each in planned:
        row = each.row
        for numerics in ("all rows", row.numerics):
            groups[row.machine, row.model, numerics].append(each)
    found = []
    for (key, model, numerics), members in groups.items():
        layouts = {(each.row.layout, each.tokens_per_second) for each in members}
        if len(layouts) >= LEAST_ROWS:
            published = [each.row.speed for each in members]
            value = rank_correlation(published, [each.tokens_per_second for each in members])
            found.append(Ranking(f"{MACHINES[key]}, {model}, {numerics}", len(members), value))
    return found


def render_layouts(
    rows: Sequence[PublishedLayout], results: LayoutResults
) -> tuple[list[str], bool]:
    """Lines of the section, and whether every bar was met."""
    header = [
        "row",
        "layout",
        "batch × tokens (× micro-batches)",
        "GiB: published",
        "predicted",
        "ratio",
        "",
    ]
    header += ["tokens/s: published", "predicted", "ratio", "ratio with fit", "not in the trace"]
    lines = [*(f"- Fitted: {note}" for note in results.notes), ""]
    for key, title in MACHINES.items():
        members = [each for each in results.planned if each.row.machine == key]
        if members:
            lines += [f"### {title}", "", f"| {' | '.join(header)} |"]
            lines += [
                "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |"
            ]
            lines += [*(f"| {' | '.join(each.cells())} |" for each in members), ""]
    ranked = rankings(results.planned)
    if ranked:
        lines += ["### Rank correlation of tokens/s", "", "| rows | number | Spearman | bar | |"]
        lines += ["| --- | ---: | ---: | ---: | --- |", *(each.line() for each in ranked), ""]
    lines += unplanned_table([row for row in rows if row.obstacle])
    lines += ["### Sources", ""]
    lines += [
        f"- {source}, {date}"
        for source, date in dict.fromkeys((row.source, row.date) for row in rows)
    ]
    missed = sum(each.memory_met is False for each in results.planned)
    count = sum(each.memory_met is not None for each in results.planned)
    lines += ["", f"{missed} of {count} memories are off by more than {MEMORY_BAR:.0%}."]
    return lines, not missed and all(each.met for each in ranked)


def unplanned_table(rows: Sequence[PublishedLayout]) -> list[str]:
    """Published rows without a prediction."""
    if not rows:
        return []
    lines = ["### Not planned", "", "| row | machine | layout | tokens/s | GiB | reason |"]
    lines += ["| --- | --- | --- | ---: | ---: | --- |"]
    for row in rows:
        speed = (
            f"{row.mfu:.0%} MFU"
            if row.tokens_per_second is None
            else f"{row.tokens_per_second:,.0f}"
        )
        memory = "" if row.memory_gib is None else f"{row.memory_gib:.1f}"
        cells = [row.name, MACHINES[row.machine], row.layout, speed, memory, row.obstacle]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
