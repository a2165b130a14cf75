"""The optimizer's part of a step: on the device, streamed through it, or on the host; distributed for Muon."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from fsdptoys.memory import CPUOffloadExecutor, OffloadSchedule, OffloadStateDType
from fsdptoys.memory.state_streaming import BUFFERS
from fsdptoys.metrics.prediction import Category
from fsdptoys.optim import MuonConfig
from fsdptoys.optim.config import Implementation
from fsdptoys.optim.low_bit_adamw import ELEMENTS_AT_A_TIME
from fsdptoys.optim.muon import orthogonalize_flops
from fsdptoys.parallel.fsdp2 import placement
from fsdptoys.plan.simulator.costs import cpu_update_seconds, kernel_seconds
from fsdptoys.plan.simulator.events import KernelKind

from .memory_ledger import COMPUTE, Ledger
from .units import StepSetup, UnitBytes

FUSED_BYTES, PARTIAL_BYTES = 28, 80
"""Bytes that AdamW moves for each parameter: one pass over parameter, gradient and states, or eight partial ones."""
MOMENTUM_BYTES = 12 + 12  # Bytes moved by momentum and Nesterov's step for each element on a rank
APPLY_BYTES = 8 + 8  # Bytes moved by weight decay and the float32 update, besides the update's own


class Cost(NamedTuple):
    """Cost of an update."""

    pieces: list[int]  # Bytes of its temporaries
    bytes: float
    kernels: int


class Update:
    """The optimizer on the device, after the backward or in it."""

    holds_gradients = False  # Whether gradients live until the next forward

    def __init__(self, setup: StepSetup, ledger: Ledger) -> None:
        self.setup, self.ledger, self.units = setup, ledger, setup.units
        self.optim, self.memory = setup.config.optim, setup.config.memory
        self.host_bytes = 0
        in_blocks = setup.in_blocks
        self.states = [
            self.optim.state_bytes(param.shape, local, param in in_blocks) for _, param, local in self.units.shards()
        ]
        self.in_backward = self.memory.optimizer_in_backward
        self.state_width = sum(self.optim.state_widths)
        """Bytes of states for each element of a parameter, other than matrices with their own update."""
        self.implementation = self.optim.implementation
        if self.implementation is Implementation.auto:
            on_cpu = ledger.hardware.device_type == "cpu"
            self.implementation = Implementation.for_loop if on_cpu else Implementation.foreach
        fused = self.implementation is Implementation.fused and ledger.hardware.device_type != "cpu"
        self.scales_in_kernel = fused and type(self) is Update and self.optim.fused_takes_shards
        """Whether the update scales the gradients, in the pass that reads them."""

    def construct(self) -> None:
        """Allocate memory that exists before the first step."""

    def make_states(self, stream: str) -> None:
        """Allocate the states, on the given stream if the update runs in the backward."""
        pieces = itertools.chain(*self.states)
        self.ledger.add(Category.optimizer_states, *pieces, stream=stream if self.in_backward else COMPUTE)

    def before_forward(self, unit: UnitBytes, free_gradients: Callable[[int], None]) -> None:
        """Run a deferred update of a unit before its forward in the first micro-batch."""

    def step(self) -> None:
        """Update all parameters, unless the backward did."""
        if not self.in_backward:
            for cost in self.costs([(param, local) for _, param, local in self.units.shards()]):
                self.spend(cost)

    def costs(self, shards: Sequence[tuple[nn.Parameter, int]]) -> list[Cost]:
        """Costs of updating parameters together, each with its elements on this rank."""
        return [self.cost([local for _, local in shards])]

    def update_in_backward(self, unit: UnitBytes, stream: str = COMPUTE) -> float:
        """Measure the norm of a unit's gradients and update its parameters, one by one; return seconds on another
        stream."""
        ledger, seconds = self.ledger, 0.0
        for param, local in unit.shards():
            for cost in [Cost([], 4 * local, 1), *self.costs([(param, local)])]:
                if stream == COMPUTE:
                    self.spend(cost)
                else:
                    ledger.spike(*cost.pieces, stream=stream)
                    each = kernel_seconds(ledger.hardware, KernelKind.memory, 0.0, int(cost.bytes / cost.kernels), "")
                    seconds += cost.kernels * each
        return seconds

    def spend(self, cost: Cost) -> None:
        """Run an update on the device."""
        self.ledger.spike(*cost.pieces)
        self.ledger.move(cost.bytes, cost.kernels)

    def cost(self, sizes: Sequence[int]) -> Cost:
        """Cost of AdamW or SGD over parameters of these sizes together."""
        elements, count = sum(sizes), len(sizes)
        fused = self.implementation is Implementation.fused
        per_element = FUSED_BYTES if fused else PARTIAL_BYTES
        if self.scales_in_kernel and self.setup.config.scales_gradients:
            per_element += 4
        if self.optim.updates_float32_copies:
            pieces = [4 * max(sizes)] * (2 if fused else 3)
            return Cost(pieces, (per_element + 12) * elements, (5 if fused else 14) * count)
        pieces = []
        if self.optim.update_takes_scratch and not fused:
            foreach = self.implementation is Implementation.foreach
            pieces = [4 * size for size in sizes] if foreach else [4 * max(sizes)] * 2
        kernels = 10 * count if self.implementation is Implementation.for_loop else 1 if fused else 10
        return Cost(pieces, per_element * elements, max(1, kernels))


class LowBitUpdate(Update):
    """8- or 4-bit states on the device: matrices in pieces, on float32 copies of both moments; then all others.

    As compiled; ``optim.implementation=for_loop`` takes longer and more scratch memory.
    """

    def costs(self, shards: Sequence[tuple[nn.Parameter, int]]) -> list[Cost]:
        """Costs of the matrices and of all others."""
        costs: list[Cost] = []
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for param, local in shards:
            sizes[self.optim.is_matrix(param.shape, in_block=False)].append(local)
        if sizes[True]:
            # Parameter and gradient, codes, and the copies, written and read.
            calls = sum(-(-size // ELEMENTS_AT_A_TIME) for size in sizes[True])
            pieces = [4 * min(ELEMENTS_AT_A_TIME, max(sizes[True]))] * 2
            costs.append(Cost(pieces, (12 + 4 + 16) * sum(sizes[True]), 2 * calls))
        if sizes[False]:
            costs.append(self.cost(sizes[False]))
        return costs


class HostUpdate(Update):
    """CPU offload: parameters, gradients and states in host memory."""

    def construct(self) -> None:
        """Allocate everything on the host."""
        self._casts = self.setup.compute_bytes == 2
        self.holds_gradients = self.memory.cpu_offload_executor is CPUOffloadExecutor.overlapped
        per_element = 8 + (2 if self.holds_gradients and self._casts else 0)
        self.host_bytes += per_element * self.units.local_elements + sum(map(sum, self.states))
        self._ready = 0.0

    def make_states(self, stream: str) -> None:
        """Do nothing: the states are on the host."""

    def before_forward(self, unit: UnitBytes, free_gradients: Callable[[int], None]) -> None:
        """Wait for the unit's part of an overlapped update."""
        if self.holds_gradients:
            # The worker threads also scale gradients and write the low-precision copies.
            moved = 8 if self.setup.config.scales_gradients else 0
            moved += 6 if self._casts else 0
            hardware = self.ledger.hardware
            self._ready += cpu_update_seconds(hardware, unit.local_elements)
            self._ready += moved * unit.local_elements / hardware.cpu_bandwidth.value
            self.ledger.host = max(self.ledger.host, self._ready)

    def step(self) -> None:
        """Update while the device waits, unless overlapped."""
        self._ready = 0.0
        if not self.holds_gradients:
            self.ledger.host_work(cpu_update_seconds(self.ledger.hardware, self.units.local_elements))


class StreamedUpdate(Update):
    """Optimizer offload: states pass through the device bucket by bucket."""

    def construct(self) -> None:
        """Allocate the states that stay on the device and, for the lazy schedule, the buffers."""
        memory = self.memory
        self.width = 2 if memory.offload_state_dtype is OffloadStateDType.bfloat16 else 4
        self.lazy = self.holds_gradients = memory.offload_schedule is OffloadSchedule.lazy
        limit = memory.offload_bucket_mib * 2**20
        kinds = self.state_width // 4
        self.buckets: dict[UnitBytes, list[int]] = {}
        for unit in self.units.in_forward():
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
        self.host_bytes += sum(pinned_bytes(size * kinds * self.width) for size in sizes[self.stays :])
        self.ledger.add(Category.optimizer_states, *(size * self.state_width for size in sizes[: self.stays]))
        self._number = 0
        self._stored: deque[float] = deque([0.0] * self.rings)

    def make_states(self, stream: str) -> None:
        """Allocate the buffers of the lazy schedule, which keeps them."""
        if self.lazy:
            self.ledger.add(Category.optimizer_states, *self.buffers)

    def before_forward(self, unit: UnitBytes, free_gradients: Callable[[int], None]) -> None:
        """Update the unit's buckets if lazy."""
        if self.lazy:
            self._update(unit, free_gradients)

    def step(self) -> None:
        """Update all buckets now, or leave them to the next forward."""
        self._number = 0
        if self.lazy:
            self._stored = deque([0.0] * self.rings)
            return
        self.ledger.add(Category.optimizer_states, *self.buffers)
        self._stored = deque([self.ledger.compute] * self.rings)
        for unit in self.units.in_forward():
            self._update(unit)
        self.ledger.wait(max(self._stored), "transfers")
        self.ledger.add(Category.optimizer_states, *(-size for size in self.buffers))

    def _update(self, unit: UnitBytes, free_gradients: Callable[[int], None] | None = None) -> None:
        ledger, kinds = self.ledger, self.state_width // 4
        for size in self.buckets.get(unit, ()):
            travels = self._number >= self.stays
            self._number += 1
            bytes_moved = size * kinds * self.width
            if travels:
                free = self._stored.popleft()
                ledger.wait(ledger.transfer(bytes_moved, "up", free), "transfers")
            self.spend(self.cost([size]))
            if travels:
                self._stored.append(ledger.transfer(bytes_moved, "down", ledger.compute))
            if free_gradients is not None:
                free_gradients(size)


class Matrix(NamedTuple):
    """A matrix that this rank orthogonalizes or holds a shard of."""

    rows: int
    columns: int
    elements: int
    local: int  # Elements on this rank


class MuonUpdate(Update):
    """Muon on the device, as on the first rank, which owns the largest matrix of each round."""

    def __init__(self, setup: StepSetup, ledger: Ledger) -> None:
        super().__init__(setup, ledger)
        assert isinstance(self.optim, MuonConfig)
        self.steps, self.dtype = self.optim.ns_steps, self.optim.ns_dtype.torch
        self.replicated = not setup.config.parallel.shards_parameters
        self.ranks = setup.world_size if self.replicated else setup.shard_ranks
        self.matrix_elements = 0
        self.adamw_sizes: list[int] = []
        self.own: list[Matrix] = []  # Matrices that this rank orthogonalizes without an exchange
        self.exchanged: list[Matrix] = []
        in_blocks = setup.in_blocks
        for _, param, local in self.units.shards():
            if param not in in_blocks or param.ndim < 2:
                self.adamw_sizes.append(local)
                continue
            self.matrix_elements += local
            rows, columns = param.shape[-2:]
            elements = rows * columns
            count = param.numel() // elements
            chosen = placement(param, setup.shard_ranks)
            in_full = param.ndim == 3 and not self.replicated and (chosen is None or chosen.dim == 0)
            if in_full or self.ranks == 1:
                self.own += [Matrix(rows, columns, elements, elements)] * (local // elements)
            else:
                self.exchanged += [Matrix(rows, columns, elements, local // count)] * count
        self.exchanged.sort(key=lambda matrix: -matrix.elements)

    def step(self) -> None:
        """Orthogonalize own matrices, then a round for every group of ``ranks`` others; update the rest by AdamW."""
        ledger, width = self.ledger, self.dtype.itemsize
        for matrix in self.own:
            self._orthogonalize(matrix, held_bytes=0)
        for start in range(0, len(self.exchanged), self.ranks):
            matrices = self.exchanged[start : start + self.ranks]
            local_bytes = width * sum(matrix.local for matrix in matrices)
            if self.replicated:
                self._orthogonalize(matrices[0], held_bytes=0)
                for matrix in matrices:
                    self._exchange("broadcast", width * matrix.elements)
                continue
            size = max(local_bytes, width * matrices[0].elements)
            self._exchange("all_to_all", size)
            self._orthogonalize(matrices[0], held_bytes=local_bytes)
            self._exchange("all_to_all", size)
            ledger.move(3 * 2 * local_bytes, 6)
        count = len(self.own) + len(self.exchanged)
        ledger.move((MOMENTUM_BYTES + APPLY_BYTES + 3 * width) * self.matrix_elements, 5 * max(1, count))
        if self.adamw_sizes:
            self.spend(self.cost(self.adamw_sizes))

    def _exchange(self, name: str, bytes: int) -> None:
        axis = "world" if self.replicated or self.setup.replicas == 1 else "shard"
        ends = self.ledger.communicate(name, bytes, self.ranks, 1, axis, self.ledger.compute)
        self.ledger.wait(ends, "communication")

    def _orthogonalize(self, matrix: Matrix, held_bytes: int) -> None:
        """Run Newton-Schulz on a matrix, with three copies of it and two small squares in memory."""
        size = self.dtype.itemsize * matrix.elements
        square = self.dtype.itemsize * min(matrix.rows, matrix.columns) ** 2
        self.ledger.spike(held_bytes, size, size, size, square, square)
        flops = orthogonalize_flops(matrix.rows, matrix.columns, self.steps)
        bytes = self.steps * (6 * size + 4 * square)
        self.ledger.multiply(flops, bytes, str(self.dtype).removeprefix("torch."), 3 * self.steps)
        self.ledger.move(7 * size, 4)


def make_update(setup: StepSetup, ledger: Ledger) -> Update:
    """The model of the configured optimizer."""
    memory, optim = setup.config.memory, setup.config.optim
    kind: type[Update] = HostUpdate if memory.cpu_offload else StreamedUpdate if memory.optimizer_offload else Update
    if optim.exchanges_matrices:
        kind = MuonUpdate
    elif optim.low_bit_format and not memory.cpu_offload:
        kind = LowBitUpdate
    return kind(setup, ledger)


def pinned_bytes(bytes: int) -> int:
    """Bytes that PyTorch's pinned-memory allocator takes for a request: the next power of two."""
    return 1 << max(0, bytes - 1).bit_length()
