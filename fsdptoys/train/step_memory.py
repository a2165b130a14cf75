"""The steps in which rank 0 counts the memory of a CPU, at a cost of at most 2% of the steps' time.

The first two steps are counted: the second is the first with optimizer states from its beginning.
Later steps are counted when 2% of the time of the steps since the last count have paid for it.
Metrics of the steps in between repeat the last count and name its step. The cost lies between the
steps; a counted step itself takes hardly longer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fsdptoys.device import AllocationCount, UncountableError, profiler_is_on
from fsdptoys.memory import OptimizerStepper
from fsdptoys.metrics import measure_memory
from fsdptoys.parallel import Strategy
from fsdptoys.profiler.live_bytes import state_tensors

COST = 0.02
"""Largest share of counting in the time of later steps."""
FIRST_STEPS = 2
"""Number of first steps, which are always counted."""
PURPOSES = ("parameters", "gradients", "optimizer_states")


class StepMemory:
    """Counts memory for ``Device.memory``; does nothing on an accelerator, which counts by itself.

    Args:
        strategy: of the model.
        stepper: of the optimizer.
        enabled: False for ranks without a recorder.
    """

    def __init__(
        self, strategy: Strategy, stepper: OptimizerStepper, *, enabled: bool
    ) -> None:
        self._strategy = strategy
        self._stepper = stepper
        self._device = strategy.world.device
        self._host_purposes = PURPOSES if strategy.world.cpu_offload else ()
        self.enabled = enabled and self._device.counts_allocations
        self._counts = 0
        self._count: AllocationCount | None = None
        self._seconds_since = 0.0
        self.cost_seconds = 0.0
        """Time of the last count, all of it between two steps."""
        self.counted_step: int | None = None
        """The last counted step."""

    @contextmanager
    def around(self, step: int, profiled: Callable[[int], bool]) -> Iterator[None]:
        """Count the step, if it is its turn; not in steps of a profiler, since these do not
        nest."""
        if not self.is_due() or profiled(step) or profiler_is_on():
            yield
            return
        started = time.perf_counter()
        try:
            self._count = AllocationCount(self._labels(), self._host_purposes)
        except UncountableError:
            self.enabled = False
        self.cost_seconds = time.perf_counter() - started
        try:
            yield
        finally:
            if self._count is not None:
                self._count.cancel()
                self._count = None

    def label_gradients(self) -> None:
        """Label the blocks of gradients, at the end of the last backward."""
        if self._count is not None:
            self._count.label(self._labels())

    def end_step(self, step: int, seconds: float) -> None:
        """End the count of a step; ``seconds`` is its duration."""
        self._seconds_since += seconds
        if self._count is None:
            return
        started = time.perf_counter()
        count, self._count = self._count, None
        self._device.record(count.finish(self._labels()))
        self.cost_seconds += time.perf_counter() - started
        self._counts += 1
        self._seconds_since = 0.0
        self.counted_step = step

    def measure(self) -> dict[str, Any]:
        """Return the memory after a step as fields of ``StepMetrics``."""
        return measure_memory(self._device) | {"memory_counted_step": self.counted_step}

    def is_due(self) -> bool:
        """Whether the next step is to be counted."""
        if not self.enabled:
            return False
        is_counted = self._device.memory() is not None
        return (
            not is_counted
            or self._counts < FIRST_STEPS
            or self.cost_seconds <= COST * self._seconds_since
        )

    def _labels(self) -> dict[str, list[Tensor]]:
        parameters: list[Tensor] = [
            param for _, param in self._strategy.named_parameters()
        ]
        gradients = [param.grad for param in parameters if param.grad is not None]
        states = list(state_tensors(self._stepper.optimizer))
        return dict(
            zip(
                PURPOSES,
                (parameters, [*gradients, *self._stepper.held_gradients], states),
                strict=True,
            )
        )
