"""Order of a training step, as the trainer and PyTorch have it: issues the traces of units and of the optimizer.

Strategies differ in the events around a unit's forward and backward.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from fsdptoys.memory import GradientCheckpointing
from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel import DDPConfig
from fsdptoys.plan.simulator.events import Mark

from .optimizer_step import Update
from .trace_writer import COMPUTE, TraceWriter
from .unit_traces import GRADIENT, Segment, innermost
from .units import StepSetup, UnitBytes
from .update_traces import pinned_bytes

OFFLOAD = "activation offload"  # Stream of copies of activations
COUNTS = "communication"  # Stream of collectives that nothing waits for at once
EMBEDDING = "embed_tokens.weight"
SMALL = 512  # Bytes of a block that holds numbers
BEFORE_FORWARD, AFTER_BACKWARD, AFTER_NORM = 5, 3, 42
"""Kernels on single numbers: of the labels' count, of the loss, and of norm, votes and the loss's mean."""


class StepModel(ABC):
    """Issues steps to a writer; a strategy implements the events around units."""

    update_stream = COMPUTE  # Stream of updates in the backward

    def __init__(self, setup: StepSetup, writer: TraceWriter, update: Update) -> None:
        self.setup, self.writer, self.update = setup, writer, update
        self.config, self.units, self.memory = setup.config, setup.units, setup.config.memory
        memory, self.segments = self.memory, setup.segments.in_order()
        chosen = range(1, len(self.segments) - 1)[memory.checkpointing_start_index :: memory.checkpointing_every]
        on = memory.gradient_checkpointing is not GradientCheckpointing.none and memory.activation_offload
        self._offloaded = list(chosen) if on else []
        self.offload_bytes = 0  # Host memory of offloaded activations
        self._bases: dict[int, tuple[int, int]] = {}  # Of a segment's blocks, by its number
        self._known: dict[int, dict[int, int]] = {}
        self._gradients: defaultdict[UnitBytes, dict[str, int]] = defaultdict(dict)
        """Unit → blocks of its parameters' gradients, in the backward's dtype."""
        self._pending: dict[str, int] = {}  # First gradient of a tied weight
        self._leaving: dict[int, int | None] = {}  # Offloaded segment → event of its last copy
        self._on_host: set[int] = set()
        self._multiplied: set[str] = set()  # Threads that have the library's workspace

    # Implemented by strategies

    @abstractmethod
    def construct(self) -> None:
        """Allocate parameters."""

    def begin_forward(self) -> None:  # noqa: B027 (replicated parameters need no gathers)
        """Run before the embedding."""

    def enter(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run before a unit's forward."""

    def leave(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run after a unit's forward."""

    def before_backward(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run before a unit's backward."""

    def after_gradient(self, unit: UnitBytes, name: str, block: int) -> None:
        """Run when the gradient of a unit's parameter is final."""
        self._gradients[unit][name] = block

    def after_backward(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run after a unit's backward, when all its gradients exist."""

    @abstractmethod
    def end_backward(self) -> None:
        """Run after the whole backward."""

    @abstractmethod
    def free_gradients(self, unit: UnitBytes) -> None:
        """Free a unit's reduced gradients."""

    # The step

    def allocate_parameters(self, shards: Iterable[tuple[UnitBytes, nn.Parameter, int]]) -> None:
        """Allocate shards as ``parallel.init_weights`` does: a tied weight twice, until it is tied again."""
        tied = self.setup.parameters[EMBEDDING] if self.setup.ties else None
        again = 0
        for _, param, elements in shards:
            self.writer.alloc(Category.parameters, 4 * elements)
            again += 4 * elements * (param is tied)
        self.writer.free(self.writer.alloc(Category.temporary, again))

    def step(self, micro_batches: int) -> None:
        """Run one step; micro-batches between the first and the last have no phases of their own."""
        writer, train, number = self.writer, self.config.train, self.update.step
        writer.mark(number, "data")
        inputs = writer.alloc(Category.buffers, train.batch_size * train.seq_len * 16 * micro_batches)
        writer.copy(train.batch_size * train.seq_len * 16 * micro_batches, COMPUTE, to_device=True)
        writer.move(0, BEFORE_FORWARD)
        for index in range(micro_batches):
            self.first, self.last = index == 0, index == micro_batches - 1
            self._marks = self.first or self.last
            self._mark("forward")
            self._forward()
            self._mark("backward")
            self._backward()
            writer.move(0, AFTER_BACKWARD)
        writer.mark(number, "optimizer")
        if not self.update.in_backward:
            self.update.clip()
        writer.move(0, AFTER_NORM)
        for _ in range(2):  # of the norm; of the loss and the votes
            writer.collective("all_reduce", SMALL, self.setup.world_size, 1, "world")
        if self.update.waits:
            writer.host_wait_stream()
        self.update.take()
        for unit in () if self.update.holds_gradients else self.units.in_forward():
            self.free_gradients(unit)
        writer.free(inputs)
        writer.mark(number, "end")

    def _mark(self, phase: str) -> None:
        if self._marks:
            self.writer.mark(self.update.step, phase)

    def _forward(self) -> None:
        writer, setup = self.writer, self.setup
        self.begin_forward()
        self._enter(self.units.root)
        rotations = getattr(setup.model, "inv_freq", None)
        size = 4 * self.setup.part * rotations.numel() if isinstance(rotations, Tensor) else 0
        writer.move(size, AFTER_BACKWARD)
        self._tables = writer.alloc(Category.activations, size, size)
        for number, units in enumerate(self._parts()):
            self._offload_before(number)
            self._forward_through(number, self.segments[number], units)
            self._offload_after(number)
        self.leave(self.units.root)

    def _parts(self) -> Iterator[dict[str, UnitBytes]]:
        """Units of each segment."""
        yield self.units.embedding
        yield from self.units.blocks
        yield self.units.head

    def _forward_through(self, number: int, segment: Segment, units: dict[str, UnitBytes]) -> None:
        outer = _outer(segment, units)
        for unit in outer:
            self._enter(unit)
        self._bases[number] = self.writer.reserve(segment.blocks, segment.device_events)
        self._known[number] = {segment.input: self._output(number - 1)} if segment.input else {}
        inside: list[str] = []
        for stage in segment.forward:
            path = _path(stage.part, units)
            for name in reversed(inside):
                if name not in path:
                    self.leave(units[name])
            for name in path:
                if name not in inside:
                    self._enter(units[name])
            inside = path
            self.writer.issue(stage.events, self._bases[number], self._known[number], on_mark=self._take_workspace)
        for name in reversed(inside):
            self.leave(units[name])
        for unit in outer:
            self.leave(unit)

    def _output(self, number: int) -> int:
        return self._bases[number][0] + self.segments[number].output

    def _enter(self, unit: UnitBytes) -> None:
        if unit.params:
            if self.first:
                for updated in self.update.before_forward(unit):
                    self.free_gradients(updated)
            self.enter(unit)

    def _backward(self) -> None:
        parts = list(self._parts())
        last = len(parts) - 1
        if self.units.root.params:
            self.before_backward(self.units.root)
        for number in range(last, -1, -1):
            if number in (last - 1, last - 2, 1, 0):
                self._mark("backward")  # apart, since peaks of these are linear in the depth
            self._return_before(number)
            self._backward_through(number, self.segments[number], parts[number])
            done = dict.fromkeys(parts[number].values()) if number in (0, last) else parts[number].get("")
            for unit in [done] if isinstance(done, UnitBytes) else done or ():
                if number != last or unit is not self.units.tied:
                    self.after_backward(unit)
        self.writer.free([self._output(last), *self._tables])
        if self.units.root.params:
            self.after_backward(self.units.root)
        self.end_backward()

    def _backward_through(self, number: int, segment: Segment, units: dict[str, UnitBytes]) -> None:
        for unit in _outer(segment, units):
            self.before_backward(unit)
        base, known = self._bases[number], self._known[number]
        if segment.output_gradient:
            after = self.segments[number + 1]
            gradient = after.input_gradient
            known[segment.output_gradient] = (
                self._known[number + 1].get(gradient) or self._bases[number + 1][0] + gradient
            )

        def reach(mark: Mark) -> None:
            if mark.step == GRADIENT:
                self._final(number, mark.phase, base[0] + segment.gradients[mark.phase], units)
            else:
                self._take_workspace(mark)

        for index, stage in enumerate(segment.backward):
            path = _path(stage.part, units)
            for name in path:
                self.before_backward(units[name])
            self.writer.issue(stage.events, base, known, on_mark=reach)
            for name in reversed(path):
                if not any(name in _path(later.part, units) for later in segment.backward[index + 1 :]):
                    self.after_backward(units[name])

    def _take_workspace(self, mark: Mark) -> None:
        """Allocate the library's workspace before a thread's first matmul."""
        if mark.phase not in self._multiplied:
            self._multiplied.add(mark.phase)
            self.writer.alloc(Category.temporary, self.setup.workspace_bytes)

    def _final(self, number: int, name: str, block: int, units: dict[str, UnitBytes]) -> None:
        """Add the second gradient of a tied weight to the first; report any other."""
        unit = units.get(innermost(name, units), self.units.root)
        if self.setup.ties and name in ("lm_head.weight", EMBEDDING):
            if name == "lm_head.weight":
                self._pending[name] = block
                return
            size = self.setup.parameters[EMBEDDING].numel() * self.setup.compute_bytes
            first, joined = self._pending.pop("lm_head.weight"), []
            if not self.memory.chunk_loss:  # the head's gradient is then a view, to which autograd adds out of place
                joined = self.writer.alloc(Category.reduction_buffers, size)
            self.writer.move(3 * size)
            self.writer.free([block, *([first] if joined else [])])
            (block,) = joined or [first]
        self.after_gradient(unit, self.setup.full_name(number, name), block)

    def release_gradients(self, unit: UnitBytes) -> None:
        """Free the backward's gradients of a unit."""
        self.writer.free(self._gradients.pop(unit, {}).values())

    # Activation offload

    def _kept(self, number: int) -> dict[int, int]:
        """Offloaded tensors of a checkpointed block, its input and what it saves for the backward: number → bytes."""
        segment, base = self.segments[number], self._bases[number][0]
        known = self._known[number]
        size = self.config.train.batch_size * self.setup.part * self.setup.model.config.dim
        kept = {base + block: size for block, size in segment.kept.items() if block != segment.input}
        return {known[segment.input]: size * self.setup.compute_bytes, **kept}

    def _offload_before(self, number: int) -> None:
        """Before a checkpointed block, free device copies of the second last one."""
        if number in self._offloaded and (place := self._offloaded.index(number)) >= 2:
            leaving = self._offloaded[place - 2]
            self.writer.wait(self._leaving.pop(leaving), COMPUTE)
            self.writer.free(self._kept(leaving))
            self._on_host.add(leaving)

    def _offload_after(self, number: int) -> None:
        if number in self._offloaded and number != self._offloaded[-1]:
            sizes = self._kept(number).values()
            self._leaving[number] = self._copy(sizes, to_device=False)
            if self.first and self.update.step == 1:
                self.offload_bytes += sum(map(pinned_bytes, sizes))

    def _return_before(self, number: int) -> None:
        """Before a checkpointed block's backward, prefetch the activations of the preceding one."""
        if number not in self._offloaded:
            return
        place = self._offloaded.index(number)
        for wanted in self._offloaded[max(0, place - 1) : place + 1][::-1]:
            if wanted in self._on_host:
                self._on_host.remove(wanted)
                segment, known = self.segments[wanted], self._known[wanted]
                kept = self._kept(wanted)
                made = dict(zip(kept, self.writer.alloc(Category.activations, *kept.values()), strict=True))
                known[segment.input] = made[known[segment.input]]
                known.update(
                    {block: made[self._bases[wanted][0] + block] for block in segment.kept if block != segment.input}
                )
                self._leaving[wanted] = self._copy(kept.values(), to_device=True)
        self.writer.wait(self._leaving.pop(number, None), COMPUTE)

    def _copy(self, sizes: Iterable[int], to_device: bool) -> int:
        for size in sizes:
            self.writer.wait_for(COMPUTE, OFFLOAD)
            self.writer.copy(size, OFFLOAD, to_device)
        return self.writer.record(OFFLOAD)


class ReplicatedStepModel(StepModel):
    """DDP and single process: every rank holds all parameters.

    After ``torch/nn/parallel/distributed.py`` and ``parallel/precision.py``.
    """

    def construct(self) -> None:
        """Allocate the parameters and DDP's buckets."""
        self.casts = self.setup.compute_bytes == 2
        self.ddp = not self.config.parallel.single_process
        self.grads: dict[str, list[int]] = {}
        self.bucket_elements = 0  # Elements in the current bucket
        shards = self.units.shards()
        self.allocate_parameters(shards)
        if self.ddp:
            assert isinstance(self.config.parallel, DDPConfig)
            self.cap = self.config.parallel.bucket_cap_mb * 2**18
            self.writer.alloc(Category.gradients, *self._buckets([param.numel() for _, param, _ in shards][::-1]))
        self._cast: dict[str, int] = {}
        self.update.construct()

    def _buckets(self, counts: list[int]) -> list[int]:
        """Bytes of DDP's buckets."""
        sizes = [0]
        for count in counts:
            sizes[-1] += 4 * count
            if sizes[-1] >= 4 * self.cap:
                sizes.append(0)
        return sizes

    def enter(self, unit: UnitBytes) -> None:
        """Cast a unit's parameters."""
        for param in unit.params if self.casts else ():
            name = self.setup.names[param]
            if name not in self._cast:
                (self._cast[name],) = self.writer.alloc(Category.gathered_parameters, 2 * param.numel())
                self.writer.move(6 * param.numel())

    def after_gradient(self, unit: UnitBytes, name: str, block: int) -> None:
        """Accumulate a gradient, from that of a cast copy if there is one, and let DDP reduce it."""
        writer, count = self.writer, self.setup.parameters[name].numel()
        gradient = [block]
        if self.casts:
            gradient = writer.alloc(Category.gradients, 4 * count)
            writer.move(6 * count)
            writer.free([block, self._cast.pop(name)])
        if self.update.in_backward:
            self.update.update_in_backward(name, COMPUTE)
            writer.free(gradient)
        elif name in self.grads:
            writer.move(12 * count)
            writer.free(gradient)
        else:
            self.grads[name] = gradient
        if self.ddp and self.last:  # earlier micro-batches keep gradients of their own
            writer.move(8 * count)
            writer.free(self.grads.pop(name))
            self.bucket_elements += count
            if self.bucket_elements >= self.cap:
                self._all_reduce()

    def end_backward(self) -> None:
        """Let DDP reduce the rest."""
        if self.bucket_elements:
            self._all_reduce()
        if self.ddp and self.last:
            self.writer.wait_for(COUNTS, COMPUTE)

    def _all_reduce(self) -> None:
        writer, width = self.writer, self.setup.reduce_bytes
        size, self.bucket_elements = self.bucket_elements * width, 0
        casts = writer.alloc(Category.reduction_buffers, size) if width != 4 else []
        if casts:
            writer.move(size * 3)
        writer.wait_for(COMPUTE, COUNTS)
        writer.collective("all_reduce", size, self.setup.world_size, 1, "world", COUNTS)
        writer.free(casts)

    def free_gradients(self, unit: UnitBytes) -> None:
        """Free gradients outside DDP's buckets."""
        for param in unit.params:
            self.writer.free(self.grads.pop(self.setup.names[param], ()))


def _outer(segment: Segment, units: dict[str, UnitBytes]) -> list[UnitBytes]:
    """Units whose forward surrounds a segment, or is no stage of its own."""
    parts = {stage.part for stage in (*segment.forward, *segment.backward)} - {""} if len(units) > 1 else ()
    outer = (name for name in units if not any(f"{part}.".startswith(f"{name}.") for part in parts))
    return list(dict.fromkeys(units[name] for name in outer))


def _path(part: str, units: dict[str, UnitBytes]) -> list[str]:
    """Names of the units around a part within a segment, the outermost first."""
    if not part or not units.keys() - {""}:
        return []
    return sorted((name for name in units if name and f"{part}.".startswith(f"{name}.")), key=len)
