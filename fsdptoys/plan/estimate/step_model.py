"""A step walked through in thought: what each strategy and each memory switch holds, moves and waits for.

The order is that of the real trainer and of PyTorch's own code: forward through embedding, blocks and head, backward
the other way, then clipping and update. Strategies differ in what happens around a unit's forward and backward. One
step is walked, as all after the first are: optimizer states are there.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import DecoderModel
from fsdptoys.parallel.precision import DType
from fsdptoys.parallel.strategy import norm_elements

from .activations import Segment, Segments
from .make_update import make_update
from .memory_ledger import COMPUTE, Ledger
from .meta_trace import INPUT, Stage
from .units import UnitBytes, Units


@dataclass(frozen=True)
class StepSetup:
    """What a walk depends on."""

    config: Config
    world_size: int
    model: DecoderModel
    segments: Segments
    units: Units
    shard_ranks: int
    """That share one copy of the parameters."""

    @property
    def compute_bytes(self) -> int:
        """Of a parameter in forward and backward."""
        return 4 if self.config.parallel.param_dtype is DType.float32 else 2

    @property
    def reduce_bytes(self) -> int:
        """Of a gradient on its way."""
        dtype = getattr(self.config.parallel, "reduce_dtype", None)
        return dtype.torch.itemsize if dtype is not None else 4

    @property
    def replicas(self) -> int:
        """Copies of the parameters."""
        return self.world_size // self.shard_ranks


class StepModel(ABC):
    """Walks through steps; a strategy fills in what happens around units.

    Args:
        setup: what is walked through.
        ledger: that keeps account.
    """

    def __init__(self, setup: StepSetup, ledger: Ledger) -> None:
        self.setup, self.ledger = setup, ledger
        self.config = setup.config
        self.units = setup.units
        self.host_bytes = 0
        memory = self.config.memory
        self.local = sum(unit.local_elements for unit in self.units.in_forward())
        """Elements that this rank updates."""
        blocks = range(len(setup.segments.blocks))
        on = memory.gradient_checkpointing is not GradientCheckpointing.none
        chosen = list(blocks[memory.checkpointing_start_index :: memory.checkpointing_every]) if on else []
        self._offloaded = chosen if memory.activation_offload else []
        self._travels: dict[int, float] = {}
        """Checkpointed block whose activations have left, or are leaving → when they have."""
        self._away: set[int] = set()
        self._gradients: dict[UnitBytes, list[tuple[int, int]]] = {}
        """Storages of gradients that a backward made: segment and number."""
        self.update = make_update(self)

    # What a strategy says

    update_stream: str = COMPUTE
    """On which parameters are updated in the backward, if they are."""

    @abstractmethod
    def construct(self) -> None:
        """Hold parameters."""

    def begin_forward(self) -> None:  # noqa: B027 (one process with float32 has nothing to do)
        """Before the embedding."""

    @abstractmethod
    def enter(self, unit: UnitBytes) -> None:
        """Before a unit's forward, or its recomputation."""

    @abstractmethod
    def leave(self, unit: UnitBytes) -> None:
        """After its forward."""

    @abstractmethod
    def before_backward(self, unit: UnitBytes) -> None:
        """Before a unit's backward."""

    @abstractmethod
    def after_backward(self, unit: UnitBytes) -> None:
        """After it: gradients of the whole unit are there."""

    @abstractmethod
    def end_backward(self) -> None:
        """After the whole backward."""

    @abstractmethod
    def free_gradients(self, elements: int | None = None) -> None:
        """Free gradients of so many elements, or all that are left."""

    # The walk

    def step(self, micro_batches: int, makes_states: bool = False) -> None:
        """Take one step.

        Args:
            micro_batches: of the step.
            makes_states: whether the optimizer makes its states in it, as in the first one.
        """
        ledger, memory = self.ledger, self.config.memory
        ledger.peak = 0
        self.micro_batches = micro_batches
        ledger.clear_times()
        train = self.config.train
        walked = min(micro_batches, 3)
        if makes_states and self.update.in_backward:
            self.update.make_states()
        for number in range(walked):
            self.first, self.last = number == 0, number == walked - 1
            before = ledger.times()
            ledger.phase = "forward"
            inputs = train.batch_size * train.seq_len * 16 + self._rotation_bytes()
            ledger.add(Category.buffers, inputs)
            self.begin_forward()
            self._forward()
            ledger.phase = "backward"
            self._backward()
            self.end_backward()
            ledger.add(Category.buffers, -inputs)
            if number == 1 and walked == 3:
                ledger.repeat(before, micro_batches - 3)
        ledger.phase = "optimizer"
        if self.update.in_backward:
            ledger.move(512)
        elif not memory.cpu_offload:
            sizes = [size for unit in self.units.in_forward() for size in unit.local]
            at_a_time = norm_elements(ledger.hardware.device_type)
            ledger.move(4 * self.local, sum(-(-size // at_a_time) for size in sizes))
            if train.max_grad_norm is not None:
                ledger.move(8 * self.local, len(sizes))
        else:
            # The norm reads; scaling by it, where the update does not do that, reads and writes.
            scales = train.max_grad_norm is not None and not self.update.holds_gradients
            ledger.host_work((12 if scales else 4) * self.local / ledger.hardware.cpu_bandwidth.value)
        ends = ledger.communicate("all_reduce", 512, self.setup.world_size, 1, "world", ledger.compute)
        ledger.wait(ends, "communication")
        ledger.wait_on_host()
        if makes_states and not self.update.in_backward:
            self.update.make_states()
        self.update.step()
        if not self.update.holds_gradients:
            self.free_gradients()
        ledger.wait_on_host()
        ledger.phase = "end"

    def _rotation_bytes(self) -> int:
        tables = getattr(self.setup.model, "inv_freq", None)
        return 0 if tables is None else 2 * self.config.train.seq_len * tables.numel() * 4

    def _forward(self) -> None:
        segments, units = self.setup.segments, self.units
        if units.root.params:
            self.enter(units.root)
        self._forward_through(0, segments.embedding, {"": units.embedding}, Category.activations)
        for index, (segment, block) in enumerate(zip(segments.blocks, units.blocks, strict=True)):
            self._offload_before(index)
            self._forward_through(index + 1, segment, block, Category.activations)
            self._offload_after(index)
        self._forward_through(len(units.blocks) + 1, segments.head, {"": units.head}, Category.logits)

    def _forward_through(self, number: int, segment: Segment, units: dict[str, UnitBytes], category: Category) -> None:
        self._enter(units[""])
        part = ""
        for stage in segment.forward:
            if stage.part != part:
                if part in units and part:
                    self.leave(units[part])
                if stage.part in units and stage.part:
                    self._enter(units[stage.part])
                part = stage.part
            self._stage(number, stage, category, 0)
        self.ledger.pass_on(number, segment.output)
        if part in units and part:
            self.leave(units[part])
        self.leave(units[""])

    def _enter(self, unit: UnitBytes) -> None:
        if self.first:
            self.update.before_forward(unit)
        if unit.params:
            self.enter(unit)

    def _backward(self) -> None:
        segments, units = self.setup.segments, self.units
        model = self.setup.model
        head, embedding = {"": units.head}, {"": units.embedding}
        last = len(units.blocks) + 1
        self._backward_through(last, segments.head, head, Category.logits, _elements(model.norm, model.lm_head))
        self.ledger.release(last + 1, INPUT)
        # The input of the head, which its backward was the last to need, had been counted with the activations.
        rest = self.ledger.categories[Category.logits]
        self.ledger.account(Category.logits, -rest)
        self.ledger.account(Category.activations, rest)
        if units.head is not units.embedding:
            self.after_backward(units.head)
        blocks = zip(segments.blocks, units.blocks, model.layers)  # noqa: B905 (a few of the model's)
        for index, (segment, block, module) in reversed(list(enumerate(blocks))):
            self._return_before(index)
            self._backward_through(index + 1, segment, block, Category.activations, _elements(module))
            self.after_backward(block[""])
        tables = _elements(model.embed_tokens, *filter(None, [getattr(model, "embed_positions", None)]))
        before = list(self._gradients.get(units.embedding, ()))
        self._backward_through(0, segments.embedding, embedding, Category.activations, tables)
        if units.head is units.embedding:
            # A second gradient of the same weight is added to the first.
            for storage in self._gradients[units.embedding]:
                if storage not in before:
                    self.ledger.release(*storage)
            self._gradients[units.embedding] = before
            self.ledger.account(Category.reduction_buffers, -tables[""] * self.setup.compute_bytes)
        if units.embedding is not units.root:
            self.after_backward(units.embedding)
        if units.root.params:
            self.after_backward(units.root)

    def _backward_through(
        self, number: int, segment: Segment, units: dict[str, UnitBytes], category: Category, elements: dict[str, int]
    ) -> None:
        if units[""].params:
            self.before_backward(units[""])
        for part, storages in segment.gradients.items():
            self._gradients.setdefault(units.get(part, units[""]), []).extend((number, each) for each in storages)
        left = dict(elements)  # what is given is shared
        part = ""
        for index, stage in enumerate(segment.backward):
            if stage.part in units and stage.part and stage.part != part:
                self.before_backward(units[stage.part])
            part = stage.part
            later = {other.part for other in segment.backward[index + 1 :]}
            # Of a part's stages the last one makes its gradients; the others are recomputation.
            gradients = left.pop(part, 0) * self.setup.compute_bytes if part not in later else 0
            self._stage(number, stage, category, gradients)
            if part in units and part and part not in later:
                self.after_backward(units[part])

    def _stage(self, number: int, stage: Stage, category: Category, gradients: int) -> None:
        self.ledger.note_peak(stage.peak_bytes)
        self.ledger.account(category, stage.net_bytes - gradients)
        if gradients:
            self.ledger.account(Category.reduction_buffers, gradients)
        self.ledger.storages(number, stage)
        self.ledger.run(stage)

    def release_gradients(self, unit: UnitBytes) -> None:
        """Free what the backward made for a unit, in the number format of the backward."""
        self.ledger.account(Category.reduction_buffers, -unit.elements * self.setup.compute_bytes)
        for storage in self._gradients.pop(unit, ()):
            self.ledger.release(*storage)

    # Activations in host memory

    def _offload_before(self, index: int) -> None:
        """A checkpointed block begins: what the one before the last saved leaves."""
        if index not in self._offloaded:
            return
        place = self._offloaded.index(index)
        if place >= 2:
            leaving = self._offloaded[place - 2]
            self.ledger.wait(self._travels.pop(leaving), "transfers")
            self.ledger.account(Category.activations, -self.setup.segments.blocks[leaving].offloadable_bytes)
            for number in self.setup.segments.blocks[leaving].offloadable:
                self.ledger.release(leaving + 1, number)
            self._away.add(leaving)

    def _offload_after(self, index: int) -> None:
        if index in self._offloaded and index != self._offloaded[-1]:
            saved = self.setup.segments.blocks[index].offloadable_bytes
            self._travels[index] = self.ledger.transfer(saved, "down", self.ledger.compute)
            if self.first:
                self.host_bytes += 1 << max(0, saved - 1).bit_length()

    def _return_before(self, index: int) -> None:
        """A checkpointed block's backward begins: what the one before it saved comes back."""
        if index not in self._offloaded:
            return
        place = self._offloaded.index(index)
        for wanted in self._offloaded[max(0, place - 1) : place + 1]:
            if wanted in self._away:
                self._away.remove(wanted)
                saved = self.setup.segments.blocks[wanted].offloadable_bytes
                self.ledger.account(Category.activations, saved)
                for number, size in self.setup.segments.blocks[wanted].offloadable.items():
                    self.ledger.hold(wanted + 1, number, size)
                self._travels[wanted] = self.ledger.transfer(saved, "up", self.ledger.compute)
        self.ledger.wait(self._travels.pop(index, 0.0), "transfers")


@functools.lru_cache(maxsize=4096)
def _elements(*modules: nn.Module) -> dict[str, int]:
    """Parameters of modules by the part of a block that they are in."""
    counts: dict[str, int] = {}
    for module in modules:
        for name, param in module.named_parameters():
            part = name.split(".")[0]
            part = part if part in ("attn", "mlp") else ""
            counts[part] = counts.get(part, 0) + param.numel()
    return counts
