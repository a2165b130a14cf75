"""The numbers of steps: their sums over ranks, their way to the host, and the metrics made of them.

A CPU's numbers are read in their step. An accelerator runs behind the host, which would idle it by
waiting for a number of the step that it has just launched. So each step's numbers are copied to
pinned memory, and read later, all of a step at once and in the order of the steps:

- with ``train.skip_nonfinite=true``: those of step k − 1 after step k is launched, one wait a step;
- with ``train.skip_nonfinite=false``: the same, but only if step k − 1 is a multiple of
  ``metrics.log_every`` (of ``MOST_UNREAD`` if that is less) or the first one, for all steps up to
  it;
- where the host needs the numbers of step k for its update: within the step, before the update. So
  it is in float16, because the next step needs the loss scale, and with optimizers that cannot skip
  on the device;
- before an evaluation, before a checkpoint, and at the end: all of them.

Which of these applies depends on the configuration only, so all ranks read, and stop, after the
same step.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device import Event
from fsdptoys.metrics import SpikeDetector, StepMetrics, step_rates
from fsdptoys.optim.loss_scale import LossScaler
from fsdptoys.parallel.precision import DType

from .parallelize import ParallelModel
from .skipped_steps import SkippedSteps
from .step_data import DocumentCounter
from .stop import Stopping, evaluates_after, saves_after

MOST_UNREAD = 100
"""Steps after which stop signals are seen at the latest, however rarely the console has a line."""
PATIENCE_SECONDS = 5.0
"""Longest wait for steps still on the device when a run ends by an error."""


class NamedTensors:
    """Small tensors by name, as views of one flat tensor, which travels as one.

    Args:
        flat: the tensors' elements, one tensor after another.
        sizes: name → elements, in the order of ``flat``.
    """

    def __init__(self, flat: Tensor, sizes: Mapping[str, int]) -> None:
        self.flat = flat
        self.sizes = dict(sizes)

    @classmethod
    def join(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> "NamedTensors":
        """Copy tensors into a new flat one of ``dtype``."""
        flat = torch.cat([tensor.to(dtype).flatten() for tensor in tensors.values()])
        return cls(flat, {name: tensor.numel() for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor, flat."""
        start = 0
        for other, size in self.sizes.items():
            if other == name:
                return self.flat[start : start + size]
            start += size
        raise KeyError(name)


@dataclass
class StepStats:
    """The numbers of a step, which may still be on the device."""

    step: int
    started: Event
    started_seconds: float
    """By ``time.perf_counter``."""
    host_values: dict[str, Any] = field(default_factory=dict)
    """Fields of ``StepMetrics`` that the host knows without the device."""
    sums: NamedTensors = field(init=False)
    """Over ranks: ``loss``, ranks with ``not_finite`` gradients, ``votes`` to stop, and
    ``routing``. Beside them ``grad_norm``. On the host after the copy."""
    counts: NamedTensors = field(init=False)
    """``inputs`` (``StepInputs.counts``), and ``experts``, tokens of each. On the host after the
    copy."""
    ended: Event = None
    seconds: float = 0.0
    """Duration on a CPU; an accelerator's follows from its events."""
    has_ended: bool = False
    """Whether the host knows that the step has ended on the device."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """Fields of ``StepMetrics`` that follow from the loss and the earlier steps; empty before
    ``resolve``."""
    eval_loss: float | None = None
    eval_own_loss: float | None = None


class StepReadings:
    """Agrees on the numbers of steps and reads them; counts skipped steps, scores losses and
    collects votes in the steps' order.

    Args:
        config: of the run.
        parallel_model: the model over ranks.
        stopping: votes for this rank, and gets the votes of all ranks.
        scaler: finds the loss scale; None for dtypes that need none.
        documents: counts what the tokens of documents attend to; None for causal attention.
        skips_on_device: whether the optimizer can leave out an update without the host.
    """

    def __init__(
        self,
        config: Config,
        parallel_model: ParallelModel,
        stopping: Stopping,
        scaler: LossScaler | None,
        documents: DocumentCounter | None,
        *,
        skips_on_device: bool,
    ) -> None:
        self._train = config.train
        self._checkpoint = config.checkpoint
        self._log_every = config.metrics.log_every
        self._parallel_model = parallel_model
        self._stopping = stopping
        self._skipped = SkippedSteps(scaler)
        self._spikes = SpikeDetector(config.metrics.spike_threshold)
        self._skips_on_device = skips_on_device
        self._documents = documents
        self._device = parallel_model.strategy.world.device
        self._world_size = parallel_model.strategy.world.world_size
        # Published peak FLOPs are for bfloat16; data sheets state the same for float16.
        is_half = config.parallel.param_dtype is not DType.float32
        self._peak_flops = self._device.peak_flops if is_half else None
        needs_host = scaler is not None or not skips_on_device
        self.in_step = config.train.skip_nonfinite and needs_host
        """Whether the host needs the numbers before the update."""
        self._queue: deque[StepStats] = deque()

    @property
    def newest(self) -> StepStats:
        """The last step taken and not yet finished."""
        return self._queue[-1]

    @property
    def is_idle(self) -> bool:
        """Whether the device has no step left to compute; asked without a wait. True on a CPU."""
        return (
            not self._queue
            or self.newest.ended is None
            or bool(self.newest.ended.query())
        )

    def data_wait(self, seconds: float) -> float:
        """Return how long the device has waited for data that took ``seconds``.

        An accelerator that still computes earlier steps has not waited.
        """
        return seconds if self.is_idle else 0.0

    def mark(self, timing: bool = True) -> Event:
        """Record an event on the compute stream; None on a CPU."""
        if not self._device.is_accelerator:
            return None
        event = self._device.streams.event(timing)
        event.record(self._device.streams.current())
        return event

    def begin(self, step: int) -> StepStats:
        """Note the beginning of a step."""
        return StepStats(step, self.mark(), time.perf_counter())

    def agree(
        self,
        stats: StepStats,
        input_counts: Tensor,
        loss_sum: Tensor,
        grad_norm: Tensor,
    ) -> Tensor | bool:
        """Sum a step's numbers over ranks in one all-reduce, and begin to copy them to the host.

        With ``in_step`` the copies are awaited and resolved.

        Args:
            stats: of the step.
            input_counts: ``StepInputs.counts`` of all ranks.
            loss_sum: of this rank's valid tokens.
            grad_norm: the same on all ranks, unless it is not finite.

        Returns:
            Whether to leave out the update; a float32 scalar if the device decides.
        """
        routing = self._parallel_model.routing
        votes = torch.tensor(self._stopping.votes(), dtype=loss_sum.dtype)
        numbers = {
            "loss": loss_sum,
            "not_finite": ~grad_norm.isfinite(),
            "votes": self._device.upload(votes),
        }
        routing_sums, routing_counts = routing.end_step() if routing else ({}, {})
        sums = NamedTensors.join(numbers | routing_sums, loss_sum.dtype)
        dist.all_reduce(sums.flat)
        counts = NamedTensors.join(
            {"inputs": input_counts, **routing_counts}, torch.int64
        )
        flat = torch.cat([sums.flat, grad_norm.to(sums.flat).view(1)])
        stats.sums = NamedTensors(
            self._device.download(flat), sums.sizes | {"grad_norm": 1}
        )
        stats.counts = NamedTensors(self._device.download(counts.flat), counts.sizes)
        self._queue.append(stats)
        if self.in_step:
            self._resolve_in_step(stats)
        if not self._train.skip_nonfinite:
            return False
        if not self._skips_on_device:
            return bool(stats.outcome["skipped"])
        not_finite = ~sums["loss"].isfinite() | (sums["not_finite"] > 0)
        return not_finite.float().squeeze(0)

    def _resolve_in_step(self, stats: StepStats) -> None:
        copied = self.mark(timing=False)
        if copied is not None:
            copied.synchronize()
            for earlier in self._queue:
                earlier.has_ended = earlier is not stats
        self._resolve(stats)

    def end(self, stats: StepStats) -> None:
        """Note the end of a step, as far as the host has launched it."""
        stats.ended = self.mark()
        stats.seconds = time.perf_counter() - stats.started_seconds

    def read_after(self, step: int) -> int:
        """Read the steps that are due after a step; return the number of the last one read.

        After a stop all are read.
        """
        last = self._due(step)
        self.resolve(last)
        if self._stopping.stop and last < step:
            last = step
            self.resolve(last)
        return last

    def _due(self, step: int) -> int:
        train = self._train
        if (
            not self._device.is_accelerator
            or step == train.steps
            or evaluates_after(train, step)
            or saves_after(self._checkpoint, step, None)
        ):
            return step
        before = step - 1
        logged = before == 1 or before % min(self._log_every, MOST_UNREAD) == 0
        return before if train.skip_nonfinite or logged else 0

    def resolve(self, through: int) -> None:
        """Read the steps up to a number."""
        waiting = [stats for stats in self._queue if stats.step <= through]
        if waiting and not waiting[-1].has_ended:
            if waiting[-1].ended is not None:
                waiting[-1].ended.synchronize()
            for stats in waiting:
                stats.has_ended = True
        for stats in waiting:
            if not stats.outcome:
                self._resolve(stats)

    def finish(self, through: int) -> list[StepMetrics]:
        """Read the steps up to a number and return their metrics."""
        self.resolve(through)
        finished = []
        while self._queue and self._queue[0].step <= through:
            finished.append(self._metrics(self._queue.popleft()))
        return finished

    def finish_done(self) -> list[StepMetrics]:
        """Metrics of the steps that end within ``PATIENCE_SECONDS``: for a run that ends by an
        error.

        A step that waits for a lost rank never ends.
        """
        last = 0
        give_up = time.monotonic() + PATIENCE_SECONDS
        for stats in self._queue:
            if stats.ended is None:
                break
            while not stats.ended.query() and time.monotonic() < give_up:
                time.sleep(0.01)
            if not stats.ended.query():
                break
            last = stats.step
        return self.finish(last)

    def state_dict(self) -> dict[str, Any]:
        """Counts and scores of the steps read, as JSON values."""
        assert not self._queue, "counts of steps that are not read yet would be missing"
        return {"spikes": self._spikes.state_dict(), **self._skipped.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._skipped.load_state_dict(state)
        self._spikes.load_state_dict(state["spikes"])

    def _resolve(self, stats: StepStats) -> None:
        sums = stats.sums
        (loss_sum,) = sums["loss"].tolist()
        (not_finite,) = sums["not_finite"].tolist()
        loss = loss_sum / max(1, int(stats.counts["inputs"][0]))
        skipped = self._train.skip_nonfinite and not (
            math.isfinite(loss) and not_finite == 0
        )
        self._skipped.record(loss, overflowed=not_finite > 0, skipped=skipped)
        stats.outcome = {
            "loss": loss,
            "skipped": skipped,
            "skipped_steps": self._skipped.in_all,
            "loss_spike": self._spikes.spike(loss),
        }
        self._stopping.record(stats.step, sums["votes"].tolist(), self._skipped)

    def _metrics(self, stats: StepStats) -> StepMetrics:
        seconds = stats.seconds
        if stats.ended is not None:
            seconds = stats.started.elapsed_time(stats.ended) / 1e3
        valid, tokens, *in_documents = stats.counts["inputs"].tolist()
        routing = None
        flops_per_token = self._parallel_model.flops_per_token
        if self._parallel_model.routing is not None:
            routing = self._parallel_model.routing.metrics(
                stats.sums["routing"], stats.counts["experts"]
            )
        if self._documents is not None:
            flops_per_token = self._documents.flops_per_token(in_documents)
        rates = step_rates(
            step_time_seconds=seconds,
            valid_tokens=valid,
            tokens=tokens,
            flops_per_token=flops_per_token,
            world_size=self._world_size,
            peak_flops=self._peak_flops,
        )
        values = {**stats.host_values, **stats.outcome, **rates}
        return StepMetrics(
            step=stats.step,
            grad_norm=stats.sums["grad_norm"].item(),
            routing=routing,
            eval_loss=stats.eval_loss,
            eval_own_loss=stats.eval_own_loss,
            **values,
        )
