"""Results of a run: summary statistics of its steps, and ``result.json``, from which ``summary.md``
is rendered."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from fsdptoys.device import GIB
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

from .compilation import Compilations
from .config import RESULT_FILE
from .layout import Layout
from .prediction import Prediction, PredictionError
from .resume_log import Resume
from .step import PURPOSE_KEYS, Number, RoutingMetrics, StepMetrics

FORMAT_VERSION = 1
"""Version of ``result.json``; a key added later keeps it, a changed or removed one does not."""

LARGEST_RESULT_BYTES = 2**24

LAST_STEPS = 10
"""Maximum number of steps in the mean of the last losses."""


@dataclass(frozen=True)
class Spread:
    """10th, 50th and 90th percentile over the steps after the warmup."""

    p10: float
    median: float
    p90: float

    def text(self, factor: float, digits: int, unit: str) -> str:
        """Return the values in a unit of 1/``factor``."""
        p10, median, p90 = (
            f"{value * factor:,.{digits}f}"
            for value in (self.p10, self.median, self.p90)
        )
        return f"{median}{unit} (p10 {p10}, p90 {p90})"


@dataclass(frozen=True)
class RunResults:
    """Statistics of a run's steps; losses in nats per token, None for values without
    measurements."""

    steps: int
    """Number of the last step."""
    warmup_steps: int
    """First steps of each start excluded from the spreads."""
    starts: tuple[int, ...]
    """Last step before each start; 0 for the first start."""
    first_loss: Number | None
    last_loss: Number | None
    mean_last_loss: Number | None
    """Mean over the last steps without the skipped ones."""
    mean_last_steps: int
    """Number of steps in ``mean_last_loss``, at most ``LAST_STEPS``."""
    eval_loss: Number | None
    """Of the last evaluation."""
    eval_step: int | None
    step_time_seconds: Spread | None
    tokens_per_second: Spread | None
    tflops_per_second_per_rank: Spread | None
    mfu: Spread | None
    memory_peak_gib: float | None
    """Peak of rank 0's device; on a CPU within the counted steps."""
    memory_allocated_gib: float | None
    """Value of rank 0 after the last step; on a CPU after the last counted one."""
    memory_reserved_gib: float | None
    """Maximum over the steps of rank 0; None on a CPU."""
    resident_set_gib: float | None
    """Maximum after a step, on rank 0."""
    resident_set_peak_gib: float | None
    """Peak of rank 0; None if not recorded."""
    routing: RoutingMetrics | None
    """Routing of the last step; None for a model without experts."""
    skipped_steps: int
    spikes: int
    data_stall: float | None
    """Fraction of the step time after the warmup that rank 0 waited for its batches; None if not
    recorded."""
    loss_scale: float | None = None
    """Of the last step; None without float16."""
    lowest_loss_scale: float | None = None
    """Minimum over the steps; None without float16."""
    memory_parameters_gib: float | None = None
    """Part of the peak of rank 0 on a CPU, as are the next three; None on an accelerator."""
    memory_gradients_gib: float | None = None
    memory_optimizer_gib: float | None = None
    memory_rest_gib: float | None = None
    memory_host_gib: float | None = None
    """Held by offloading in the host's place on a CPU, maximum over the steps of rank 0."""

    @property
    def memory_parts(self) -> dict[str, float]:
        """Purpose → GiB at the peak; empty if not counted."""
        parts = {
            "parameters": self.memory_parameters_gib,
            "gradients": self.memory_gradients_gib,
            "optimizer states": self.memory_optimizer_gib,
            "the rest": self.memory_rest_gib,
        }
        return {name: size for name, size in parts.items() if size is not None}


def summarize(
    steps: Sequence[StepMetrics], warmup_steps: int, starts: Sequence[int] = (0,)
) -> RunResults:
    """Reduce all steps of a run, in order, to its results; ``starts`` are the last step before each
    start, or 0."""
    updated = [metrics for metrics in steps if not metrics.skipped]
    measured = [
        metrics
        for metrics in updated
        if not any(start < metrics.step <= start + warmup_steps for start in starts)
    ]
    evaluated = [metrics for metrics in steps if metrics.eval_loss is not None]
    last = [metrics.loss for metrics in updated[-LAST_STEPS:]]
    return RunResults(
        steps=steps[-1].step if steps else max(starts),
        warmup_steps=warmup_steps,
        starts=tuple(starts),
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        mean_last_loss=sum(last) / len(last) if last else None,
        mean_last_steps=len(last),
        eval_loss=evaluated[-1].eval_loss if evaluated else None,
        eval_step=evaluated[-1].step if evaluated else None,
        step_time_seconds=_spread(measured, "step_time_seconds"),
        tokens_per_second=_spread(measured, "tokens_per_second"),
        tflops_per_second_per_rank=_spread(measured, "tflops_per_second_per_rank"),
        mfu=_spread(measured, "mfu"),
        memory_peak_gib=_highest(steps, "memory_peak_gib"),
        memory_allocated_gib=steps[-1].memory_allocated_gib if steps else None,
        memory_reserved_gib=_highest(steps, "memory_reserved_gib"),
        resident_set_gib=_highest(steps, "resident_set_gib"),
        resident_set_peak_gib=_highest(steps, "resident_set_peak_gib"),
        routing=steps[-1].routing if steps else None,
        skipped_steps=len(steps) - len(updated),
        spikes=sum(metrics.loss_spike is not None for metrics in steps),
        data_stall=_stall(measured),
        loss_scale=steps[-1].loss_scale if steps else None,
        lowest_loss_scale=min(_values(steps, "loss_scale"), default=None),
        **_split_of_peak(steps),
        memory_host_gib=_highest(steps, "memory_host_gib"),
    )


def _values(steps: Sequence[StepMetrics], name: str) -> list[float]:
    values = [getattr(metrics, name) for metrics in steps]
    return [value for value in values if value is not None]


def _spread(steps: Sequence[StepMetrics], name: str) -> Spread | None:
    values = _values(steps, name)
    return Spread(*map(float, np.percentile(values, [10, 50, 90]))) if values else None


def _stall(steps: Sequence[StepMetrics]) -> float | None:
    waits = [
        (step.data_wait_seconds, step.step_time_seconds)
        for step in steps
        if step.data_wait_seconds is not None
    ]
    return (
        sum(wait for wait, _ in waits) / sum(seconds for _, seconds in waits)
        if waits
        else None
    )


def _split_of_peak(steps: Sequence[StepMetrics]) -> dict[str, float | None]:
    counted = [metrics for metrics in steps if metrics.memory_rest_gib is not None]
    highest = max(
        counted, key=lambda metrics: metrics.memory_peak_gib or 0.0, default=None
    )
    return {key: getattr(highest, key, None) for key in PURPOSE_KEYS.values()}


def _highest(steps: Sequence[StepMetrics], name: str) -> float | None:
    return max(_values(steps, name), default=None)


def prediction_errors(
    prediction: Prediction, results: RunResults
) -> list[PredictionError]:
    """Compare a prediction with the steps after the warmup; a CPU has no reserved memory to
    compare.

    Measurements of 0, such as tokens/s of steps without valid tokens, are skipped, since the
    difference is relative.
    """
    time = results.step_time_seconds
    tokens = results.tokens_per_second
    mfu = results.mfu
    memory = prediction.memory
    rows = (
        (
            "step time",
            prediction.time.step_seconds * 1e3,
            time.median * 1e3 if time else None,
            "ms",
        ),
        (
            "tokens/s, all ranks",
            prediction.tokens_per_second,
            tokens.median if tokens else None,
            "",
        ),
        (
            "MFU",
            (prediction.mfu or 0.0) * 100,
            mfu.median * 100 if mfu and prediction.mfu is not None else None,
            "%",
        ),
        (
            "device memory after a step",
            memory.end_bytes / GIB,
            results.memory_allocated_gib,
            "GiB",
        ),
        ("peak device memory", memory.peak_bytes / GIB, results.memory_peak_gib, "GiB"),
        (
            "reserved device memory",
            memory.reserved_bytes / GIB,
            results.memory_reserved_gib,
            "GiB",
        ),
    )
    return [
        PredictionError(name, predicted, measured, unit)
        for name, predicted, measured, unit in rows
        if measured
    ]


class RunStatus(Enum):
    """How a run with results ended."""

    completed = "done"
    """After its steps or ``train.max_seconds``."""
    stopped = "stopped"
    """By a signal."""
    failed = "failed"
    """After too many skipped steps."""


@dataclass(frozen=True)
class Operator:
    """One operator over all traced steps, in microseconds; None for values without measurements."""

    name: str
    calls: int
    self_device_us: float | None
    """Of its own kernels; None on a CPU."""
    self_cpu_us: float | None
    """Without the operators that it calls."""
    cpu_us: float | None
    self_memory_bytes: int | None
    """Allocated minus freed."""


@dataclass(frozen=True)
class ProfileResult:
    """Output of the profiler of rank 0; files are below ``profile/``."""

    rank: int
    ranks: tuple[int, ...]
    trace_file: str | None = None
    traced_steps: str | None = None
    """Such as "steps 5 to 7"."""
    operators: tuple[Operator, ...] = ()
    """Operators with the largest self time, descending."""
    snapshot_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """Contents of ``result.json``: every number and fact of ``summary.md``."""

    title: str
    status: RunStatus
    stop_reason: str
    """Completes "15 of 20 steps; …"."""
    planned_steps: int
    wall_seconds: float
    """Of the last start."""
    steps: RunResults
    references_nats: dict[str, Number]
    """Label → entropy of a simple model of the data, in nats per token."""
    prediction: tuple[PredictionError, ...]
    """Predicted and measured values; empty without a prediction."""
    compilation: Compilations | None
    """``torch.compile`` on rank 0, in the last start; None if it is off."""
    resumes: tuple[Resume, ...]
    profile: ProfileResult | None
    sample: str | None
    """Text generated by the trained model."""
    lost_output: str | None
    """Sentence on lost console output."""
    files: dict[str, str]
    """File of the run directory → its content."""
    definitions: tuple[str, ...]
    """How each number was measured."""
    environment: dict[str, Any]
    """As in ``environment.json``."""
    settings: dict[str, Any]
    """As in ``config.yaml``."""
    layout: Layout | None = None
    """Parameters, units, mesh and bytes of a rank; None if not recorded."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The file's text: strict JSON, with non-finite numbers as "nan", "inf" and "-inf"."""
        return (
            json.dumps(plain_tree(dataclasses.asdict(self)), indent=2, allow_nan=False)
            + "\n"
        )


def read_result(run_dir: Path) -> RunResult | None:
    """Read the results of a run; None without the file, ForeignError if it is invalid or of a later
    format version."""
    try:
        tree = parse_json(
            read_regular(run_dir / RESULT_FILE, LARGEST_RESULT_BYTES), surrogates=True
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as mistake:
        raise ForeignError(one_line(mistake)) from None
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise ForeignError(
            f"its format_version is {version}, and this version reads up to {FORMAT_VERSION}"
        )
    return build(RunResult, tree, skip_unknown=True)


def plain_tree(value: Any) -> Any:
    """A tree with text as keys, lists for tuples, values of enums, and names of non-finite
    numbers."""
    if isinstance(value, dict):
        return {str(key): plain_tree(subtree) for key, subtree in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_tree(subtree) for subtree in value]
    if isinstance(value, Enum):
        return value.value
    return (
        str(value) if isinstance(value, float) and not math.isfinite(value) else value
    )
