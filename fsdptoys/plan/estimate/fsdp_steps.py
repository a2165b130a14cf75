"""Step models of FSDP1 and FSDP2: blocks, streams and collectives around a unit's forward and backward.

After PyTorch 2.13 (``torch/distributed/fsdp``), with its names of streams. Not covered: float64 sums of the
deterministic mode.
"""

from abc import abstractmethod
from collections import deque

from fsdptoys.memory import CPUOffloadExecutor
from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel.fsdp import FSDPConfig

from .optimizer_step import Update
from .step_model import StepModel
from .trace_writer import COMPUTE, TraceWriter
from .units import StepSetup, UnitBytes

COPY_IN, GATHER, REDUCE, ALL_REDUCE = "all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce"


class ShardedStepModel(StepModel):
    """Common part of FSDP1 and FSDP2."""

    def __init__(self, setup: StepSetup, writer: TraceWriter, update: Update) -> None:
        super().__init__(setup, writer, update)
        assert isinstance(self.config.parallel, FSDPConfig)
        self.parallel = self.config.parallel
        self.cpu_offload = self.memory.cpu_offload
        overlapped = self.memory.cpu_offload_executor is CPUOffloadExecutor.overlapped
        self.upload_width = 2 if overlapped and setup.compute_bytes == 2 else 4
        self.order = self.units.in_forward()
        # As the strategy: the host waits for exchanges of tokens, so the next unit is gathered before.
        self.forward_prefetch = max(self.parallel.forward_prefetch, setup.axes.ep > 1)
        self.gathered: dict[UnitBytes, list[int]] = {}
        self.in_flight: dict[UnitBytes, tuple[int | None, list[int]]] = {}
        """Unit → event at the end of its gather, and the gathered blocks."""
        self.begun: set[UnitBytes] = set()
        self.accumulated: dict[UnitBytes, list[int]] = {}
        self.reduced: dict[UnitBytes, list[int]] = {}

    def construct(self) -> None:
        """Allocate the shards."""
        if not self.cpu_offload:
            self.allocate_parameters(self.units.shards())
        self.update.construct()

    def begin_forward(self) -> None:
        """Let the gathering streams wait for the optimizer step, as the root's forward does."""
        self.writer.wait_for(COMPUTE, COPY_IN, GATHER)
        self.begun.clear()

    def enter(self, unit: UnitBytes) -> None:
        """Gather the unit and prefetch the next ones."""
        if unit in self.gathered:
            return
        self._issue(unit)
        self._complete(unit, in_forward=True)
        ahead = self.order.index(unit) + 1
        for other in self.order[ahead : ahead + self.forward_prefetch]:
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

    def _issue(self, unit: UnitBytes) -> None:
        if unit not in self.gathered and unit not in self.in_flight:
            self._start_gather(unit)

    def _reshard(self, unit: UnitBytes) -> None:
        if unit in self.gathered:
            self._free_gathered(unit, self.gathered.pop(unit))

    @abstractmethod
    def _start_gather(self, unit: UnitBytes) -> None: ...

    @abstractmethod
    def _complete(self, unit: UnitBytes, in_forward: bool) -> None: ...

    @abstractmethod
    def _free_gathered(self, unit: UnitBytes, blocks: list[int]) -> None: ...

    def _copy_in(self, sizes: list[int]) -> list[int]:
        """Upload offloaded shards, cast them if needed, and return their blocks; ``sizes`` in elements."""
        writer, width, made = self.writer, self.setup.compute_bytes, []
        if not self.cpu_offload:
            made = writer.alloc(Category.gathered_parameters, sum(sizes) * width, stream=COPY_IN) if width < 4 else []
            writer.move(6 * sum(sizes), bool(made), COPY_IN)
        for size in filter(None, sizes) if self.cpu_offload else ():
            uploaded = writer.alloc(Category.gathered_parameters, size * self.upload_width, stream=COPY_IN)
            writer.copy(size * self.upload_width, COPY_IN, to_device=True)
            if width < self.upload_width:
                made += writer.alloc(Category.gathered_parameters, size * width, stream=COPY_IN)
                writer.move(6 * size, stream=COPY_IN)
                writer.free(uploaded)
            else:
                made += uploaded
        return made

    def _padded_bytes(self, unit: UnitBytes, width: int) -> int:
        """Bytes of the full parameters or gradients of a unit, with padding."""
        return unit.local_elements * unit.ranks * width

    def _over_shards(self, unit: UnitBytes, name: str, size: int, stream: str) -> None:
        if unit.ranks > 1:
            self.writer.collective(name, size, unit.ranks, unit.stride, unit.axis, stream)

    def _finish_reduction(self, unit: UnitBytes, shard: list[int]) -> list[int]:
        """Reduce a shard's gradient over replicas, keep it in float32 or offload it, and update in the backward.

        Returns blocks that the strategy may free.
        """
        writer, setup, stream = self.writer, self.setup, REDUCE
        size, free = unit.local_elements * setup.reduce_bytes, []
        if setup.replicas > 1:
            stream = ALL_REDUCE
            writer.wait_for(REDUCE, ALL_REDUCE)
            writer.collective("all_reduce", size, setup.replicas, setup.shard_ranks, "replicate", ALL_REDUCE)
        if setup.reduce_bytes != 4:
            free, shard = shard, writer.alloc(Category.gradients, 4 * unit.local_elements, stream=stream)
            writer.move(unit.local_elements * (4 + setup.reduce_bytes), stream=stream)
        if self.cpu_offload:
            for elements in filter(None, self._downloads(unit)):
                writer.copy(4 * elements, stream, to_device=False)
            free = [*free, *shard]
        else:
            self.reduced[unit] = shard
        self._reduction_stream = stream
        if self.update.in_backward:
            for param in unit.params:
                self.update.update_in_backward(setup.names[param], REDUCE)
            self.free_gradients(unit)
        return free

    def _downloads(self, unit: UnitBytes) -> list[int]:
        return unit.local

    def end_backward(self) -> None:
        """Wait for the reductions; the host waits for offloaded gradients."""
        if self.last:
            self.writer.wait_for(self._reduction_stream, COMPUTE)
            if self.cpu_offload:
                self.writer.host_wait_stream(self._reduction_stream)

    def free_gradients(self, unit: UnitBytes) -> None:
        """Free gradients on the device."""
        self.writer.free(self.reduced.pop(unit, ()))


class FSDP2StepModel(ShardedStepModel):
    """``fully_shard``: gathers through a buffer on its own stream, computes on copies on the compute stream."""

    update_stream = REDUCE

    def __init__(self, setup: StepSetup, writer: TraceWriter, update: Update) -> None:
        super().__init__(setup, writer, update)
        self.previous: tuple[int | None, list[int]] = None, []
        """Event after the last gather of the forward was copied, and its buffer, kept until the next is complete."""
        self.reduction: tuple[int | None, list[int]] = None, []
        """Event at the end of the last reduction, and its buffer, kept until the next."""
        self.held: list[int] = []

    def _start_gather(self, unit: UnitBytes) -> None:
        writer, width = self.writer, self.setup.compute_bytes
        if unit.ranks == 1:
            self.in_flight[unit] = None, []
            return
        shards = self._copy_in(unit.local)
        output = writer.alloc(Category.gathered_parameters, self._padded_bytes(unit, width), stream=COPY_IN)
        writer.move(2 * unit.local_elements * width, stream=COPY_IN)
        writer.wait_for(COPY_IN, GATHER)
        self._over_shards(unit, "all_gather", self._padded_bytes(unit, width), GATHER)
        self.in_flight[unit] = writer.record(GATHER), output
        writer.free(shards)

    def _complete(self, unit: UnitBytes, in_forward: bool) -> None:
        writer, width = self.writer, self.setup.compute_bytes
        event, output = self.in_flight.pop(unit)
        if in_forward:
            writer.wait(self.previous[0], COPY_IN, GATHER)
        writer.wait(event, COMPUTE)
        if self.cpu_offload and unit.ranks == 1:
            for size in unit.local:
                writer.copy(size * self.upload_width, COMPUTE, to_device=True)
        sizes = [size * unit.ranks * width for size in unit.local]
        self.gathered[unit] = writer.alloc(Category.gathered_parameters, *sizes)
        writer.move((2 if unit.ranks > 1 else 5 if width < 4 else 2) * unit.elements * width)
        copied = writer.record()
        if in_forward:
            writer.free(self.previous[1])
            self.previous = copied, output
        else:
            writer.wait(copied, COPY_IN, GATHER)
            writer.free(output)

    def leave(self, unit: UnitBytes) -> None:
        """Reshard; free the last buffer after the root."""
        super().leave(unit)
        if unit is self.units.root:
            event, blocks = self.previous
            self.writer.wait(event, COPY_IN, GATHER)
            self.writer.free(blocks)
            self.previous = None, []

    def _free_gathered(self, unit: UnitBytes, blocks: list[int]) -> None:
        self.writer.free(blocks)

    def after_backward(self, unit: UnitBytes) -> None:
        """Reshard, then reduce through a buffer of the compute stream, or accumulate before the last micro-batch."""
        setup, writer = self.setup, self.writer
        if not unit.params:
            return
        gradients = unit.elements * setup.compute_bytes
        self._reshard(unit)
        if not self.last or unit in self.accumulated:
            self._accumulate(unit)
            if not self.last:
                return
        writer.wait(self.reduction[0], COMPUTE)
        writer.free(self.reduction[1])
        size = self._padded_bytes(unit, setup.reduce_bytes)
        buffer = writer.alloc(Category.reduction_buffers, size)
        writer.move(gradients + size)
        writer.free(self.accumulated.pop(unit, ()))
        # PyTorch's loop variable keeps the last one.
        late = self._gradients[unit].pop(setup.names[unit.params[-1]], None)
        self.release_gradients(unit)
        writer.wait_for(COMPUTE, REDUCE)
        category = Category.gradients if setup.reduce_bytes == 4 else Category.reduction_buffers
        shard = writer.alloc(category, unit.local_elements * setup.reduce_bytes, stream=REDUCE)
        self._over_shards(unit, "reduce_scatter", size, REDUCE)
        if unit.ranks == 1:
            writer.move(2 * size, stream=REDUCE)
        self.reduction = writer.record(REDUCE), buffer
        free = self._finish_reduction(unit, shard)
        writer.free([late] if late is not None else [])
        if setup.replicas > 1:
            self.held += free
        else:
            writer.free(free)

    def _accumulate(self, unit: UnitBytes) -> None:
        """Add the gradients to those of earlier micro-batches, in the reduction's dtype."""
        writer, setup = self.writer, self.setup
        size = unit.elements * setup.reduce_bytes
        if unit in self.accumulated:
            writer.move(unit.elements * setup.compute_bytes + 2 * size, len(unit.params))
        elif setup.compute_bytes == setup.reduce_bytes:
            self.accumulated[unit] = [*self._gradients.pop(unit, {}).values()]
        else:
            made = self.accumulated[unit] = []
            for name, block in self._gradients.pop(unit, {}).items():
                count = setup.parameters[name].numel()
                made += writer.alloc(Category.reduction_buffers, count * setup.reduce_bytes)
                writer.move(count * (setup.compute_bytes + setup.reduce_bytes))
                writer.free([block])
        self.release_gradients(unit)

    def end_backward(self) -> None:
        """Wait for the reductions and free their buffers."""
        super().end_backward()
        if self.last:
            event, blocks = self.reduction
            self.writer.wait(event, COMPUTE)
            self.writer.free([*blocks, *self.held])
            self.reduction, self.held = (None, []), []


class FSDP1StepModel(ShardedStepModel):
    """FullyShardedDataParallel: gathers into flat parameters on one stream, reduces flat gradients on another.

    Memory that crosses streams is reusable only once these have passed the free. The limit on gathers bounds it: the
    host waits for a unit before it gathers the second next.
    """

    def __init__(self, setup: StepSetup, writer: TraceWriter, update: Update) -> None:
        super().__init__(setup, writer, update)
        self.freed: deque[int] = deque()  # Events at which gathered parameters were freed
        self._current = COMPUTE  # Stream of the latest work of FSDP1

    def construct(self) -> None:
        """Materialize, flatten and shard one unit after the other, the root last."""
        writer = self.writer
        for unit in () if self.cpu_offload else self.units.after_forward():
            full = writer.alloc(Category.temporary, *(4 * param.numel() for param in unit.params))
            if unit.ranks > 1:
                full += writer.alloc(Category.temporary, 4 * unit.local_elements * unit.ranks)
            writer.alloc(Category.parameters, 4 * unit.local_elements)
            writer.free(full)
        self.update.construct()

    def _start_gather(self, unit: UnitBytes) -> None:
        writer, width = self.writer, self.setup.compute_bytes
        shards = self._copy_in([unit.local_elements])
        writer.wait_for(COPY_IN, GATHER)
        if len(self.freed) >= 2:
            writer.host_wait(self.freed.popleft())
        if unit.ranks > 1:
            output = writer.alloc(Category.gathered_parameters, self._padded_bytes(unit, width), stream=GATHER)
            self._over_shards(unit, "all_gather", self._padded_bytes(unit, width), GATHER)
            writer.use_on(GATHER, shards)
            writer.free(shards)
        else:
            output = shards
        self.in_flight[unit] = None, output

    def _complete(self, unit: UnitBytes, in_forward: bool) -> None:
        self.gathered[unit] = self.in_flight.pop(unit)[1]
        self.writer.wait_for(GATHER, COMPUTE)

    def _free_gathered(self, unit: UnitBytes, blocks: list[int]) -> None:
        self.writer.use_on(self._current, blocks)
        self.writer.free(blocks)
        if unit.ranks > 1:  # only gathers are limited
            self.freed.append(self.writer.record(self._current))

    def after_backward(self, unit: UnitBytes) -> None:
        """Join the gradients into a flat one on the gathering stream, reshard, reduce on the reduction stream."""
        setup, writer = self.setup, self.writer
        if not unit.params:
            return
        size, self._current = unit.elements * setup.compute_bytes, GATHER
        writer.wait_for(COMPUTE, GATHER)
        writer.use_on(GATHER, self._gradients[unit].values())
        flat = writer.alloc(Category.gathered_parameters, size, stream=GATHER)
        writer.move(2 * size, stream=GATHER)
        self.release_gradients(unit)
        if unit.resharded or self.last:
            self._reshard(unit)
        if unit in self.accumulated:
            writer.move(3 * size, stream=GATHER)
            writer.free(flat)
            flat = self.accumulated.pop(unit)
        if self.last:
            self._reduce(unit, flat)
        else:
            self.accumulated[unit] = flat
        writer.wait_for(GATHER, COMPUTE)
        self._current = COMPUTE

    def _reduce(self, unit: UnitBytes, flat: list[int]) -> None:
        setup, writer = self.setup, self.writer
        padded = self._padded_bytes(unit, setup.reduce_bytes)
        shard_bytes = unit.local_elements * setup.reduce_bytes
        writer.wait_for(GATHER, REDUCE)
        casts = setup.reduce_bytes != setup.compute_bytes
        cast = writer.alloc(Category.reduction_buffers, padded, stream=REDUCE) if casts else []
        writer.move(unit.elements * setup.compute_bytes + padded, int(casts), REDUCE)
        shard = cast
        if unit.ranks > 1:
            shard = writer.alloc(Category.gradients, shard_bytes, stream=REDUCE)
            writer.move(2 * padded, stream=REDUCE)
            self._over_shards(unit, "reduce_scatter", padded, REDUCE)
            writer.move(2 * shard_bytes, stream=REDUCE)
            writer.free(cast)
        elif not casts:
            shard, flat = flat, []
        writer.use_on(REDUCE, flat)
        writer.free(flat)
        writer.free(self._finish_reduction(unit, shard))

    def _downloads(self, unit: UnitBytes) -> list[int]:
        return [unit.local_elements]
