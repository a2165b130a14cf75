"""Step models of FSDP1 and FSDP2: memory, streams and collectives around a unit's forward and backward.

After PyTorch 2.13 (``torch/distributed/fsdp``), with its names of streams. Not covered: float64 sums of the
deterministic mode.
"""

from abc import abstractmethod
from collections import deque

from fsdptoys.memory import CPUOffloadExecutor
from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel.fsdp import FSDPConfig
from fsdptoys.plan.simulator.costs import kernel_seconds
from fsdptoys.plan.simulator.events import KernelKind

from .memory_ledger import COMPUTE, Ledger
from .optimizer_step import Update
from .step_model import StepModel
from .units import StepSetup, UnitBytes

COPY_IN, GATHER, REDUCE, ALL_REDUCE = "all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce"


class ShardedStepModel(StepModel):
    """Common part of FSDP1 and FSDP2."""

    def __init__(self, setup: StepSetup, ledger: Ledger, update: Update) -> None:
        super().__init__(setup, ledger, update)
        assert isinstance(self.config.parallel, FSDPConfig)
        self.parallel = self.config.parallel
        self.cpu_offload = self.memory.cpu_offload
        overlapped = self.memory.cpu_offload_executor is CPUOffloadExecutor.overlapped
        self.upload_width = 2 if overlapped and setup.compute_bytes == 2 else 4
        self.order = self.units.in_forward()
        self.gathered: set[UnitBytes] = set()
        self.in_flight: dict[UnitBytes, tuple[float, float, float]] = {}
        """Unit → times at which its gather was issued, its shards were on the device, and the gather ends."""
        self.reduced = 0.0  # End of the last reduction
        self.gradients: dict[str, int] = {}
        self.gather_after = 0.0  # Earliest start of the next gather
        self.begun: set[UnitBytes] = set()
        self.accumulated: set[UnitBytes] = set()

    def construct(self) -> None:
        """Allocate the shards."""
        if not self.cpu_offload:
            self.ledger.add(Category.parameters, *(4 * size for unit in self.order for size in unit.local))
        self.update.construct()

    def begin_forward(self) -> None:
        """Let the gathering streams wait for the optimizer step, as the root's forward does."""
        self.gather_after = self.ledger.compute
        self.begun.clear()

    def enter(self, unit: UnitBytes) -> None:
        """Gather the unit and prefetch the next ones."""
        if unit in self.gathered:
            return
        self._issue(unit)
        self._complete(unit, in_forward=True)
        ahead = self.order.index(unit) + 1
        for other in self.order[ahead : ahead + self.parallel.forward_prefetch]:
            self._issue(other)

    def leave(self, unit: UnitBytes) -> None:
        """Reshard."""
        if unit.resharded:
            self._reshard(unit)

    def before_backward(self, unit: UnitBytes) -> None:
        """Gather the unit and prefetch the next ones; once a backward, even for a tied weight."""
        if unit in self.begun:
            return
        self.begun.add(unit)
        if unit not in self.gathered and unit.gathered_in_backward:
            self._issue(unit)
            self._complete(unit, in_forward=False)
        for other in self._next_in_backward(unit):
            if other.gathered_in_backward:
                self._issue(other)

    def _next_in_backward(self, unit: UnitBytes) -> list[UnitBytes]:
        behind = self.parallel.backward_prefetch
        order = self.units.after_forward() if behind == 1 else self.order
        tied = self.units.tied
        if behind != 1 and tied is not None:
            order = [*(other for other in order if other is not tied), tied]
        place = order.index(unit) if unit in order else 0
        return order[max(0, place - behind) : place][::-1]

    def _gather(self, unit: UnitBytes, bytes: int) -> None:
        issued, there = self.ledger.host, self._upload(unit)
        self.in_flight[unit] = issued, there, self._over_shards("all_gather", bytes, max(self.gather_after, there))

    def _complete(self, unit: UnitBytes, in_forward: bool) -> None:
        """Wait for a unit's gather."""
        for moment, why in zip(self.in_flight.pop(unit), ("host", "transfers", "communication"), strict=True):
            self.ledger.wait(moment, why)
        self.gathered.add(unit)

    def _upload(self, unit: UnitBytes) -> float:
        """Copy offloaded shards to the device; returns the end of the copy."""
        if not self.cpu_offload:
            return 0.0
        self.ledger.spike(4 * max(unit.local), stream=COPY_IN)
        return max(self.ledger.transfer(self.upload_width * size, "up", self.gather_after) for size in unit.local)

    def _issue(self, unit: UnitBytes) -> None:
        if unit not in self.gathered and unit not in self.in_flight:
            self._start_gather(unit)

    def _reshard(self, unit: UnitBytes) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self._free_gathered(unit)

    @abstractmethod
    def _start_gather(self, unit: UnitBytes) -> None: ...

    @abstractmethod
    def _free_gathered(self, unit: UnitBytes) -> None: ...

    def _padded_bytes(self, unit: UnitBytes, width: int) -> int:
        """Bytes of the full parameters or gradients of a unit, with padding."""
        return unit.local_elements * self.setup.shard_ranks * width

    def _over_shards(self, name: str, bytes: int, after: float) -> float:
        if self.setup.shard_ranks == 1:
            return after
        return self.ledger.communicate(name, bytes, self.setup.shard_ranks, 1, "shard", after)

    def _all_reduce(self, shard_bytes: int, after: float) -> float:
        setup = self.setup
        if setup.replicas == 1:
            return after
        return self.ledger.communicate("all_reduce", shard_bytes, setup.replicas, setup.shard_ranks, "replicate", after)

    def _keep_gradient(self, unit: UnitBytes, shard_bytes: int, holds_shard: bool = False) -> None:
        """Keep a shard's reduced gradient in float32, or offload it, and update in the backward if asked to."""
        bytes, stream = shard_bytes, REDUCE
        if self.setup.reduce_bytes != 4:
            bytes, stream = 4 * unit.local_elements, ALL_REDUCE if self.setup.replicas > 1 else REDUCE
            self.ledger.add(Category.gradients, bytes, stream=stream)
            if not holds_shard:
                self.ledger.add(Category.gradients, -shard_bytes, stream=REDUCE)
        if self.cpu_offload:
            self.reduced = max(self.reduced, self.ledger.transfer(bytes, "down", self.reduced))
            self.ledger.add(Category.gradients, -bytes, stream=stream)
        else:
            self.gradients[stream] = self.gradients.get(stream, 0) + bytes
        if self.update.in_backward:  # concurrent with the backward
            self.reduced += self.update.update_in_backward(unit, self.update_stream)
            self.free_gradients(unit.local_elements)

    def free_gradients(self, elements: int | None = None) -> None:
        """Free gradients on the device."""
        for stream in self.gradients:
            left = self.gradients[stream]
            freed = left if elements is None else min(left, 4 * elements)
            self.ledger.add(Category.gradients, -freed, stream=stream)
            self.gradients[stream] = left - freed


class FSDP2StepModel(ShardedStepModel):
    """``fully_shard``: gathers through a buffer on its own stream, computes on copies on the compute stream."""

    update_stream = REDUCE

    def __init__(self, setup: StepSetup, ledger: Ledger, update: Update) -> None:
        super().__init__(setup, ledger, update)
        self.previous_output = 0  # Bytes of the last gather's buffer, kept until the next is complete
        self.reduce_input = 0  # Bytes of the last reduction's buffer, kept until the next
        self.reduction_read = 0.0
        self.held_until_end = 0
        self.copied_out = 0.0  # Time at which the last gather's buffer was read

    def _start_gather(self, unit: UnitBytes) -> None:
        width = self.setup.compute_bytes
        output = self._padded_bytes(unit, width)
        if self.setup.shard_ranks > 1:
            cast = unit.local_elements * width if width < 4 else 0
            for bytes in (cast, output, -cast):
                self.ledger.add(Category.gathered_parameters, bytes, stream=COPY_IN)
        self._gather(unit, output)

    def _complete(self, unit: UnitBytes, in_forward: bool) -> None:
        setup, ledger = self.setup, self.ledger
        output = self._padded_bytes(unit, setup.compute_bytes) if setup.shard_ranks > 1 else 0
        if in_forward:
            ledger.add(Category.gathered_parameters, -self.previous_output, stream=COPY_IN)
            self.gather_after = max(self.gather_after, self.copied_out)
        super()._complete(unit, in_forward)
        self._hold(unit, 1)
        ledger.move(2 * unit.elements * setup.compute_bytes)
        if in_forward:
            self.previous_output, self.copied_out = output, ledger.compute
        else:
            ledger.add(Category.gathered_parameters, -output, stream=COPY_IN)
            self.gather_after = ledger.compute

    def begin_forward(self) -> None:
        """Wait for the optimizer step."""
        super().begin_forward()
        self.copied_out = self.ledger.compute

    def leave(self, unit: UnitBytes) -> None:
        """Reshard; free the last buffer after the root."""
        super().leave(unit)
        if unit is self.units.root:
            self.ledger.add(Category.gathered_parameters, -self.previous_output, stream=COPY_IN)
            self.previous_output = 0

    def _free_gathered(self, unit: UnitBytes) -> None:
        self._hold(unit, -1)

    def _hold(self, unit: UnitBytes, sign: int) -> None:
        each = sign * self.setup.shard_ranks * self.setup.compute_bytes
        self.ledger.add(Category.gathered_parameters, *(size * each for size in unit.local))

    def after_backward(self, unit: UnitBytes) -> None:
        """Reshard, then reduce through a buffer of the compute stream, or accumulate before the last micro-batch."""
        setup, ledger = self.setup, self.ledger
        if not unit.params:
            return
        width = setup.compute_bytes
        gradients = unit.elements * width
        accumulated = [param.numel() * setup.reduce_bytes for param in unit.params]
        self._reshard(unit)
        if unit in self.accumulated:
            # Added to the gradients of earlier micro-batches, in the reduction's dtype.
            ledger.move(gradients + 2 * unit.elements * setup.reduce_bytes)
            self.release_gradients(unit)
            if not self.last:
                return
        elif not self.last:
            # Converted to the reduction's dtype, one parameter after the other.
            if width != setup.reduce_bytes:
                ledger.note_peak(max(accumulated))
                ledger.move(gradients + sum(accumulated))
            self.release_gradients(unit)
            ledger.add(Category.reduction_buffers, *accumulated)
            self.accumulated.add(unit)
            return
        ledger.wait(self.reduction_read, "communication")
        ledger.add(Category.reduction_buffers, -self.reduce_input)
        self.reduce_input = self._padded_bytes(unit, setup.reduce_bytes)
        ledger.add(Category.reduction_buffers, self.reduce_input)
        ledger.move(gradients + self.reduce_input)
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            ledger.add(Category.reduction_buffers, *(-size for size in accumulated))
        else:
            self.release_gradients(unit)
        shard_bytes = unit.local_elements * setup.reduce_bytes
        ledger.add(Category.gradients, shard_bytes, stream=REDUCE)
        self.reduction_read = self._over_shards("reduce_scatter", self.reduce_input, ledger.compute)
        self.reduced = max(self.reduced, self._all_reduce(shard_bytes, self.reduction_read))
        holds = setup.replicas > 1 and (self.cpu_offload or setup.reduce_bytes != 4)
        if holds:
            self.held_until_end += shard_bytes
            if setup.reduce_bytes == 4:
                ledger.add(Category.gradients, shard_bytes, stream=REDUCE)
        self._keep_gradient(unit, shard_bytes, holds)

    def end_backward(self) -> None:
        """Wait for the reductions and free their buffers."""
        if self.last:
            self.ledger.wait(self.reduced, "communication")
            self.ledger.add(Category.reduction_buffers, -self.reduce_input)
            self.ledger.add(Category.gradients, -self.held_until_end, stream=REDUCE)
            self.reduce_input = self.held_until_end = 0
            if self.cpu_offload:
                self.ledger.wait_on_host()


class FSDP1StepModel(ShardedStepModel):
    """FullyShardedDataParallel: gathers into flat parameters on one stream, reduces flat gradients on another.

    Memory that crosses streams is freed late (``record_stream``). The limit on gathers bounds it: the host waits for a
    unit before it gathers the second next.
    """

    def __init__(self, setup: StepSetup, ledger: Ledger, update: Update) -> None:
        super().__init__(setup, ledger, update)
        self.freed: deque[tuple[int, float]] = deque()
        """Freed gathers: bytes, and the time at which the compute stream has passed them."""
        self.flat_gradients: deque[int] = deque()

    def construct(self) -> None:
        """Materialize, flatten and shard one unit after the other."""
        if not self.cpu_offload:
            self.ledger.spike(8 * max(unit.elements for unit in self.order))
        super().construct()

    def _start_gather(self, unit: UnitBytes) -> None:
        ledger, width = self.ledger, self.setup.compute_bytes
        if width < 4 or self.cpu_offload:
            ledger.spike(unit.local_elements * width, stream=COPY_IN, category=Category.gathered_parameters)
        if len(self.freed) >= 2:
            bytes_freed, moment = self.freed.popleft()
            ledger.host = max(ledger.host, moment)
            ledger.reuse(bytes_freed, GATHER)
        output = self._padded_bytes(unit, width)
        ledger.add(Category.gathered_parameters, output, stream=GATHER)
        self._gather(unit, output)

    def _free_gathered(self, unit: UnitBytes) -> None:
        freed = self._padded_bytes(unit, self.setup.compute_bytes)
        self.ledger.retire(Category.gathered_parameters, freed)
        self.freed.append((freed, self.ledger.compute))

    def after_backward(self, unit: UnitBytes) -> None:
        """Join the gradients into a flat one, reshard, reduce on the reduction stream."""
        setup, ledger = self.setup, self.ledger
        if not unit.params:
            return
        gradients = unit.elements * setup.compute_bytes
        ledger.spike(gradients, category=Category.reduction_buffers)
        ledger.move(2 * gradients, len(unit.params))
        if unit.resharded or self.last:
            self._reshard(unit)
        self.release_gradients(unit)
        if unit in self.accumulated:
            ledger.move(3 * gradients)
        else:
            ledger.add(Category.reduction_buffers, gradients)
        if not self.last:
            self.accumulated.add(unit)
            return
        self.accumulated.discard(unit)
        if len(self.flat_gradients) >= 2:
            ledger.reuse(self.flat_gradients.popleft(), COMPUTE)
        padded = self._padded_bytes(unit, setup.reduce_bytes)
        shard_bytes = unit.local_elements * setup.reduce_bytes
        cast = padded if setup.reduce_bytes != setup.compute_bytes else 0
        ledger.add(Category.reduction_buffers, cast, stream=REDUCE)
        ledger.add(Category.gradients, shard_bytes, stream=REDUCE)
        # The cast and the division by the ranks run on the reduction stream.
        moved = gradients + 3 * padded if cast else 2 * padded
        begins = max(self.reduced, ledger.compute)
        begins += kernel_seconds(ledger.hardware, KernelKind.memory, 0.0, moved, "")
        self.reduced = self._over_shards("reduce_scatter", padded, begins)
        ledger.add(Category.reduction_buffers, -cast, stream=REDUCE)
        ledger.retire(Category.reduction_buffers, gradients)
        self.flat_gradients.append(gradients)
        self.reduced = self._all_reduce(shard_bytes, self.reduced)
        self._keep_gradient(unit, shard_bytes)

    def end_backward(self) -> None:
        """Wait for the reductions."""
        self.ledger.wait(self.reduced, "communication")
        while self.last and self.flat_gradients:
            self.ledger.reuse(self.flat_gradients.popleft(), COMPUTE)
