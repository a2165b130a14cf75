"""The optimizer's part of a step that is walked through: on the device, streamed through it, or on the host."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from fsdptoys.memory import CPUOffloadExecutor, OffloadSchedule, StateDType
from fsdptoys.memory.state_streaming import BUFFERS
from fsdptoys.metrics.prediction import Category
from fsdptoys.optim.config import AdamWConfig, Implementation
from fsdptoys.optim.low_bit_adamw import ELEMENTS_AT_A_TIME
from fsdptoys.plan.simulator.costs import cpu_update_seconds, kernel_seconds
from fsdptoys.plan.simulator.events import KernelKind

from .memory_ledger import COMPUTE
from .units import UnitBytes

if TYPE_CHECKING:
    from .step_model import StepModel

UPDATE_BYTES = {"fused": 28, "other": 80}
"""Traffic of AdamW for each parameter: once over parameter, gradient and both states; or eight passes over some."""


class Cost(NamedTuple):
    """Of an update."""

    pieces: list[int]
    """Bytes of its scratch."""
    bytes: float
    """Read and written."""
    kernels: int


class Update:
    """The optimizer on the device, after the backward or in it."""

    holds_gradients = False
    """Whether they live on into the next forward."""

    def __init__(self, walk: "StepModel") -> None:
        self.walk = walk
        config = walk.config
        in_blocks = {unit for block in walk.units.blocks for unit in block.values()}
        self.states = [
            config.optim.state_bytes(param.shape, local, unit in in_blocks)
            for unit in walk.units.in_forward()
            for param, local in zip(unit.params, unit.local, strict=True)
        ]
        """Bytes of each state of each parameter."""
        self.in_backward = config.memory.optimizer_in_backward
        self.state_width = sum(config.optim.state_widths)
        """Bytes of state for each element of a parameter that is not updated as a matrix."""
        implementation = config.optim.implementation
        if implementation is Implementation.auto:
            on_cpu = walk.ledger.hardware.device_type == "cpu"
            implementation = Implementation.for_loop if on_cpu else Implementation.foreach
        self.implementation = implementation

    def construct(self) -> None:
        """Hold what is there before the first step."""

    def make_states(self) -> None:
        """Hold what the first update makes."""
        pieces = [piece for of_one in self.states for piece in of_one]
        stream = self.walk.update_stream if self.in_backward else COMPUTE
        self.walk.ledger.add(Category.optimizer_states, sum(pieces), stream, pieces)

    def before_forward(self, unit: UnitBytes) -> None:
        """Before a unit's forward in the first micro-batch."""

    def step(self) -> None:
        """Update all that the backward did not."""
        if not self.in_backward:
            for cost in self.costs([each for unit in self.walk.units.in_forward() for each in unit.held()]):
                self._spend(cost)

    def costs(self, held: Sequence[tuple[nn.Parameter, int]]) -> list[Cost]:
        """What it takes to update parameters, of each of which a rank holds so many elements, together."""
        return [self.cost([local for _, local in held])]

    def compute(self, sizes: Sequence[int]) -> None:
        """Update parameters of these sizes together, by AdamW or SGD."""
        self._spend(self.cost(sizes))

    def update_in_backward(self, unit: UnitBytes, stream: str = COMPUTE) -> float:
        """Measure and update a unit's parameters, one after the other; returns seconds where it is not the stream that
        computes."""
        ledger, seconds = self.walk.ledger, 0.0
        for param, local in unit.held():
            for cost in [Cost([], 4 * local, 1), *self.costs([(param, local)])]:
                if stream == COMPUTE:
                    self._spend(cost)
                else:
                    ledger.spike(sum(cost.pieces), stream, pieces=cost.pieces)
                    each = kernel_seconds(ledger.hardware, KernelKind.memory, 0.0, int(cost.bytes / cost.kernels), "")
                    seconds += cost.kernels * each
        return seconds

    def _spend(self, cost: Cost) -> None:
        if cost.pieces:
            self.walk.ledger.spike(sum(cost.pieces), pieces=cost.pieces)
        self.walk.ledger.move(cost.bytes, cost.kernels)

    def cost(self, sizes: Sequence[int]) -> Cost:
        """What AdamW or SGD takes for parameters of these sizes together."""
        elements, count = sum(sizes), len(sizes)
        fused = self.implementation is Implementation.fused
        per_element = UPDATE_BYTES["fused" if fused else "other"]
        if self.state_width < 8 and self.walk.config.optim.name == "adamw":
            # One parameter after the other, on float32 copies of its means.
            pieces = [4 * max(sizes)] * (2 if fused else 3)
            return Cost(pieces, (per_element + 12) * elements, (5 if fused else 14) * count)
        pieces = []
        if self.walk.config.optim.name != "sgd" and not fused:
            foreach = self.implementation is Implementation.foreach
            pieces = [4 * size for size in sizes] if foreach else [4 * max(sizes)] * 2
        kernels = 10 * count if self.implementation is Implementation.for_loop else 1 if fused else 10
        return Cost(pieces, per_element * elements, max(1, kernels))


class LowBitUpdate(Update):
    """States of few bits on the device: matrices in pieces, on float32 copies of both means; then all others.

    As compiled: ``optim.implementation=for_loop`` takes longer, and more scratch.
    """

    def costs(self, held: Sequence[tuple[nn.Parameter, int]]) -> list[Cost]:
        """Those of matrices, and those of all others."""
        optim = self.walk.config.optim
        assert isinstance(optim, AdamWConfig)
        costs: list[Cost] = []
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for param, local in held:
            sizes[optim.is_matrix(param.shape, in_block=False)].append(local)
        if sizes[True]:
            # Parameter, gradient, codes; copies are written and read.
            calls = sum(-(-size // ELEMENTS_AT_A_TIME) for size in sizes[True])
            pieces = [4 * min(ELEMENTS_AT_A_TIME, max(sizes[True]))] * 2
            costs.append(Cost(pieces, (12 + 4 + 16) * sum(sizes[True]), 2 * calls))
        if sizes[False]:
            costs.append(self.cost(sizes[False]))
        return costs


class HostUpdate(Update):
    """CPU offload: parameters, gradients and states are in host memory."""

    def construct(self) -> None:
        """Hold everything on the host."""
        per_element = 8
        if self.walk.config.memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
            per_element += 2 if self.walk.setup.compute_bytes == 2 else 0
            self.holds_gradients = True
        self.walk.host_bytes += per_element * self.walk.local + sum(map(sum, self.states))
        self._ready = 0.0

    def make_states(self) -> None:
        """They are on the host."""

    def before_forward(self, unit: UnitBytes) -> None:
        """Overlapped: wait for the unit's own part."""
        if self.holds_gradients:
            ledger, setup = self.walk.ledger, self.walk.setup
            # Gradients are scaled, and a mirror is written, by the same threads.
            moved = 8 if self.walk.config.train.max_grad_norm is not None else 0
            moved += 6 if setup.compute_bytes == 2 else 0
            self._ready += cpu_update_seconds(ledger.hardware, unit.local_elements)
            self._ready += moved * unit.local_elements / ledger.hardware.cpu_bandwidth.value
            ledger.host = max(ledger.host, self._ready)

    def step(self) -> None:
        """Native: update while the device waits."""
        self._ready = 0.0
        if not self.holds_gradients:
            self.walk.ledger.host_work(cpu_update_seconds(self.walk.ledger.hardware, self.walk.local))


class StreamedUpdate(Update):
    """Optimizer offload: states pass through the device bucket by bucket."""

    def construct(self) -> None:
        """Hold the states that stay, and where they are kept for good, the buffers."""
        walk, memory = self.walk, self.walk.config.memory
        self.width = 2 if memory.offload_state_dtype is StateDType.bfloat16 else 4
        self.lazy = memory.offload_schedule is OffloadSchedule.lazy
        self.holds_gradients = self.lazy
        limit = memory.offload_bucket_mib * 2**20
        kinds = self.state_width // 4
        self.buckets: dict[UnitBytes, list[int]] = {}
        """Elements of parameters in each bucket."""
        for unit in walk.units.in_forward():
            cut: list[int] = []
            for size in unit.local:
                if cut and (cut[-1] + size) * kinds * self.width <= limit:
                    cut[-1] += size
                else:
                    cut.append(size)
            self.buckets[unit] = cut
        sizes = [size for cut in self.buckets.values() for size in cut]
        on_host = total = sum(sizes)
        self.stays = 0
        for size in sizes:
            if on_host - size < memory.offload_fraction * total:
                break
            on_host -= size
            self.stays += 1
        largest = max(sizes[self.stays :], default=0) * kinds
        serial = memory.offload_schedule is OffloadSchedule.serial
        self.rings = 1 if serial else min(BUFFERS, len(sizes) - self.stays)
        self.buffers = [largest * self.width] * self.rings + ([largest * 4] if self.width == 2 else [])
        self.buffer_bytes = sum(self.buffers)
        walk.host_bytes += sum(_power_of_two(size * kinds * self.width) for size in sizes[self.stays :])
        staying = [size * self.state_width for size in sizes[: self.stays]]
        walk.ledger.add(Category.optimizer_states, sum(staying), pieces=staying)
        self._number = 0
        self._stored: deque[float] = deque([0.0] * self.rings)

    def make_states(self) -> None:
        """The buffers, where they are kept."""
        if self.lazy:
            self.walk.ledger.add(Category.optimizer_states, self.buffer_bytes, pieces=self.buffers)

    def before_forward(self, unit: UnitBytes) -> None:
        """Lazy: update the unit's buckets, and those of the next."""
        if self.lazy:
            self._update(unit)

    def step(self) -> None:
        """Update all now, or when the next forward comes."""
        self._number = 0
        if self.lazy:
            self._stored = deque([0.0] * self.rings)
            return
        self.walk.ledger.add(Category.optimizer_states, self.buffer_bytes, pieces=self.buffers)
        self._stored = deque([self.walk.ledger.compute] * self.rings)
        for unit in self.walk.units.in_forward():
            self._update(unit)
        self.walk.ledger.wait(max(self._stored), "transfers")
        self.walk.ledger.add(Category.optimizer_states, -self.buffer_bytes, pieces=self.buffers)

    def _update(self, unit: UnitBytes) -> None:
        ledger, kinds = self.walk.ledger, self.state_width // 4
        for size in self.buckets.get(unit, ()):
            travels = self._number >= self.stays
            self._number += 1
            bytes_moved = size * kinds * self.width
            if travels:
                free = self._stored.popleft()
                ledger.wait(ledger.transfer(bytes_moved, "up", free), "transfers")
            self.compute([size])
            if travels:
                self._stored.append(ledger.transfer(bytes_moved, "down", ledger.compute))
            if self.lazy:
                self.walk.free_gradients(size)


def _power_of_two(bytes: int) -> int:
    """What PyTorch's allocator of pinned memory rounds up to."""
    return 1 << max(0, bytes - 1).bit_length()
