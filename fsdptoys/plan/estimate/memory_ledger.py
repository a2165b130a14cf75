"""Ledger of a step: memory by stream, added and freed in the order in which the host issues work; time by resource.

A stream's highest sum is the size that a growing segment would reserve. Time is kept as the moment at which each lane
is free: the device's compute stream, its links, both copy directions, the host. A wait moves a lane to a moment.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.allocator import Allocator, Block
from fsdptoys.plan.simulator.costs import collective_seconds, kernel_seconds, sent_bytes, transfer_seconds
from fsdptoys.plan.simulator.events import COMPUTE_STREAM, KernelKind
from fsdptoys.plan.trace.extrapolate_layers import extrapolate

from .activations import INPUT, Stage

COMPUTE = "compute"
TIMES = ("compute", "host", "lanes", "sums", "kinds", "volumes")  # Attributes of a ledger that count time


class Work(NamedTuple):
    """Work of a stage on device and host."""

    seconds: float
    kernels: int
    by_kind: dict[str, float]


class Ledger:
    """Memory and time of one rank; an allocator receives every request, to measure the reserved memory."""

    def __init__(self, hardware: Hardware, allocator: Allocator | None = None) -> None:
        self.hardware, self.allocator = hardware, allocator
        self._blocks: defaultdict[tuple[str, int], list[Block]] = defaultdict(list)
        self._held: dict[tuple[int, int], Block] = {}  # Blocks of segments' storages, by numbers of segment and storage
        self.phase = self.peak_phase = "construction"
        self.live: Counter[str] = Counter()
        self.highest: Counter[str] = Counter()
        self.categories: Counter[Category] = Counter()
        self.stream_numbers = {COMPUTE: COMPUTE_STREAM}
        self.total = self.peak = 0
        self.peak_categories: dict[Category, int] = {}
        self._work: dict[int, Work] = {}
        self.clear_times()

    def clear_times(self) -> None:
        """Reset times; memory stays."""
        self.compute = self.host = 0.0
        self.lanes = dict.fromkeys(("shard", "replicate", "up", "down"), 0.0)
        self.sums = dict.fromkeys(("busy", "communication", "transfers", "host"), 0.0)
        """Seconds of the compute stream: busy, and waits by cause."""
        self.kinds: dict[str, float] = {}
        self.volumes: dict[tuple[str, str, int], tuple[int, float, float]] = {}

    # Memory

    def add(self, category: Category, *pieces: int, stream: str = COMPUTE) -> None:
        """Allocate tensors of these sizes, or free them if negative."""
        self.account(category, sum(pieces), stream)
        self._place(pieces, stream)

    def account(self, category: Category, bytes: int, stream: str = COMPUTE) -> None:
        """Count an allocation or free without asking the allocator."""
        self.categories[category] += bytes
        self.live[stream] += bytes
        self.total += bytes
        if bytes > 0:
            self._note(stream, self.live[stream], self.total, category, 0)

    def note_peak(self, bytes: int) -> None:
        """Count a short-lived allocation on the compute stream."""
        self._note(COMPUTE, self.live[COMPUTE] + bytes, self.total + bytes, Category.temporary, bytes)

    def spike(self, *pieces: int, stream: str = COMPUTE, category: Category = Category.temporary) -> None:
        """Allocate tensors and free them at once."""
        bytes = sum(pieces)
        self._note(stream, self.live[stream] + bytes, self.total + bytes, category, bytes)
        self._place([*pieces, *(-piece for piece in pieces)], stream)

    def storages(self, segment: int, stage: Stage) -> None:
        """Allocate and free a stage's storages in order; ``segment`` is the segment's number."""
        for number, size in stage.storages if self.allocator is not None else ():
            if size:
                self.hold(segment, number, size)
            else:
                self.release(segment, number)

    def release(self, segment: int, number: int) -> None:
        """Free a storage, if the segment still has it."""
        block = self._held.pop((segment, number), None)
        if block is not None and self.allocator is not None:
            self.allocator.free(block)

    def pass_on(self, segment: int, number: int) -> None:
        """Make a storage the next segment's input."""
        if (segment, number) in self._held:
            self._held[segment + 1, INPUT] = self._held.pop((segment, number))

    def hold(self, segment: int, number: int, size: int) -> None:
        """Allocate a storage."""
        if self.allocator is not None:
            self._held[segment, number] = self.allocator.allocate(size, COMPUTE_STREAM)

    def _place(self, pieces: Iterable[int], stream: str) -> None:
        if self.allocator is None:
            return
        for bytes in pieces:
            if bytes > 0:
                number = self.stream_numbers.setdefault(stream, len(self.stream_numbers))
                self._blocks[stream, bytes].append(self.allocator.allocate(bytes, number))
            elif blocks := self._blocks.get((stream, -bytes)):
                self.allocator.free(blocks.pop(0))
            else:
                for (of, size), blocks in self._blocks.items():  # blocks of about the size
                    while of == stream and blocks and size <= -bytes:
                        self.allocator.free(blocks.pop(0))
                        bytes += size

    def retire(self, category: Category, bytes: int) -> None:
        """Free memory that another stream still uses: no longer allocated, but not reusable yet."""
        self.categories[category] -= bytes
        self.total -= bytes

    def reuse(self, bytes: int, stream: str) -> None:
        """Make retired memory reusable."""
        self.live[stream] -= bytes
        self._place([-bytes], stream)

    def _note(self, stream: str, live: int, total: int, category: Category, extra: int) -> None:
        self.highest[stream] = max(self.highest[stream], live)
        if total > self.peak:
            self.peak, self.peak_phase = total, self.phase
            self.peak_categories = dict(self.categories)
            self.peak_categories[category] = self.peak_categories.get(category, 0) + extra

    # Time

    def run(self, stage: Stage) -> None:
        """Run a stage's operators."""
        work = self._work.get(id(stage))
        if work is None:
            by_kind: defaultdict[str, float] = defaultdict(float)
            for operator in stage.operators:
                by_kind[operator.kind.value] += kernel_seconds(self.hardware, *operator)
            work = self._work[id(stage)] = Work(sum(by_kind.values()), len(stage.operators), by_kind)
        self._compute(work)

    def move(self, bytes: float, kernels: int = 1) -> None:
        """Run kernels bound by memory bandwidth."""
        seconds = kernels * kernel_seconds(self.hardware, KernelKind.memory, 0.0, int(bytes / kernels), "")
        self._compute(Work(seconds, kernels, {KernelKind.memory.value: seconds}))

    def multiply(self, flops: float, bytes: float, dtype: str, kernels: int = 1) -> None:
        """Run equal matmuls with these total FLOPs and bytes."""
        each = kernel_seconds(self.hardware, KernelKind.matmul, flops / kernels, int(bytes / kernels), dtype)
        self._compute(Work(kernels * each, kernels, {KernelKind.matmul.value: kernels * each}))

    def _compute(self, work: Work) -> None:
        issued = self.host
        self.host += work.kernels * self.hardware.host_operator_seconds.value
        begins = max(self.compute, issued)
        ends = max(begins + work.seconds, self.host if work.kernels else begins)
        self.sums["host"] += ends - self.compute - work.seconds
        self.sums["busy"] += work.seconds
        for kind, seconds in work.by_kind.items():
            self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds
        self.compute = ends

    def wait(self, moment: float, why: str) -> None:
        """Let the compute stream wait."""
        if moment > self.compute:
            self.sums[why] += moment - self.compute
            self.compute = moment

    def wait_on_host(self) -> None:
        """Let the host wait for the compute stream."""
        self.host = max(self.host, self.compute)

    def host_work(self, seconds: float) -> None:
        """Let the host work while the device waits."""
        self.wait_on_host()
        self.host += seconds
        self.wait(self.host, "host")

    def communicate(self, name: str, bytes: int, group_size: int, group_stride: int, axis: str, after: float) -> float:
        """Queue a collective; return its end."""
        self.host += self.hardware.host_collective_seconds.value
        seconds = collective_seconds(self.hardware, name, bytes, group_size, group_stride)
        lane = "replicate" if axis == "replicate" else "shard"
        ends = self.lanes[lane] = max(self.lanes[lane], after, self.host) + seconds
        key = name, axis, group_size
        calls, sent, so_far = self.volumes.get(key, (0, 0.0, 0.0))
        self.volumes[key] = calls + 1, sent + sent_bytes(name, bytes, group_size), so_far + seconds
        return ends

    def transfer(self, bytes: int, lane: str, after: float) -> float:
        """Queue a copy between host and device (``up``, ``down``); return its end."""
        ends = self.lanes[lane] = max(self.lanes[lane], after, self.host) + transfer_seconds(self.hardware, bytes)
        return ends

    def times(self) -> dict[str, Any]:
        """Snapshot of all time counters."""
        return {name: copy.copy(getattr(self, name)) for name in TIMES}

    def repeat(self, since: dict[str, Any], times: int) -> None:
        """Count the work since a snapshot that many times more; a lane that was idle does not count as busy."""
        vars(self).update(extrapolate(since, self.times(), (0, 1), 1 + times))
