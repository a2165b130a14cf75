"""TODO."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .step import RoutingMetrics, StepMetrics

LAST_STEPS = 10
"""How many last steps the mean of the last losses is over."""


@dataclass(frozen=True)
class Spread:
    """Tenth, fiftieth and ninetieth percentile over the steps after the warm-up."""

    p10: float
    median: float
    p90: float


@dataclass(frozen=True)
class RunResults:
    """What the steps of a run add up to; None where there was nothing to measure."""

    steps: int
    """Optimizer steps done."""
    warmup_steps: int
    """First steps of each start left out of the spreads."""
    starts: Sequence[int]
    """Steps after which the run was begun or gone on with."""
    first_loss: float | None
    last_loss: float | None
    mean_last_loss: float | None
    """Mean over the last steps that made an update."""
    mean_last_steps: int
    """How many these are, ``LAST_STEPS`` at most."""
    eval_loss: float | None
    """Of the last evaluation."""
    eval_step: int | None
    step_time_seconds: Spread | None
    tokens_per_second: Spread | None
    tflops_per_second_per_rank: Spread | None
    mfu: Spread | None
    memory_peak_gib: float | None
    """Highest of the device, on rank 0; None on a CPU."""
    memory_allocated_gib: float | None
    """After the last step, on rank 0; None on a CPU."""
    memory_reserved_gib: float | None
    """Highest that the allocator held after a step, on rank 0; None on a CPU."""
    resident_set_gib: float | None
    """Highest seen after a step, on rank 0."""
    resident_set_peak_gib: float | None
    """Highest at any moment, on rank 0; None of runs that did not record it."""
    routing: RoutingMetrics | None
    """Of the last step; None for a model without experts."""
    skipped_steps: int
    """Steps without update."""
    spikes: int
    """Steps whose loss stood out from those before."""
    data_stall: float | None
    """Share of the steps' time, after the warm-up, in which rank 0 waited for its batches; None where not recorded."""


def summarize(steps: Sequence[StepMetrics], warmup_steps: int, starts: Sequence[int] = (0,)) -> RunResults:
    """Reduce a run's steps to its results.

    Args:
        steps: all of them, in order.
        warmup_steps: how many first ones of each start are left out of medians and percentiles.
        starts: steps after which the run was begun or gone on with.
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
