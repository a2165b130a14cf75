"""The optimizer's part of a step, issued from its trace: after the backward, in it, unit by unit, or on the host."""

from fsdptoys.memory import CPUOffloadExecutor, OffloadSchedule
from fsdptoys.plan.simulator.events import HostWaitWorkers, Kernels

from .trace_writer import COMPUTE, TraceWriter
from .units import StepSetup, UnitBytes
from .update_traces import MAKES_STATES, trace_update


class Update:
    """The optimizer on the device; the states pass through it with ``memory.optimizer_offload``."""

    def __init__(self, setup: StepSetup, writer: TraceWriter) -> None:
        self.setup, self.writer, self.memory = setup, writer, setup.config.memory
        self.in_backward = self.memory.optimizer_in_backward
        lazy = self.memory.optimizer_offload and self.memory.offload_schedule is OffloadSchedule.lazy
        self.holds_gradients = lazy
        """Whether gradients live until the next forward."""
        self.units = setup.units.in_forward()
        self.trace = trace_update(setup.config, setup.shards(), setup.attention, setup.exchange)
        self.host_bytes = self.trace.host_bytes
        train, scaled = setup.config.train, setup.config.parallel.param_dtype.needs_loss_scale
        on_device = self.trace.skips_on_device and not self.memory.cpu_offload
        self.waits = train.skip_nonfinite and (scaled or not on_device)
        """Whether the host reads a step's numbers before the update (``train.step_readings``)."""
        self.step = MAKES_STATES
        self._ahead = 0  # Units that are updated

    def construct(self) -> None:
        """Allocate memory that exists before the first step."""
        self._base = self.writer.reserve(self.trace.blocks, self.trace.device_events)
        self._issue(0, "construction")

    def _issue(self, step: int, phase: str, stream: str = COMPUTE) -> None:
        self.writer.issue(self.trace.parts.get((min(step, MAKES_STATES + 1), phase), ()), self._base, stream=stream)

    def before_forward(self, unit: UnitBytes) -> list[UnitBytes]:
        """Run the pending updates of the units that a unit's forward needs, which are returned."""
        if not self.holds_gradients or self.step == MAKES_STATES:
            return []
        first, self._ahead = self._ahead, max(self._ahead, self.units.index(unit) + 1)
        for number in range(first, self._ahead):
            self._issue(self.step - 1, str(number))
        return self.units[first : self._ahead]

    def update_in_backward(self, name: str, stream: str) -> None:
        """Measure the norm of a parameter's gradient, and update the parameter."""
        self._issue(self.step, name, stream)

    def clip(self) -> None:
        """Measure the norm of this rank's gradients, and scale them unless the update does."""
        self._issue(self.step, "norm")
        self._issue(self.step, "scale")

    def take(self) -> None:
        """Take the step, unless the backward did."""
        self._issue(self.step, "update")
        self.step += 1
        self._ahead = 0


class HostUpdate(Update):
    """CPU offload: parameters, gradients and states in host memory."""

    def construct(self) -> None:
        """Allocate everything on the host."""
        self.holds_gradients = self.memory.cpu_offload_executor is CPUOffloadExecutor.overlapped
        self._mirrors = self.holds_gradients and self.setup.compute_bytes == 2
        optim, elements = self.setup.config.optim, self.setup.units.local_elements
        blocks = self.setup.in_blocks
        states = (optim.state_bytes(p.shape, local, p in blocks) for _, p, local in self.setup.units.shards())
        self.host_bytes = (10 if self._mirrors else 8) * elements + sum(map(sum, states))
        recorded = self.trace.parts.get((MAKES_STATES + 1, "update"), [])
        kernels = [kernel for event in recorded if isinstance(event, Kernels) for kernel in event.kernels]
        self._fused = any("_fused_" in kernel.name for kernel in kernels)
        self._bytes_each = sum(kernel.bytes for kernel in kernels) / max(1, elements)
        self._works = 0

    def before_forward(self, unit: UnitBytes) -> list[UnitBytes]:
        """Wait for the unit's part of an overlapped update."""
        if not self.holds_gradients or self.step == MAKES_STATES:
            return []
        works = self._works - len(self.units) + self.units.index(unit) + 1
        self.writer.add(HostWaitWorkers(works))
        return [unit]

    def clip(self) -> None:
        """Measure the norm on the host."""
        for unit in self.units:
            self.writer.host_work(4 * unit.local_elements)
            if self.setup.config.scales_gradients and not self.holds_gradients:
                self.writer.host_work(8 * unit.local_elements)

    def take(self) -> None:
        """Update on the host, or let the worker threads do it."""
        self.step += 1
        for unit in self.units:
            count = unit.local_elements
            # Threads also scale gradients and write the low-precision copies.
            more = 8 * self.setup.config.scales_gradients + 6 * self._mirrors if self.holds_gradients else 0
            seconds_of_bytes = 0 if self._fused else round(self._bytes_each * count)
            elements = count if self._fused else 0
            self._work(seconds_of_bytes, elements)
            if more:
                self._work(more * count, 0)

    def _work(self, size: int, elements: int) -> None:
        self._works += self.holds_gradients
        self.writer.host_work(size, elements, worker=self.holds_gradients)


def make_update(setup: StepSetup, writer: TraceWriter) -> Update:
    """The configured optimizer's part of steps."""
    return (HostUpdate if setup.config.memory.cpu_offload else Update)(setup, writer)
