"""Clock of a device: when each event of a trace is done, in the order in which the host issues
them.

The host takes time to issue each operator and stops where it waits. A kernel starts when it is
issued and its stream reaches it; on a CPU the host itself computes. Collectives of one group run
one after the other, as a communicator runs them; those of different groups share the links within
and between nodes, and each occupies a free link alone. Each copy direction is a lane. The compute
stream's idle time is split by cause: a pause is traced back along the chain of waits, and a side
stream's kernels count for the purpose of that stream.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Optional

from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Volume

from . import costs, events
from .events import COMPUTE_STREAM, KernelKind


class Cause(Enum):
    """Reason for the compute stream to wait."""

    communication = 0
    transfer = 1
    host = 2
    stages = 3  # Ranks of other stages of a pipeline, which have not yet sent or received a message


class Work(NamedTuple):
    """Work of a side stream and its dependency."""

    start: float  # Earliest start, without others on the same link
    end: float
    cause: Cause
    # The dependency that ended last; None for the host or the compute stream itself
    parent: Optional["Work"]


@dataclass
class Parts:
    """Seconds of the compute stream, and collectives, since the last ``Clock.begin_window``."""

    kinds: dict[KernelKind, float] = field(
        default_factory=lambda: dict.fromkeys(KernelKind, 0.0)
    )
    """Compute, by kind of kernel."""
    waits: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    """Waits, and its own part in collectives and copies."""
    # By name, axis and group size
    volumes: dict[tuple[str, str, int], Volume] = field(default_factory=dict)


class Lane:
    """A resource that serves one work at a time, in the order of possible starts."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def free_from(self, ready: float, seconds: float) -> float:
        """The first time from ``ready`` on at which it is free for that long."""
        index = bisect_right(self._ends, ready)
        while index < len(self._starts) and self._starts[index] < ready + seconds:
            ready = max(ready, self._ends[index])
            index += 1
        return ready

    def take(self, start: float, seconds: float) -> None:
        """Occupy the lane at a time at which it is free."""
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, start + seconds)

    def forget(self, until: float) -> None:
        """Drop work that ended before a time that no later work can start at."""
        count = bisect_right(self._ends, until)
        del self._starts[:count], self._ends[:count]


class Clock:
    """Times of the host and of each stream, in seconds from the beginning."""

    def __init__(self, hardware: Hardware) -> None:
        self.host = 0.0
        self.parts = Parts()
        self._hardware = hardware
        self._operator_seconds = hardware.host_operator_seconds.value
        self._host_computes = hardware.device_type == "cpu"
        self._ready: defaultdict[int, float] = defaultdict(float)
        """Time at which a stream's work and the events it waits for are done."""
        self._last: defaultdict[int, Work | None] = defaultdict(lambda: None)
        """The work that a stream is ready after; None for the host or the compute stream."""
        self._host_last: Work | None = None
        # Time until which other ranks hold up the event that is processed
        self._others = 0.0
        self._causes: defaultdict[int, Cause] = defaultdict(lambda: Cause.communication)
        self._events: dict[int, tuple[float, Work | None]] = {}
        self._communicators: defaultdict[tuple[str, int, int], float] = defaultdict(
            float
        )
        self._intra = Lane()
        self._inter = Lane()
        self._up = Lane()
        self._down = Lane()
        self._sums: dict[int, tuple[float, dict[KernelKind, float]]] = {}
        """Seconds of ``Kernels``, by the identity of their tuple."""
        self._workers: list[float] = []  # Ends of the worker threads' operators
        # Time until which the compute stream is accounted for in ``parts``
        self._computed = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Kernel: self._kernel,
            events.Kernels: self._kernels,
            events.Collective: self._collective,
            events.Messages: self._messages,
            events.Transfer: self._transfer,
            events.HostWork: self._host_work,
            events.RecordEvent: self._record_event,
            events.WaitEvent: self._wait_event,
            events.HostWaitEvent: lambda event: self._host_until(
                *self._events.get(event.event, (0.0, None))
            ),
            events.HostWaitStream: self._host_wait_stream,
            events.HostWaitWorkers: self._host_wait_workers,
        }

    def advance(self, event: events.Event) -> None:
        """Process the next event; memory events and marks take no time."""
        if (handler := self._handlers.get(type(event))) is not None:
            handler(event)

    def arrive(self, event: events.Messages | events.Collective) -> float:
        """Earliest start of the next event, without a wait for other ranks."""
        issued = self.host + self._hardware.host_collective_seconds.value
        return max(issued, self._ready[event.stream])

    def meet(self, event: events.Messages | events.Collective, begin: float) -> None:
        """Process the next event, which other ranks let begin no earlier."""
        self._others = begin
        self.advance(event)
        self._others = 0.0

    @property
    def now(self) -> float:
        """Time at which both host and compute stream are done."""
        return max(self.host, self._ready[COMPUTE_STREAM])

    def tail(self, stream: int) -> float:
        """Time at which a stream's work so far is done."""
        return self._ready[stream]

    def begin_window(self) -> None:
        """Reset ``parts``."""
        self._computed = self.now
        self.parts = Parts()

    def end_window(self) -> None:
        """Account for the time until now; if the compute stream is done, the rest is a wait."""
        waits_for_host = self.host >= self._ready[COMPUTE_STREAM]
        self._count_wait(
            self.now, self._host_last if waits_for_host else self._last[COMPUTE_STREAM]
        )

    def _start(self, stream: int) -> tuple[float, Work | None]:
        """Earliest start of work that is issued now, and the work that it waits for."""
        issued_last = self.host > self._ready[stream]
        return (
            (self.host, self._host_last)
            if issued_last
            else (self._ready[stream], self._last[stream])
        )

    def _kernel(self, event: events.Kernel) -> None:
        self.host += self._operator_seconds
        stream = event.stream
        kind = event.kind
        ready, last = self._start(stream)
        end = ready + costs.kernel_seconds(self._hardware, *event[2:])
        self._ready[stream] = end
        if stream == COMPUTE_STREAM:
            self._count_wait(ready, last)
            self.parts.kinds[kind] += end - self._computed
            self._computed = end
            self._last[stream] = None
        else:
            self._last[stream] = Work(
                ready, end, self._causes[stream], self._needed(last)
            )
        if self._host_computes:
            self._host_until(end, self._last[stream])

    def _kernels(self, event: events.Kernels) -> None:
        kernels = event.kernels
        if id(kernels) not in self._sums:
            kinds = dict.fromkeys((kernel.kind for kernel in kernels), 0.0)
            for kernel in kernels:
                kinds[kernel.kind] += costs.kernel_seconds(self._hardware, *kernel[2:])
            self._sums[id(kernels)] = sum(kinds.values()), kinds
        seconds, kinds = self._sums[id(kernels)]
        self.host += self._operator_seconds
        ready, last = self._start(COMPUTE_STREAM)
        self.host += self._operator_seconds * (len(kernels) - 1)
        # The last kernel starts no earlier than it is issued.
        end = max(ready + seconds, self.host + seconds / len(kernels))
        self._ready[COMPUTE_STREAM] = end
        self._last[COMPUTE_STREAM] = None
        self._count_wait(ready, last)
        self._count_wait(end - seconds, None)
        for kind, part in kinds.items():
            self.parts.kinds[kind] += part
        self._computed = end
        if self._host_computes:
            self._host_until(end, None)

    def _collective(self, event: events.Collective) -> None:
        self.host += self._hardware.host_collective_seconds.value
        name = event.name
        size = event.group_size
        stride = event.group_stride
        seconds = costs.collective_seconds(
            self._hardware, name, event.bytes, size, stride
        )
        self._count_volume(
            (name, event.axis, size),
            round(costs.sent_bytes(name, event.bytes, size)),
            seconds,
        )
        nodes, local = costs.spread(self._hardware, size, stride)
        lanes = self._lanes(within=local > 1, between=nodes > 1)
        communicator = (event.axis, size, stride)
        end = self._serve(
            event.stream,
            lanes,
            seconds,
            Cause.communication,
            self._communicators[communicator],
        )
        self._communicators[communicator] = end

    def _messages(self, event: events.Messages) -> None:
        self.host += self._hardware.host_collective_seconds.value
        for message in event.messages:
            if message.sends:
                seconds = costs.messages_seconds(
                    self._hardware, event._replace(messages=(message,))
                )
                self._count_volume(
                    ("send", event.axis, event.group_size), message.bytes, seconds
                )
        leaving = [
            costs.leaves_node(self._hardware, event, message)
            for message in event.messages
        ]
        lanes = self._lanes(within=not all(leaving), between=any(leaving))
        seconds = costs.messages_seconds(self._hardware, event)
        self._serve(event.stream, lanes, seconds, Cause.communication)

    def _lanes(self, within: bool, between: bool) -> list[Lane]:
        """Links within and between nodes."""
        return [self._intra] * within + [self._inter] * between

    def _count_volume(
        self, key: tuple[str, str, int], sent: int, seconds: float
    ) -> None:
        now = self.parts.volumes.get(key, Volume(*key, 0, 0, 0.0))
        self.parts.volumes[key] = Volume(
            *key, 1 + now.calls, sent + now.bytes, seconds + now.seconds
        )

    def _transfer(self, event: events.Transfer) -> None:
        self.host += self._operator_seconds
        seconds = costs.transfer_seconds(self._hardware, event.bytes)
        lane = self._up if event.to_device else self._down
        end = self._serve(event.stream, [lane], seconds, Cause.transfer)
        if event.blocking:
            self._host_until(end, self._last[event.stream])

    def _serve(
        self,
        stream: int,
        lanes: list[Lane],
        seconds: float,
        cause: Cause,
        not_before: float = 0.0,
    ) -> float:
        ready, last = self._start(stream)
        if self._others > ready:
            last = Work(ready, self._others, Cause.stages, self._needed(last))
            ready = self._others
        start = max(ready, not_before)
        previous_start = -1.0
        while previous_start != start:
            previous_start = start
            for lane in lanes:
                start = lane.free_from(start, seconds)
        for lane in lanes:
            lane.forget(self.host)
            lane.take(start, seconds)
        end = start + seconds
        work = Work(ready, end, cause, self._needed(last))
        self._ready[stream] = end
        self._last[stream] = work
        self._causes[stream] = cause
        if stream == COMPUTE_STREAM:
            self._count_wait(end, work)
            self._last[stream] = None
        return end

    def _host_work(self, event: events.HostWork) -> None:
        seconds = max(
            costs.host_work_seconds(self._hardware, event.bytes, event.elements),
            self._operator_seconds,
        )
        if event.worker:
            self._workers.append(
                max(self.host, self._workers[-1] if self._workers else 0.0) + seconds
            )
        else:
            self.host += seconds

    def _record_event(self, event: events.RecordEvent) -> None:
        self._events[event.event] = self._ready[event.stream], self._last[event.stream]

    def _wait_event(self, event: events.WaitEvent) -> None:
        happens, work = self._events.get(event.event, (0.0, None))
        if happens > self._ready[event.stream]:
            self._ready[event.stream] = happens
            self._last[event.stream] = work

    def _host_wait_stream(self, event: events.HostWaitStream) -> None:
        streams = list(self._ready) if event.stream is None else [event.stream]
        for stream in streams:
            self._host_until(self._ready[stream], self._last[stream])

    def _host_wait_workers(self, event: events.HostWaitWorkers) -> None:
        if event.works:
            self._host_until(self._workers[event.works - 1], None)

    def _host_until(self, moment: float, work: Work | None) -> None:
        if moment > self.host:
            self.host = moment
            self._host_last = self._needed(work)

    def _needed(self, work: Work | None) -> Work | None:
        """Drop work that ended before the compute stream's last work: no pause is traced back to
        it."""
        return work if work is not None and work.end > self._computed else None

    def _count_wait(self, until: float, work: Work | None) -> None:
        """Attribute the compute stream's wait to the work that ended last, and so on back."""
        since = self._computed
        waits = self.parts.waits
        self._computed = max(until, since)
        while until > since:
            if work is None or work.end <= since:
                waits[Cause.host] += until - since
                return
            if work.end < until:
                waits[Cause.host] += until - work.end
                until = work.end
            begun = max(since, work.start)
            if begun < until:
                waits[work.cause] += until - begun
                until = begun
            work = work.parent
