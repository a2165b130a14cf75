"""Replay of a trace on an allocator and a clock that depend on each other.

Memory that another stream used (``record_stream``) is reusable only when that stream has finished
the work it had when the memory was freed; the allocator checks this at its next request. Numbers
are kept by phase: in one they are linear in the number of equal layers, but a maximum over phases
is not.

Source: the behavior of ``c10/cuda/CUDACachingAllocator`` (``insert_events``, ``process_events``),
and of its port for NPUs (``recordStream`` in ``NPUCachingAllocator.cpp`` of
https://github.com/Ascend/pytorch);
https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
"""

import heapq
from collections import Counter
from collections.abc import Container, Generator
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    TimePrediction,
    Volume,
)

from .allocator import Allocator, Block
from .events import Alloc, Collective, Free, Mark, Messages, RecordStream, Trace
from .stream_clock import Cause, Clock


@dataclass(frozen=True)
class Phase:
    """The interval between two marks."""

    step: int
    name: str
    seconds: float  # Advance of the later of host and compute stream
    end_bytes: int
    peak_bytes: int
    categories: dict[Category, int]  # Bytes at the peak
    used: dict[str, int]  # Most bytes that the blocks of each stream take
    gaps: dict[str, int] = field(metadata={"extrapolates": False})
    """Bytes that a stream reserves at the end beyond the most that its blocks have taken until
    then.

    They depend on the order of sizes, hardly on depth.
    """


@dataclass(frozen=True)
class Replay:
    """Numbers of a replay, each of which can be extrapolated in the number of layers."""

    phases: tuple[Phase, ...]  # Phases of the construction and all steps, in order
    kinds: dict[str, float]  # Seconds of compute in the last step, by kind of kernel
    waits: dict[str, float]  # Seconds of waiting in the last step, by ``Cause``
    volumes: dict[tuple[str, str, int], Volume] = field(default_factory=dict)
    """Collectives of the last step, by name, axis and group size."""
    host_bytes: int = 0

    @property
    def last_step(self) -> list[Phase]:
        """Phases of the last step."""
        return [phase for phase in self.phases if phase.step == self.phases[-1].step]

    def memory(self) -> MemoryPrediction:
        """End and peak of the last step, and the highest reserved memory since the construction."""
        peak = max(self.last_step, key=lambda phase: phase.peak_bytes)
        used: dict[str, int] = {}
        reserved: dict[str, int] = {}
        for phase in self.phases:
            for stream, bytes in phase.used.items():
                used[stream] = max(used.get(stream, 0), bytes)
            then = {
                stream: bytes + phase.gaps.get(stream, 0)
                for stream, bytes in used.items()
            }
            reserved = max(reserved, then, key=lambda streams: sum(streams.values()))
        return MemoryPrediction(
            end_bytes=self.phases[-1].end_bytes,
            peak_bytes=peak.peak_bytes,
            reserved_bytes=sum(reserved.values()),
            peak_phase=peak.name,
            categories={
                category: bytes for category, bytes in peak.categories.items() if bytes
            },
            streams=reserved,
            host_bytes=self.host_bytes,
        )

    def time(self) -> TimePrediction:
        """The last step; its parts add up to the total."""
        return TimePrediction(
            step_seconds=sum(phase.seconds for phase in self.last_step),
            compute_seconds=sum(self.kinds.values()),
            exposed_communication_seconds=self.waits[Cause.communication.name],
            exposed_transfer_seconds=self.waits[Cause.transfer.name],
            host_seconds=self.waits[Cause.host.name],
            stage_seconds=self.waits[Cause.stages.name],
            kinds=dict(self.kinds),
            volumes=tuple(self.volumes.values()),
        )


Replaying = Generator[tuple[Messages | Collective, float], float, Replay]
"""A replay that stops where it meets other ranks."""


def replay(trace: Trace, hardware: Hardware, allocator: Allocator) -> Replay:
    """Replay a trace on a new allocator; events before its first mark belong to the
    construction."""
    try:
        next(begin_replay(trace, hardware, allocator, ()))
    except StopIteration as done:
        result: Replay = done.value
        return result
    raise AssertionError("a single rank waits for no other")


def begin_replay(
    trace: Trace, hardware: Hardware, allocator: Allocator, axes: Container[str]
) -> Replaying:
    """Replay as of :func:`replay` of a rank that meets others, in messages and collectives of these
    axes.

    Yields each such event and the time at which this rank reaches it; the answer is the time at
    which all have.
    """
    return _Replaying(trace, hardware, allocator).run(axes)


class _Replaying:
    def __init__(self, trace: Trace, hardware: Hardware, allocator: Allocator) -> None:
        self.trace = trace
        self.allocator = allocator
        self.clock = Clock(hardware)
        self.blocks: dict[int, tuple[Block, Category]] = {}
        self.own_stream_counts = hardware.device_type == "npu"
        self.uses: dict[int, set[int]] = {}  # Number → streams that it was recorded on
        self.pending: list[tuple[float, int, Block]] = []
        """Heap of (time at which it becomes reusable, its number, block)."""
        self.pending_bytes = 0
        self.by_category = dict.fromkeys(Category, 0)
        self.peak_bytes = 0
        self.most_used: dict[str, int] = {}  # By stream, until the last mark
        self.at_peak = dict(self.by_category)
        # Whether nothing was freed since the peak, whose categories are not yet saved
        self.rising = True
        self.phases: list[Phase] = []
        self.phase_begins = 0.0

    def run(self, axes: Container[str]) -> Replaying:
        clock = self.clock
        events = self.trace.events
        last_step = max(
            (event.step for event in events if isinstance(event, Mark)), default=0
        )
        mark = Mark(0, "construction")
        event: Any
        for event in events:
            kind = type(event)  # faster than isinstance
            if kind is Alloc:
                if event.bytes:
                    self.allocate(event)
            elif kind is Free:
                self.free(event.block)
            elif isinstance(event, RecordStream):
                self.record_stream(event)
            elif isinstance(event, Mark):
                if event is not events[0]:
                    self.end_phase(mark)
                if event.step == last_step != mark.step:
                    clock.begin_window()
                mark = event
            elif isinstance(event, (Messages, Collective)) and event.axis in axes:
                clock.meet(event, (yield event, clock.arrive(event)))
            else:
                clock.advance(event)
        clock.end_window()
        self.end_phase(mark)
        parts = clock.parts
        return Replay(
            phases=tuple(self.phases),
            kinds={kind.value: seconds for kind, seconds in parts.kinds.items()},
            waits={cause.name: seconds for cause, seconds in parts.waits.items()},
            volumes=parts.volumes,
            host_bytes=self.trace.host_bytes,
        )

    def allocate(self, event: Alloc) -> None:
        """Allocate a block, after reclaiming those that other streams have finished with."""
        while self.pending and self.pending[0][0] <= self.clock.host:
            reusable = heapq.heappop(self.pending)[2]
            self.pending_bytes -= reusable.size
            self.allocator.free(reusable)
        block = self.allocator.allocate(event.bytes, event.stream)
        category = self.trace.categories.get(event.block, event.category)
        self.blocks[event.block] = block, category
        self.by_category[category] += block.size
        allocated = self.allocator.allocated_bytes - self.pending_bytes
        if allocated > self.peak_bytes:
            self.peak_bytes = allocated
            self.rising = True

    def record_stream(self, event: RecordStream) -> None:
        """Record a use on another stream; on an NPU the block's own stream counts too."""
        entry = self.blocks.get(event.block)
        if entry is not None and (
            self.own_stream_counts or entry[0].pool.stream != event.stream
        ):
            self.uses.setdefault(event.block, set()).add(event.stream)

    def free(self, number: int) -> None:
        """Free a block, now or when the streams that used it are done."""
        if number not in self.blocks:
            return
        block, category = self.blocks.pop(number)
        if self.rising:
            self.at_peak = dict(self.by_category)
            self.rising = False
        self.by_category[category] -= block.size
        streams = self.uses.pop(number, None) if self.uses else None
        # PyTorch does not query events here: a block with uses always waits for the next request.
        if streams:
            moment = max(self.clock.tail(stream) for stream in streams)
            heapq.heappush(self.pending, (moment, number, block))
            self.pending_bytes += block.size
        else:
            self.allocator.free(block)

    def end_phase(self, mark: Mark) -> None:
        """Save the numbers of the phase that started with a mark, and start the next."""
        if self.rising:
            self.at_peak = dict(self.by_category)
        used = Counter[str]()
        gaps = Counter[str]()
        for stream, bytes in self.allocator.reserved_by_stream.items():
            name = self.trace.streams.get(stream, f"stream {stream}")
            used[name] += self.allocator.take_most_used(stream)
            gaps[name] += bytes
        for name, bytes in used.items():
            self.most_used[name] = max(self.most_used.get(name, 0), bytes)
            gaps[name] -= self.most_used[name]
        end_bytes = self.allocator.allocated_bytes - self.pending_bytes
        seconds = self.clock.now - self.phase_begins
        memory = (end_bytes, self.peak_bytes, self.at_peak)
        self.phases.append(
            Phase(mark.step, mark.phase, seconds, *memory, dict(used), dict(gaps))
        )
        self.phase_begins = self.clock.now
        self.peak_bytes = end_bytes
        self.rising = True
