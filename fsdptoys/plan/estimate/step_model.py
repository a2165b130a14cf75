"""Analytic model of one training step: memory, transfers and waits of each strategy and memory switch, event by event.

The order is that of the trainer and of PyTorch; strategies differ in the events around a unit's forward and backward.
The step is a later one: optimizer states exist.
"""

import functools
import itertools
from abc import ABC, abstractmethod
from collections import Counter

from torch import nn

from fsdptoys.memory import GradientCheckpointing
from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel import DDPConfig
from fsdptoys.parallel.gradient_norms import FLOAT32_NORM_ELEMENTS, norm_elements

from .activations import INPUT, Segment, Stage, innermost
from .memory_ledger import COMPUTE, Ledger
from .optimizer_step import Update, pinned_bytes
from .units import StepSetup, UnitBytes


class StepModel(ABC):
    """Issues the events of steps to a ledger; a strategy implements those around units."""

    update_stream: str = COMPUTE  # Stream of updates in the backward

    def __init__(self, setup: StepSetup, ledger: Ledger, update: Update) -> None:
        self.setup, self.ledger, self.update = setup, ledger, update
        self.config, self.units, self.memory = setup.config, setup.units, setup.config.memory
        memory = self.memory
        chosen = range(len(setup.segments.blocks))[memory.checkpointing_start_index :: memory.checkpointing_every]
        on = memory.gradient_checkpointing is not GradientCheckpointing.none and memory.activation_offload
        self._offloaded = list(chosen) if on else []
        self.offload_bytes = 0  # Host memory of offloaded activations
        self._transfers: dict[int, float] = {}
        self._on_host: set[int] = set()
        self._gradients: dict[UnitBytes, list[tuple[int, int]]] = {}

    # Implemented by strategies

    @abstractmethod
    def construct(self) -> None:
        """Allocate parameters."""

    def begin_forward(self) -> None:  # noqa: B027 (replicated parameters need no gathers)
        """Run before the embedding."""

    def enter(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run before a unit's forward or its recomputation."""

    def leave(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run after a unit's forward."""

    def before_backward(self, unit: UnitBytes) -> None:  # noqa: B027
        """Run before a unit's backward."""

    @abstractmethod
    def after_backward(self, unit: UnitBytes) -> None:
        """Run after a unit's backward, when all its gradients exist."""

    @abstractmethod
    def end_backward(self) -> None:
        """Run after the whole backward."""

    @abstractmethod
    def free_gradients(self, elements: int | None = None) -> None:
        """Free gradients of that many elements; None for all."""

    # The step

    def make_states(self) -> None:
        """Allocate the optimizer states."""
        self.update.make_states(self.update_stream)

    def step(self, micro_batches: int, makes_states: bool = False) -> None:
        """Run one step; of many micro-batches three are modeled, and the second one counts several times."""
        ledger, train = self.ledger, self.config.train
        ledger.peak = 0
        ledger.clear_times()
        modeled = min(micro_batches, 3)
        if makes_states and self.update.in_backward:
            self.make_states()
        for number in range(modeled):
            self.first, self.last = number == 0, number == modeled - 1
            before = ledger.times()
            ledger.phase = "forward"
            inputs = train.batch_size * train.seq_len * 16
            if (rotations := getattr(self.setup.model, "inv_freq", None)) is not None:
                inputs += 2 * train.seq_len * rotations.numel() * 4
            ledger.add(Category.buffers, inputs)
            self.begin_forward()
            self._forward()
            ledger.phase = "backward"
            self._backward()
            self.end_backward()
            ledger.add(Category.buffers, -inputs)
            if number == 1 and modeled == 3:
                ledger.repeat(before, micro_batches - 3)
        ledger.phase = "optimizer"
        if self.update.in_backward:
            ledger.move(512)
        elif not self.memory.cpu_offload:
            sizes = [size for unit in self.units.in_forward() for size in unit.local]
            on_cpu = ledger.hardware.device_type == "cpu"
            if on_cpu or train.deterministic:
                kernels = sum(-(-size // norm_elements(ledger.hardware.device_type)) for size in sizes)
            else:
                kernels = 1 + sum(size >= FLOAT32_NORM_ELEMENTS for size in sizes)
            # In float64 a device copies the gradient, which is read, written and read (``op_costs.WIDENED_NORM``).
            each = 20 if train.deterministic and train.sum_dtype.value == "float64" and not on_cpu else 4
            ledger.move(each * self.units.local_elements, kernels)
            if self.setup.config.scales_gradients and not self.update.scales_in_kernel:
                ledger.move(8 * self.units.local_elements, len(sizes) if on_cpu else 1)
        else:
            # The norm reads; scaling reads and writes, unless the update does it.
            scales = self.setup.config.scales_gradients and not self.update.holds_gradients
            ledger.host_work((12 if scales else 4) * self.units.local_elements / ledger.hardware.cpu_bandwidth.value)
        ends = ledger.communicate("all_reduce", 512, self.setup.world_size, 1, "world", ledger.compute)
        ledger.wait(ends, "communication")
        ledger.wait_on_host()
        if makes_states and not self.update.in_backward:
            self.make_states()
        self.update.step()
        if not self.update.holds_gradients:
            self.free_gradients()
        ledger.wait_on_host()
        ledger.phase = "end"

    def _forward(self) -> None:
        segments, units = self.setup.segments, self.units
        self._enter(units.root)
        self._forward_through(0, segments.embedding, units.embedding, Category.activations)
        for index, (segment, block) in enumerate(zip(segments.blocks, units.blocks, strict=True)):
            self._offload_before(index)
            self._forward_through(index + 1, segment, block, Category.activations)
            self._offload_after(index)
        self._forward_through(len(units.blocks) + 1, segments.head, units.head, Category.logits)
        self.leave(units.root)

    def _forward_through(self, number: int, segment: Segment, units: dict[str, UnitBytes], category: Category) -> None:
        outer = _outer(segment, units)
        for unit in outer:
            self._enter(unit)
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
            self._stage(number, stage, category, 0)
        for name in reversed(inside):
            self.leave(units[name])
        self.ledger.pass_on(number, segment.output)
        for unit in outer:
            self.leave(unit)

    def _enter(self, unit: UnitBytes) -> None:
        if self.first:
            self.update.before_forward(unit, self.free_gradients)
        if unit.params:
            self.enter(unit)

    def _backward(self) -> None:
        segments, units, model = self.setup.segments, self.units, self.setup.model
        if units.root.params:
            self.before_backward(units.root)
        last, of_head = len(units.blocks) + 1, _elements((), model.norm, model.lm_head)
        self._backward_through(last, segments.head, units.head, Category.logits, of_head)
        self.ledger.release(last + 1, INPUT)
        # The head's input counts as activations; only the head's backward needed it still.
        rest = self.ledger.categories[Category.logits]
        self.ledger.account(Category.logits, -rest)
        self.ledger.account(Category.activations, rest)
        for unit in dict.fromkeys(units.head.values()):
            if unit is not units.tied:
                self.after_backward(unit)
        blocks = zip(segments.blocks, units.blocks, model.layers)  # noqa: B905 (segments may be fewer)
        for index, (segment, block, module) in reversed(list(enumerate(blocks))):
            self._return_before(index)
            parts = tuple(sorted({stage.part for stage in segment.backward} - {""}))
            self._backward_through(index + 1, segment, block, Category.activations, _elements(parts, module))
            if "" in block:
                self.after_backward(block[""])
        tables = _elements((), model.embed_tokens, *filter(None, [getattr(model, "embed_positions", None)]))
        self._backward_through(0, segments.embedding, units.embedding, Category.activations, tables)
        if model.lm_head.weight is model.embed_tokens.weight:
            # The second gradient of a tied weight is added to the first.
            second = 0, segments.embedding.gradients["embed_tokens.weight"]
            self.ledger.release(*second)
            self._gradients[units.tied or units.root].remove(second)
            elements = _elements((), model.lm_head)[""]
            self.ledger.account(Category.reduction_buffers, -elements * self.setup.compute_bytes)
        for unit in dict.fromkeys(units.embedding.values()):
            self.after_backward(unit)
        if units.root.params:
            self.after_backward(units.root)

    def _backward_through(
        self, number: int, segment: Segment, units: dict[str, UnitBytes], category: Category, elements: dict[str, int]
    ) -> None:
        for unit in _outer(segment, units):
            self.before_backward(unit)
        for name, storage in segment.gradients.items():
            owner = units.get(innermost(name, units), self.units.root)
            self._gradients.setdefault(owner, []).append((number, storage))
        left = dict(elements)  # cached, so not to be changed
        for index, stage in enumerate(segment.backward):
            path = _path(stage.part, units)
            for name in path:
                self.before_backward(units[name])
            later = {other.part for other in segment.backward[index + 1 :]}
            # A part's last stage computes its gradients; the others are recomputation.
            gradients = left.pop(stage.part, 0) * self.setup.compute_bytes if stage.part not in later else 0
            self._stage(number, stage, category, gradients)
            needed = {name for part in later for name in _path(part, units)}
            for name in reversed(path):
                if name not in needed:
                    self.after_backward(units[name])

    def _stage(self, number: int, stage: Stage, category: Category, gradients: int) -> None:
        self.ledger.note_peak(stage.peak_bytes)
        self.ledger.account(category, stage.net_bytes - gradients)
        if gradients:
            self.ledger.account(Category.reduction_buffers, gradients)
        self.ledger.storages(number, stage)
        self.ledger.run(stage)

    def release_gradients(self, unit: UnitBytes) -> None:
        """Free the backward's gradients of a unit, in the backward's dtype."""
        self.ledger.account(Category.reduction_buffers, -unit.elements * self.setup.compute_bytes)
        for storage in self._gradients.pop(unit, ()):
            self.ledger.release(*storage)

    # Activation offload

    def _offload_before(self, index: int) -> None:
        """Before a checkpointed block, free device copies of the second last one."""
        if index not in self._offloaded:
            return
        place = self._offloaded.index(index)
        if place >= 2:
            leaving = self._offloaded[place - 2]
            saved = self.setup.segments.blocks[leaving].offloadable
            self.ledger.wait(self._transfers.pop(leaving), "transfers")
            self.ledger.account(Category.activations, -sum(saved.values()))
            for number in saved:
                self.ledger.release(leaving + 1, number)
            self._on_host.add(leaving)

    def _offload_after(self, index: int) -> None:
        if index in self._offloaded and index != self._offloaded[-1]:
            saved = sum(self.setup.segments.blocks[index].offloadable.values())
            self._transfers[index] = self.ledger.transfer(saved, "down", self.ledger.compute)
            if self.first:
                self.offload_bytes += pinned_bytes(saved)

    def _return_before(self, index: int) -> None:
        """Before a checkpointed block's backward, prefetch the activations of the preceding one."""
        if index not in self._offloaded:
            return
        place = self._offloaded.index(index)
        for wanted in self._offloaded[max(0, place - 1) : place + 1]:
            if wanted in self._on_host:
                self._on_host.remove(wanted)
                saved = self.setup.segments.blocks[wanted].offloadable
                self.ledger.account(Category.activations, sum(saved.values()))
                for number, size in saved.items():
                    self.ledger.hold(wanted + 1, number, size)
                self._transfers[wanted] = self.ledger.transfer(sum(saved.values()), "up", self.ledger.compute)
        self.ledger.wait(self._transfers.pop(index, 0.0), "transfers")


class ReplicatedStepModel(StepModel):
    """DDP and single process: every rank holds all parameters.

    After ``torch/nn/parallel/distributed.py`` and ``parallel/precision.py``. Not covered: DDP's smaller first bucket.
    """

    def construct(self) -> None:
        """Allocate the parameters and DDP's buckets."""
        self.elements = self.units.local_elements
        self.casts = self.setup.compute_bytes == 2
        self.ddp = not self.config.parallel.single_process
        self.gradient_bytes = 0
        self.reduced = 0.0  # End of the last reduction
        self.bucket_elements = 0  # Elements in the current bucket
        sizes = [param.numel() for unit in self.units.in_forward() for param in unit.params]
        self.ledger.add(Category.parameters, *(4 * size for size in sizes))
        if self.ddp:
            self.ledger.add(Category.gradients, 4 * self.elements)
        self._cast: set[int] = set()
        self.update.construct()

    def enter(self, unit: UnitBytes) -> None:
        """Cast a unit's parameters."""
        if self.casts and id(unit) not in self._cast:
            self._cast.add(id(unit))
            self.ledger.add(Category.gathered_parameters, *(2 * param.numel() for param in unit.params))
            self.ledger.move(6 * unit.elements, len(unit.params))

    def after_backward(self, unit: UnitBytes) -> None:
        """Accumulate gradients, from those of cast copies if there are any, and let DDP reduce them."""
        self._accumulate(unit)
        if self.ddp and self.last:
            self._fill_buckets(unit)

    def end_backward(self) -> None:
        """Let DDP reduce the rest."""
        if self.bucket_elements:
            self._all_reduce()
        self.ledger.wait(self.reduced, "communication")

    def _accumulate(self, unit: UnitBytes) -> None:
        self.release_gradients(unit)
        pieces = [4 * param.numel() for param in unit.params]
        joins = self.ddp or not self.first
        # A copy's gradient is cast (6 bytes an element), and added to the earlier ones (12 bytes).
        if moved := (6 if self.casts else 0) + (12 if joins and not self.update.in_backward else 0):
            self.ledger.move(moved * unit.elements, max(1, len(pieces)))
        if self.update.in_backward:
            self.ledger.spike(*pieces)  # the real ones come one by one
            self.update.update_in_backward(unit)
        elif joins:
            self.ledger.spike(max(pieces, default=0) if self.casts else 0)
        elif pieces:
            self.ledger.add(Category.gradients, *pieces)
            self.gradient_bytes += sum(pieces)
        if id(unit) in self._cast:
            self._cast.remove(id(unit))
            self.ledger.add(Category.gathered_parameters, *(-2 * param.numel() for param in unit.params))

    def _fill_buckets(self, unit: UnitBytes) -> None:
        """Put a unit's gradients into buckets, and reduce each as soon as it has reached its size."""
        assert isinstance(self.config.parallel, DDPConfig)
        for param in reversed(unit.params):
            self.bucket_elements += param.numel()
            if 4 * self.bucket_elements >= self.config.parallel.bucket_cap_mb * 2**20:
                self._all_reduce()

    def _all_reduce(self) -> None:
        ledger, width = self.ledger, self.setup.reduce_bytes
        bytes, self.bucket_elements = self.bucket_elements * width, 0
        if width != 4:
            ledger.spike(bytes)
        after = max(self.reduced, ledger.compute)
        self.reduced = ledger.communicate("all_reduce", bytes, self.setup.world_size, 1, "world", after)

    def free_gradients(self, elements: int | None = None) -> None:
        """Free gradients outside DDP's buckets."""
        freed = self.gradient_bytes if elements is None else min(self.gradient_bytes, 4 * elements)
        self.ledger.add(Category.gradients, -freed)
        self.gradient_bytes -= freed


@functools.lru_cache(maxsize=4096)
def _elements(parts: tuple[str, ...], *modules: nn.Module) -> dict[str, int]:
    """Elements of the modules' parameters by the innermost part of a block."""
    counts: Counter[str] = Counter()
    for name, param in itertools.chain(*(module.named_parameters() for module in modules)):
        counts[innermost(name, parts)] += param.numel()
    return counts


def _outer(segment: Segment, units: dict[str, UnitBytes]) -> list[UnitBytes]:
    """Units whose forward surrounds a segment, or is no stage of its own."""
    parts = {stage.part for stage in (*segment.forward, *segment.backward)} - {""}
    outer = (name for name in units if not any(f"{part}.".startswith(f"{name}.") for part in parts))
    return list(dict.fromkeys(units[name] for name in outer))


def _path(part: str, units: dict[str, UnitBytes]) -> list[str]:
    """Names of the units around a part within a segment, the outermost first."""
    return sorted((name for name in units if name and f"{part}.".startswith(f"{name}.")), key=len)
