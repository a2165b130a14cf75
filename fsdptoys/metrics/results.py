"""Summary statistics of the steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .step import RoutingMetrics, StepMetrics

LAST_STEPS = 10
"""Maximum number of steps in the mean of the last losses."""


@dataclass(frozen=True)
class Spread:
    """10th, 50th and 90th percentile over the steps after the warmup."""

    p10: float
    median: float
    p90: float


@dataclass(frozen=True)
class RunResults:
    """Results of a run; None for values without measurements."""

    steps: int
    """Number of the last step."""
    warmup_steps: int
    """First steps of each start excluded from the spreads."""
    starts: Sequence[int]
    """Last step before each start; 0 for the first start."""
    first_loss: float | None
    last_loss: float | None
    mean_last_loss: float | None
    """Mean over the last steps without the skipped ones."""
    mean_last_steps: int
    """Number of steps in ``mean_last_loss``, at most ``LAST_STEPS``."""
    eval_loss: float | None
    """Loss of the last evaluation, in nats per token."""
    eval_step: int | None
    step_time_seconds: Spread | None
    tokens_per_second: Spread | None
    tflops_per_second_per_rank: Spread | None
    mfu: Spread | None
    memory_peak_gib: float | None
    """Peak of rank 0's device; None on a CPU."""
    memory_allocated_gib: float | None
    """Value of rank 0 after the last step; None on a CPU."""
    memory_reserved_gib: float | None
    """Maximum over the steps of rank 0; None on a CPU."""
    resident_set_gib: float | None
    """Maximum after a step, on rank 0."""
    resident_set_peak_gib: float | None
    """Peak of rank 0; None if not recorded."""
    routing: RoutingMetrics | None
    """Routing of the last step; None for a model without experts."""
    skipped_steps: int
    """Steps with a skipped optimizer step."""
    spikes: int
    """Steps with a loss spike."""
    data_stall: float | None
    """Fraction of the step time after the warmup that rank 0 waited for its batches; None if not recorded."""


def summarize(steps: Sequence[StepMetrics], warmup_steps: int, starts: Sequence[int] = (0,)) -> RunResults:
    """Reduce a run's steps to its results.

    Args:
        steps: all steps, in order.
        warmup_steps: first steps of each start to exclude from percentiles.
        starts: last step before each start; 0 for the first start.
    """
    updated = [metrics for metrics in steps if not metrics.skipped]
    measured = [
        metrics for metrics in updated if not any(start < metrics.step <= start + warmup_steps for start in starts)
    ]
    evaluated = [metrics for metrics in steps if metrics.eval_loss is not None]
    last = [metrics.loss for metrics in updated[-LAST_STEPS:]]
    return RunResults(
        steps=steps[-1].step if steps else max(starts),
        warmup_steps=warmup_steps,
        starts=starts,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        mean_last_loss=sum(last) / len(last) if last else None,
        mean_last_steps=len(last),
        eval_loss=evaluated[-1].eval_loss if evaluated else None,
        eval_step=evaluated[-1].step if evaluated else None,
        step_time_seconds=_spread([metrics.step_time_seconds for metrics in measured]),
        tokens_per_second=_spread([metrics.tokens_per_second for metrics in measured]),
        tflops_per_second_per_rank=_spread([metrics.tflops_per_second_per_rank for metrics in measured]),
        mfu=_spread([metrics.mfu for metrics in measured if metrics.mfu is not None]),
        memory_peak_gib=_highest([metrics.memory_peak_gib for metrics in steps]),
        memory_allocated_gib=steps[-1].memory_allocated_gib if steps else None,
        memory_reserved_gib=_highest([metrics.memory_reserved_gib for metrics in steps]),
        resident_set_gib=_highest([metrics.resident_set_gib for metrics in steps]),
        resident_set_peak_gib=_highest([metrics.resident_set_peak_gib for metrics in steps]),
        routing=steps[-1].routing if steps else None,
        skipped_steps=len(steps) - len(updated),
        spikes=sum(metrics.loss_spike is not None for metrics in steps),
        data_stall=_stall(measured),
    )


def _spread(values: list[float]) -> Spread | None:
    return Spread(*(float(value) for value in np.percentile(values, [10, 50, 90]))) if values else None


def _stall(steps: Sequence[StepMetrics]) -> float | None:
    waits = [(each.data_wait_seconds, each.step_time_seconds) for each in steps if each.data_wait_seconds is not None]
    return sum(wait for wait, _ in waits) / sum(seconds for _, seconds in waits) if waits else None


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
