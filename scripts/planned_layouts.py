"""Published runs with several axes of parallelism against the planner, for ``validate_plan --layouts``.

Today's trainer is traced with each row's layout, batch, sequence and checkpointing, as ``fsdptoys plan`` does (at two
depths; all layers up to 32), or predicted in closed form where stages split the layers, on the row's machine, and
compared in reserved memory and in tokens per second of one GPU. Speed is also compared after fitting the speed of
matmuls to one row of a machine, and by rank correlation over the layouts of one machine and model.

torchtitan's selective checkpointing recomputes every other matmul, and its loss of a split vocabulary is PyTorch's
(``loss_parallel``); the trainer has no setting for either, so torchtitan's rows are traced with them. Rows that differ
only in settings that no trace has (float8, compilation, asynchronous tensor parallelism) share one trace. Rows that
cannot be planned are listed with the reason.
"""

import multiprocessing
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.loss import vocabulary
from fsdptoys.memory import activation_checkpointing
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.calibrate import Case, calibrate, choose_parameters
from fsdptoys.plan.estimate import unit_traces
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.trace.extrapolate_layers import choose_depths, extrapolate
from fsdptoys.plan.trace.fake_device import replaced
from fsdptoys.plan.trace.tracer import answer_one, tracing_environment
from scripts.loss_parallel import LossParallel
from scripts.progress import unit
from scripts.published_layouts import MACHINES, PublishedLayout, machine
from scripts.published_torchtitan import keep_every_other_product

GIB = 2**30
MEMORY_BAR, RANK_BAR = 0.08, 0.8
LEAST_ROWS = 3
"""Fewest layouts with a rank correlation."""
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class LayoutTrace:
    """Traces of a layout at one depth or two."""

    traces: list[Trace]
    depths: list[int]
    n_layers: int
    config: Config

    def replay(self, hardware: Hardware) -> Replay:
        """Replay on a machine, extrapolated to all layers."""
        kind = self.config.plan.allocator
        replays = [
            replay(each, hardware, build_allocator(kind, device_type=hardware.device_type)) for each in self.traces
        ]
        if len(replays) == 1:
            return replays[0]
        return extrapolate(replays[0], replays[1], (self.depths[0], self.depths[1]), self.n_layers)

    def seconds(self, hardware: Hardware) -> float:
        """Seconds of a step."""
        return self.replay(hardware).time().step_seconds

    def reserved_bytes(self, hardware: Hardware) -> int:
        """Reserved memory."""
        return self.replay(hardware).memory().reserved_bytes


@dataclass
class ClosedLayout:
    """A layout with stages, in closed form: traces of all ranks would take hours."""

    row: PublishedLayout

    def predict(self, hardware: Hardware) -> Prediction:
        """Predict on a machine; the head is that of the row, which a cache would mistake for the trainer's."""
        loss = [(vocabulary, "_LogitsLoss", LossParallel)] if self.row.loss_parallel else []
        with replaced(*loss):
            unit_traces._head.cache_clear()
            try:
                return closed_form(self.row.config(), hardware, self.row.gpus)
            finally:
                unit_traces._head.cache_clear()

    def seconds(self, hardware: Hardware) -> float:
        """Seconds of a step."""
        return self.predict(hardware).time.step_seconds

    def reserved_bytes(self, hardware: Hardware) -> int:
        """Reserved memory of the rank that has most."""
        return self.predict(hardware).memory.reserved_bytes


def trace_layout(row: PublishedLayout, folder: Path) -> LayoutTrace:
    """Trace a row's layout in processes of their own, or read its traces from the folder."""
    path = folder / f"layout_{sha256(' '.join(row.trace_key).encode()).hexdigest()[:16]}.pickle"
    if not path.exists():
        config = row.config()
        depths = choose_depths(config)
        with tempfile.TemporaryDirectory() as name:
            answers = {Path(name) / f"{depth}.pickle": depth for depth in depths}
            workers = [SPAWN.Process(target=answer_row, args=(path, row, depth)) for path, depth in answers.items()]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            traces = [read_trace(path, row.name) for path in answers]
        with open(path, "wb") as file:
            pickle.dump(LayoutTrace(traces, depths, config.model.n_layers, config), file)
    with open(path, "rb") as file:
        made: LayoutTrace = pickle.load(file)
    return made


def answer_row(path: Path, row: PublishedLayout, n_layers: int) -> None:
    """Trace a row at one depth and write the answer; this process cannot be used afterwards."""
    if row.checkpointing == "selective_torchtitan":
        activation_checkpointing.create_selective_checkpoint_contexts = lambda _: keep_every_other_product()
    if row.loss_parallel:
        vocabulary._LogitsLoss = LossParallel  # type: ignore[misc, assignment]
    config = row.config()
    config.model.n_layers = n_layers
    answer_one(path, config, machine(row.machine), row.gpus)


def read_trace(path: Path, name: str) -> Trace:
    """The trace in an answer, or its failure as an exception."""
    if not path.exists():
        raise RuntimeError(f"{name}: the tracing process was killed")
    answer = pickle.loads(path.read_bytes())
    if not isinstance(answer, Trace):
        raise RuntimeError(f"{name} could not be traced: {answer[1]}")
    return answer


@dataclass(frozen=True)
class PlannedLayout:
    """A row and its prediction."""

    row: PublishedLayout
    memory_gib: float
    tokens_per_second: float
    """Of one GPU, with nothing fitted."""
    fitted: float | None
    """The same with the speed of matmuls fitted to another row of the machine; None for that row."""

    @property
    def memory_met(self) -> bool | None:
        """Whether the memory is within its bar; None if none was published."""
        published = self.row.memory_gib
        return None if published is None else abs(self.memory_gib / published - 1) <= MEMORY_BAR

    def cells(self) -> list[str]:
        """Cells of the table."""
        row = self.row
        sizes = f"{row.batch_size} × {row.seq_len:,}" + (f" × {row.micro_batches}" if row.micro_batches > 1 else "")
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
        speeds = [f"{published:,.0f}", f"{self.tokens_per_second:,.0f}", f"{self.tokens_per_second / published:.2f}"]
        fitted = ["fit" if row.fit else ""] if self.fitted is None else [f"{self.fitted / published:.2f}"]
        return [row.name, row.layout, sizes, *memory, *speeds, *fitted, ", ".join(row.missing)]


@dataclass
class LayoutResults:
    """Predictions, and notes on fits."""

    planned: list[PlannedLayout] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def count_traces(rows: Sequence[PublishedLayout]) -> int:
    """Number of different layouts to trace."""
    return len({row.trace_key for row in rows if not row.obstacle})


def plan_layouts(rows: Sequence[PublishedLayout], folder: Path) -> LayoutResults:
    """Predict the rows that can be planned, those with the fit of a machine first."""
    os.environ |= tracing_environment()
    results, fits = LayoutResults(), {}
    made: dict[tuple[str, ...], tuple[float, float, float | None]] = {}
    for row in sorted((row for row in rows if not row.obstacle), key=lambda row: not row.fit):
        if (key := row.trace_key) not in made:
            with unit(row.name):
                traced = ClosedLayout(row) if row.pp > 1 else trace_layout(row, folder)
                hardware = machine(row.machine)
                if row.fit:
                    case = Case(traced.seconds, row.tokens / row.speed, row.name)
                    fits[row.machine] = calibrate([case], hardware, choose_parameters(["compute"])).hardware
                    share = fits[row.machine].matmul_efficiency.value
                    results.notes.append(
                        f"{MACHINES[row.machine]}: {share:.3f} of the peak in matmuls, from “{row.name}”"
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
    """Spearman's rank correlation; equal values share the mean of their ranks. NaN if all values of one are equal."""
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
        return f"| {self.title} | {self.rows} | {self.value:.2f} | {RANK_BAR} | {'met' if self.met else '**missed**'} |"


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


def render_layouts(rows: Sequence[PublishedLayout], results: LayoutResults) -> tuple[list[str], bool]:
    """Lines of the section, and whether every bar was met."""
    header = ["row", "layout", "batch × tokens (× micro-batches)", "GiB: published", "predicted", "ratio", ""]
    header += ["tokens/s: published", "predicted", "ratio", "ratio with fit", "not in the trace"]
    lines = [*(f"- Fitted: {note}" for note in results.notes), ""]
    for key, title in MACHINES.items():
        members = [each for each in results.planned if each.row.machine == key]
        if members:
            lines += [f"### {title}", "", f"| {' | '.join(header)} |"]
            lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |"]
            lines += [*(f"| {' | '.join(each.cells())} |" for each in members), ""]
    ranked = rankings(results.planned)
    if ranked:
        lines += ["### Rank correlation of tokens/s", "", "| rows | number | Spearman | bar | |"]
        lines += ["| --- | ---: | ---: | ---: | --- |", *(each.line() for each in ranked), ""]
    lines += unplanned_table([row for row in rows if row.obstacle])
    lines += ["### Sources", ""]
    lines += [f"- {source}, {date}" for source, date in dict.fromkeys((row.source, row.date) for row in rows)]
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
        speed = f"{row.mfu:.0%} MFU" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        memory = "" if row.memory_gib is None else f"{row.memory_gib:.1f}"
        cells = [row.name, MACHINES[row.machine], row.layout, speed, memory, row.obstacle]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
