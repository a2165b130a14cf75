"""The optimizer's part of a step that is walked through: on the device, streamed through it, or on the host."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdptoys.memory import CPUOffloadExecutor, OffloadSchedule, StateDType
from fsdptoys.memory.streaming import BUFFERS
from fsdptoys.optim import Implementation, MuonConfig
from fsdptoys.simulator.costs import cpu_update_seconds
from fsdptoys.simulator.events import Category

from .units import Unit

if TYPE_CHECKING:
    from .rehearsal import Rehearsal

UPDATE_BYTES = {"fused": 28, "other": 80}
"""Traffic of AdamW for each parameter: once over parameter, gradient and both states; or eight passes over some."""


class Update:
    """The optimizer on the device, after the backward."""

    holds_gradients = False
    """Whether they live on into the next forward."""

    def __init__(self, walk: "Rehearsal") -> None:
        self.walk = walk
        config = walk.config
        self.state_bytes = config.optim.state_bytes
        implementation = config.optim.implementation
        if implementation is Implementation.auto:
            on_cpu = walk.ledger.hardware.device_type == "cpu"
            implementation = Implementation.for_loop if on_cpu else Implementation.foreach
        self.implementation = implementation

    def construct(self) -> None:
        """Hold what is there before the first step."""

    def make_states(self) -> None:
        """Hold what the first update makes."""
        widths = self.walk.config.optim.state_widths
        sizes = [size for unit in self.walk.units.in_forward() for size in unit.local]
        pieces = [width * size for size in sizes for width in widths]
        self.walk.ledger.add(Category.optimizer_states, sum(pieces), pieces=pieces)

    def before_forward(self, unit: Unit) -> None:
        """Before a unit's forward in the first micro-batch."""

    def step(self) -> None:
        """Update all."""
        self.compute([size for unit in self.walk.units.in_forward() for size in unit.local])

    def compute(self, sizes: Sequence[int]) -> None:
        """Update parameters of these sizes together."""
        ledger, elements, count = self.walk.ledger, sum(sizes), len(sizes)
        fused = self.implementation is Implementation.fused
        if self.state_bytes < 8 and self.walk.config.optim.name == "adamw":
            # One parameter after the other, on float32 copies of its means.
            pieces = [4 * max(sizes)] * (2 if fused else 3)
            ledger.spike(sum(pieces), pieces=pieces)
            per_element = UPDATE_BYTES["fused" if fused else "other"] + 12
            ledger.move(per_element * elements, (5 if fused else 14) * count)
            return
        if self.walk.config.optim.name != "sgd" and not fused:
            if self.implementation is Implementation.foreach:
                ledger.spike(4 * elements, pieces=[4 * size for size in sizes])
            else:
                ledger.spike(8 * max(sizes), pieces=[4 * max(sizes)] * 2)
        per_element = UPDATE_BYTES["fused" if fused else "other"]
        kernels = 10 * count if self.implementation is Implementation.for_loop else 1 if fused else 10
        ledger.move(per_element * elements, max(1, kernels))


class HostUpdate(Update):
    """CPU offload: parameters, gradients and states are in host memory."""

    def construct(self) -> None:
        """Hold everything on the host."""
        per_element = 8 + self.state_bytes
        if self.walk.config.memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
            per_element += 2 if self.walk.setting.compute_bytes == 2 else 0
            self.holds_gradients = True
        self.walk.host_bytes += per_element * self.walk.local
        self._ready = 0.0

    def make_states(self) -> None:
        """They are on the host."""

    def before_forward(self, unit: Unit) -> None:
        """Overlapped: wait for the unit's own part."""
        if self.holds_gradients:
            ledger, setting = self.walk.ledger, self.walk.setting
            # Gradients are scaled, and a mirror is written, by the same threads.
            moved = 8 if self.walk.config.train.max_grad_norm is not None else 0
            moved += 6 if setting.compute_bytes == 2 else 0
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
        kinds = self.state_bytes // 4
        self.buckets: dict[Unit, list[int]] = {}
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
        staying = [size * self.state_bytes for size in sizes[: self.stays]]
        walk.ledger.add(Category.optimizer_states, sum(staying), pieces=staying)
        self._number = 0
        self._stored: deque[float] = deque([0.0] * self.rings)

    def make_states(self) -> None:
        """The buffers, where they are kept."""
        if self.lazy:
            self.walk.ledger.add(Category.optimizer_states, self.buffer_bytes, pieces=self.buffers)

    def before_forward(self, unit: Unit) -> None:
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

    def _update(self, unit: Unit) -> None:
        ledger, kinds = self.walk.ledger, self.state_bytes // 4
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


def make_update(walk: "Rehearsal") -> Update:
    """The update that the configuration asks for."""
    memory = walk.config.memory
    if isinstance(walk.config.optim, MuonConfig):
        from .muon_update import MuonUpdate  # which is made of this module's

        return MuonUpdate(walk)
    return (HostUpdate if memory.cpu_offload else StreamedUpdate if memory.optimizer_offload else Update)(walk)


def _power_of_two(bytes: int) -> int:
    """What PyTorch's allocator of pinned memory rounds up to."""
    return 1 << max(0, bytes - 1).bit_length()
