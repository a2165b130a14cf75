"""The numbers of steps on their way from the device to the host, and the metrics made of them.

A CPU's numbers are read in their step. An accelerator runs behind the host, which would idle it by
waiting for a number of the step that it has just launched. So each step's numbers are copied to
pinned memory, and read later, all of a step at once and in the order of the steps:

- with ``train.skip_nonfinite=true``: those of step k − 1 after step k is launched, one wait a step;
- with ``train.skip_nonfinite=false``: the same, but only if step k − 1 is a multiple of
  ``metrics.log_every`` (of ``MOST_UNREAD`` if that is less) or the first one, for all steps up to
  it;
- where the host needs the numbers of step k for its update: within the step, before the update. So
  it is in float16, whose next step needs the loss scale, and with optimizers that cannot skip on
  the device;
- before an evaluation, before a checkpoint, and at the end: all of them.

Which of these applies depends on the configuration only, so all ranks read, and stop, after the
same step.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device import Event
from fsdptoys.metrics import SpikeDetector, StepMetrics, step_rates
from fsdptoys.parallel.precision import DType

from .named_tensors import NamedTensors
from .parallelize import Parallelized
from .skipped_steps import SkippedSteps
from .step_data import DocumentCounter
from .stop import Stop, agreed_stop

MOST_UNREAD = 100
"""Steps after which stop signals are seen at the latest, however rarely the console has a line."""
PATIENCE_SECONDS = 5.0
"""Longest wait for steps still on the device when a run ends by an error."""


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
    done: bool = False
    """Whether the host knows that the step has ended on the device."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """Fields of ``StepMetrics`` that follow from the loss and the earlier steps; empty before
    ``resolve``."""
    eval_loss: float | None = None


class StepReadings:
    """Reads the numbers of steps; counts skipped steps, scores losses and collects votes in the
    steps' order.

    Args:
        config: of the run.
        built: the model over ranks.
        skipped: counts the skipped steps.
        spikes: scores the losses.
        skips_on_device: whether the optimizer can leave out an update without the host.
        documents: counts what the tokens of documents attend to; None for causal attention.
    """

    def __init__(
        self,
        config: Config,
        built: Parallelized,
        skipped: SkippedSteps,
        spikes: SpikeDetector,
        *,
        skips_on_device: bool,
        documents: DocumentCounter | None,
    ) -> None:
        self._train = config.train
        self._log_every = config.metrics.log_every
        self._built = built
        self._skipped = skipped
        self._spikes = spikes
        self._documents = documents
        self._device = built.strategy.world.device
        self._world_size = built.strategy.world.world_size
        # Published peak FLOPs are for bfloat16; data sheets state the same for float16.
        is_half = config.parallel.param_dtype is not DType.float32
        self._peak_flops = self._device.peak_flops if is_half else None
        needs_host = skipped.scaler is not None or not skips_on_device
        self.in_step = config.train.skip_nonfinite and needs_host
        """Whether the host needs the numbers before the update."""
        self._queue: deque[StepStats] = deque()
        self.stop: Stop | None = None
        """The first reason to stop of a resolved step; the same on all ranks."""

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

    @property
    def pending(self) -> int:
        """Number of steps whose metrics are not made yet."""
        return len(self._queue)

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

    def add(
        self,
        stats: StepStats,
        sums: NamedTensors,
        grad_norm: Tensor,
        counts: NamedTensors,
    ) -> None:
        """Begin the copies of a step's numbers; with ``in_step`` resolve it as well, which waits
        for the device."""
        flat = torch.cat([sums.flat, grad_norm.to(sums.flat).view(1)])
        stats.sums = NamedTensors(
            self._device.download(flat), sums.sizes | {"grad_norm": 1}
        )
        stats.counts = NamedTensors(self._device.download(counts.flat), counts.sizes)
        self._queue.append(stats)
        if not self.in_step:
            return
        copied = self.mark(timing=False)
        if copied is not None:
            copied.synchronize()
            for earlier in self._queue:
                earlier.done = earlier is not stats
        self._resolve(stats)

    def skip(
        self, stats: StepStats, agreed: NamedTensors, on_device: bool
    ) -> Tensor | bool:
        """Return whether to leave out the update of a step; as a float32 scalar if the device
        decides."""
        if not self._train.skip_nonfinite:
            return False
        if not on_device:
            return bool(stats.outcome["skipped"])
        return (
            (~agreed["loss"].isfinite() | (agreed["not_finite"] > 0)).float().squeeze(0)
        )

    def end(self, stats: StepStats) -> None:
        """Note the end of a step, as far as the host has launched it."""
        stats.ended = self.mark()
        stats.seconds = time.perf_counter() - stats.started_seconds

    def due(self, step: int) -> int:
        """Number of the last step to read after a step; the steps before it are read too."""
        if not self._device.is_accelerator:
            return step
        before = step - 1
        logged = before == 1 or before % min(self._log_every, MOST_UNREAD) == 0
        return before if self._train.skip_nonfinite or logged else 0

    def resolve(self, through: int) -> None:
        """Read the steps up to a number, and decide whether to stop."""
        waiting = [stats for stats in self._queue if stats.step <= through]
        if waiting and not waiting[-1].done:
            if waiting[-1].ended is not None:
                waiting[-1].ended.synchronize()
            for stats in waiting:
                stats.done = True
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
        done, give_up = 0, time.monotonic() + PATIENCE_SECONDS
        for stats in self._queue:
            if stats.ended is None:
                break
            while not stats.ended.query() and time.monotonic() < give_up:
                time.sleep(0.01)
            if not stats.ended.query():
                break
            done = stats.step
        return self.finish(done)

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
        self.stop = self.stop or agreed_stop(
            self._train, sums["votes"].tolist(), self._skipped
        )

    def _metrics(self, stats: StepStats) -> StepMetrics:
        seconds = stats.seconds
        if stats.ended is not None:
            seconds = stats.started.elapsed_time(stats.ended) / 1e3
        valid, tokens, *in_documents = stats.counts["inputs"].tolist()
        routing = None
        flops_per_token = self._built.flops_per_token
        if self._built.routing is not None:
            routing = self._built.routing.metrics(
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
            **values,
        )
