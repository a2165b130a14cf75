"""Writes a trace's events as the recorder would: blocks, kernels, copies, collectives and waits on named streams."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator import events
from fsdptoys.plan.simulator.events import Alloc, Event, Free, Kernel, KernelKind, Kernels, Trace
from fsdptoys.plan.trace.op_recorder import EXCHANGE

COMPUTE = "compute"
LOAD, STORE = -1, -2  # Streams of copies in events recorded apart
SIDE_STREAMS = {LOAD: "load", STORE: "store", EXCHANGE: "communication"}
ON_STREAM = (events.RecordEvent, events.WaitEvent, events.Transfer, events.Collective)


class TraceWriter:
    """A trace under construction; blocks and device events are numbered as they come."""

    def __init__(self) -> None:
        self.trace = Trace(events=[])
        self.add = self.trace.events.append
        self._streams: dict[str, int] = {}
        self.stream(COMPUTE)
        self._blocks = self._events = 0

    def stream(self, name: str) -> int:
        """The number of a stream."""
        number = self._streams.setdefault(name, len(self._streams))
        self.trace.streams[number] = name
        return number

    def mark(self, step: int, phase: str) -> None:
        """Start a phase."""
        self.add(events.Mark(step, phase))

    # Memory

    def alloc(self, category: Category, *sizes: int, stream: str = COMPUTE) -> list[int]:
        """Allocate blocks of these sizes; empty ones have no number."""
        number, first = self.stream(stream), self._blocks + 1
        for size in filter(None, sizes):
            self._blocks += 1
            self.add(Alloc(self._blocks, size, number, category))
        return list(range(first, self._blocks + 1))

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks."""
        for block in blocks:
            self.add(Free(block))

    def use_on(self, stream: str, blocks: Iterable[int]) -> None:
        """Let blocks wait, once freed, for the stream's work until then."""
        number = self.stream(stream)
        for block in blocks:
            self.add(events.RecordStream(block, number))

    # Work

    def move(self, bytes: int, kernels: int = 1, stream: str = COMPUTE) -> None:
        """Run kernels bound by memory bandwidth; ``bytes`` is their total."""
        kernel = Kernel("", self.stream(stream), KernelKind.memory, 0.0, bytes // max(1, kernels), "float32")
        self.trace.events.extend([kernel] * kernels)

    def copy(self, bytes: int, stream: str, to_device: bool, blocking: bool = False) -> None:
        """Copy between host and device."""
        self.add(events.Transfer(self.stream(stream), bytes, to_device, blocking))

    def collective(self, name: str, bytes: int, size: int, stride: int, axis: str, stream: str = COMPUTE) -> None:
        """Run a collective."""
        self.add(events.Collective(name, self.stream(stream), bytes, size, stride, axis))

    def host_work(self, bytes: int, elements: int = 0, worker: bool = False) -> None:
        """Let the host, or its worker threads, work on host memory."""
        self.add(events.HostWork("", bytes, elements, worker))

    def reserve(self, blocks: int, device_events: int = 0) -> tuple[int, int]:
        """Take numbers for events recorded apart; returns those to add to theirs."""
        self._blocks += blocks
        self._events += device_events
        return self._blocks - blocks, self._events - device_events

    def issue(
        self,
        recorded: Iterable[Event],
        base: tuple[int, int],
        known: Mapping[int, int] | None = None,
        stream: str = COMPUTE,
        on_mark: Callable[[events.Mark], None] = lambda mark: None,
    ) -> None:
        """Issue events recorded apart.

        Args:
            base: as returned by ``reserve``.
            known: numbers of recorded blocks that exist already.
            stream: takes the place of the recorded compute stream.
            on_mark: called with marks.
        """
        add, number, known = self.add, self.stream(stream), known or {}
        blocks, device_events = base
        event: Any
        for event in recorded:
            kind = type(event)  # faster than isinstance
            if kind is Alloc:
                block, size, _, category = event
                add(Alloc(blocks + block, size, number, category))
            elif kind is Free:
                (block,) = event
                add(Free(known.get(block) or blocks + block))
            elif isinstance(event, (Kernels, Kernel)):
                add(event._replace(stream=number) if number else event)
            elif isinstance(event, events.Mark):
                on_mark(event)
            elif isinstance(event, events.HostWaitStream):
                add(events.HostWaitStream(number))
            elif isinstance(event, (*ON_STREAM, events.RecordStream)):
                on = self.stream(SIDE_STREAMS[event.stream]) if event.stream else number
                if isinstance(event, (events.RecordEvent, events.WaitEvent)):
                    add(event._replace(event=device_events + event.event, stream=on))
                elif isinstance(event, events.RecordStream):
                    add(events.RecordStream(blocks + event.block, on))
                else:
                    add(event._replace(stream=on))

    # Order of streams

    def record(self, stream: str = COMPUTE) -> int:
        """A device event after the stream's work so far."""
        self._events += 1
        self.add(events.RecordEvent(self._events, self.stream(stream)))
        return self._events

    def wait(self, event: int | None, *streams: str) -> None:
        """Let streams wait for an event, if there is one."""
        if event is not None:
            for stream in streams:
                self.add(events.WaitEvent(event, self.stream(stream)))

    def wait_for(self, first: str, *streams: str) -> None:
        """Let streams wait for the work of another one so far."""
        for stream in streams:
            self.wait(self.record(first), stream)

    def host_wait(self, event: int | None) -> None:
        """Let the host wait for an event, if there is one."""
        if event is not None:
            self.add(events.HostWaitEvent(event))

    def host_wait_stream(self, stream: str = COMPUTE) -> None:
        """Let the host wait for a stream."""
        self.add(events.HostWaitStream(self.stream(stream)))
