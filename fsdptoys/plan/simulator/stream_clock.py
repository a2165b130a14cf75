"""When a device would be done with what it is asked to do, event by event, in the order in which the host issued it.

The host takes time to issue each operator and stands still where it waits. A kernel begins when it is issued and its
stream has come to it; on a CPU the host itself computes, so that it goes on when the kernel is done. Collectives of one
group of ranks run one after the other, as a communicator runs them; those of two groups share the links within a
machine and between machines, and each takes a link for itself where it is free. A collective that needs both kinds of
link holds both. Copies up and copies down each have a lane of their own.

Where the computing stream stands idle, ``Parts`` tells for what: the chain of what it waited for is followed back, and
each stretch of the pause counts for what went on then. A side stream's kernels count as what that stream is for.

Not covered: kernels of two streams do not slow each other down (side streams of sharded training copy and cast), nor do
collectives slow kernels, although both take a share of memory bandwidth and cores; the host may run ahead as far as it
likes, where a driver's queues end at about a thousand kernels; other ranks are never late; events cost no host time;
copies from memory that is not pinned are as fast as others.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Optional

from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Volume

from .costs import collective_seconds, host_work_seconds, kernel_seconds, sent_bytes, spread, transfer_seconds
from .events import (
    COMPUTE_STREAM,
    Collective,
    Event,
    HostWaitEvent,
    HostWaitStream,
    HostWaitWorkers,
    HostWork,
    Kernel,
    KernelKind,
    RecordEvent,
    Transfer,
    WaitEvent,
)


class Cause(Enum):
    """What the computing stream may wait for."""

    communication = 0
    transfer = 1
    host = 2


class Work(NamedTuple):
    """What a side stream did, and what it had waited for before."""

    start: float
    """When it could have begun, but for others on the same link."""
    end: float
    cause: Cause
    parent: Optional["Work"]
    """What ended last before it could begin; None for the host, or for what the computing stream did itself."""


@dataclass
class Parts:
    """Seconds of the computing stream, and collectives, since the last ``Clock.begin_window``."""

    kinds: dict[KernelKind, float] = field(default_factory=lambda: dict.fromkeys(KernelKind, 0.0))
    """It computes."""
    waits: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    """It waits, or itself takes part in a collective or a copy."""
    volumes: dict[tuple[str, str, int], Volume] = field(default_factory=dict)
    """By name, axis and size of the group."""


class Lane:
    """Something that serves one at a time, whoever can begin first."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def free_from(self, ready: float, seconds: float) -> float:
        """The first moment from ``ready`` on at which it is free for so long."""
        index = bisect_right(self._ends, ready)
        while index < len(self._starts) and self._starts[index] < ready + seconds:
            ready = max(ready, self._ends[index])
            index += 1
        return ready

    def take(self, start: float, seconds: float) -> None:
        """Take it at a moment at which it is free."""
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, start + seconds)

    def forget(self, until: float) -> None:
        """Drop what has ended by a moment before which nobody will ask again."""
        count = bisect_right(self._ends, until)
        del self._starts[:count], self._ends[:count]


class Clock:
    """The host's time and each stream's, in seconds from the beginning.

    Args:
        hardware: whose speeds count.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.host = 0.0
        """Up to here the host has issued everything."""
        self.parts = Parts()
        self._hardware = hardware
        self._operator_seconds = hardware.host_operator_seconds.value
        self._host_computes = hardware.device_type == "cpu"
        self._ready: defaultdict[int, float] = defaultdict(float)
        """When a stream has done all it was given, or what it was told to wait for has happened."""
        self._last: defaultdict[int, Work | None] = defaultdict(lambda: None)
        """What a stream is ready after; None for the host or the computing stream."""
        self._host_last: Work | None = None
        self._causes: defaultdict[int, Cause] = defaultdict(lambda: Cause.communication)
        self._events: dict[int, tuple[float, Work | None]] = {}
        self._communicators: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        self._intra, self._inter, self._up, self._down = Lane(), Lane(), Lane(), Lane()
        self._workers: list[float] = []
        """When the worker threads are done with each of their operators."""
        self._computed = 0.0
        """Up to here the computing stream's time is in ``parts``."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            Kernel: self._kernel,
            Collective: self._collective,
            Transfer: self._transfer,
            HostWork: self._host_work,
            RecordEvent: self._record_event,
            WaitEvent: self._wait_event,
            HostWaitEvent: self._host_wait_event,
            HostWaitStream: self._host_wait_stream,
            HostWaitWorkers: self._host_wait_workers,
        }

    def advance(self, event: Event) -> None:
        """Let the next event happen; those of memory and marks take no time."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    @property
    def now(self) -> float:
        """When both the host and the computing stream are done."""
        return max(self.host, self._ready[COMPUTE_STREAM])

    def tail(self, stream: int) -> float:
        """When a stream is done with what it was given so far."""
        return self._ready[stream]

    def wait_for_device(self) -> None:
        """Let the host wait for all streams."""
        for stream in list(self._ready):
            self._host_until(self._ready[stream], self._last[stream])

    def begin_window(self) -> None:
        """Count ``parts`` anew from now on."""
        self._computed = self.now
        self.parts = Parts()

    def end_window(self) -> None:
        """Count the time up to now: if the computing stream is done, the rest is a wait."""
        waits_for_host = self.host >= self._ready[COMPUTE_STREAM]
        self._count_wait(self.now, self._host_last if waits_for_host else self._last[COMPUTE_STREAM])

    def _kernel(self, event: Kernel) -> None:
        self.host += self._operator_seconds
        stream, kind = event.stream, event.kind
        seconds = kernel_seconds(self._hardware, kind, event.flops, event.bytes, event.dtype)
        ready, last = self._ready[stream], self._last[stream]
        if self.host > ready:
            ready, last = self.host, self._host_last
        end = ready + seconds
        self._ready[stream] = end
        if stream == COMPUTE_STREAM:
            if ready > self._computed:
                self._count_wait(ready, last)
            self.parts.kinds[kind] += end - self._computed
            self._computed, self._last[stream] = end, None
        else:
            self._last[stream] = Work(ready, end, self._causes[stream], self._needed(last))
        if self._host_computes:
            self._host_until(end, self._last[stream])

    def _collective(self, event: Collective) -> None:
        self.host += self._hardware.host_collective_seconds.value
        name, size, stride = event.name, event.group_size, event.group_stride
        seconds = collective_seconds(self._hardware, name, event.bytes, size, stride)
        self._count_volume(event, seconds)
        nodes, local = spread(self._hardware, size, stride)
        lanes = [lane for lane, used in ((self._intra, local > 1), (self._inter, nodes > 1)) if used]
        communicator = (event.axis, size, stride)
        end = self._serve(event.stream, lanes, seconds, Cause.communication, self._communicators[communicator])
        self._communicators[communicator] = end

    def _transfer(self, event: Transfer) -> None:
        self.host += self._operator_seconds
        seconds = transfer_seconds(self._hardware, event.bytes)
        lane = self._up if event.to_device else self._down
        end = self._serve(event.stream, [lane], seconds, Cause.transfer)
        if event.blocking:
            self._host_until(end, self._last[event.stream])

    def _serve(self, stream: int, lanes: list[Lane], seconds: float, cause: Cause, not_before: float = 0.0) -> float:
        """Let a stream do something that takes all of the lanes; return its end."""
        ready, last = self._ready[stream], self._last[stream]
        if self.host > ready:
            ready, last = self.host, self._host_last
        start, asked = max(ready, not_before), -1.0
        while asked != start:
            asked = start
            for lane in lanes:
                start = lane.free_from(start, seconds)
        for lane in lanes:
            lane.forget(self.host)
            lane.take(start, seconds)
        end = start + seconds
        work = Work(ready, end, cause, self._needed(last))
        self._ready[stream], self._last[stream], self._causes[stream] = end, work, cause
        if stream == COMPUTE_STREAM:
            self._count_wait(end, work)
            self._last[stream] = None
        return end

    def _host_work(self, event: HostWork) -> None:
        seconds = max(host_work_seconds(self._hardware, event.bytes, event.elements), self._operator_seconds)
        if event.worker:
            self._workers.append(max(self.host, self._workers[-1] if self._workers else 0.0) + seconds)
        else:
            self.host += seconds

    def _record_event(self, event: RecordEvent) -> None:
        self._events[event.event] = self._ready[event.stream], self._last[event.stream]

    def _wait_event(self, event: WaitEvent) -> None:
        happens, work = self._events.get(event.event, (0.0, None))
        if happens > self._ready[event.stream]:
            self._ready[event.stream], self._last[event.stream] = happens, work

    def _host_wait_event(self, event: HostWaitEvent) -> None:
        self._host_until(*self._events.get(event.event, (0.0, None)))

    def _host_wait_stream(self, event: HostWaitStream) -> None:
        if event.stream is None:
            self.wait_for_device()
        else:
            self._host_until(self._ready[event.stream], self._last[event.stream])

    def _host_wait_workers(self, event: HostWaitWorkers) -> None:
        if event.works:
            self._host_until(self._workers[event.works - 1], None)

    def _host_until(self, moment: float, work: Work | None) -> None:
        if moment > self.host:
            self.host, self._host_last = moment, self._needed(work)

    def _needed(self, work: Work | None) -> Work | None:
        """Forget what ended before the computing stream's last work: no pause will be traced back to it."""
        return work if work is not None and work.end > self._computed else None

    def _count_wait(self, until: float, work: Work | None) -> None:
        """Tell what the computing stream waited for, by what ended last before it could go on, and so on back."""
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

    def _count_volume(self, event: Collective, seconds: float) -> None:
        key = (event.name, event.axis, event.group_size)
        so_far = self.parts.volumes.get(key)
        calls, sent = 1, round(sent_bytes(event.name, event.bytes, event.group_size))
        if so_far is not None:
            calls, sent, seconds = calls + so_far.calls, sent + so_far.bytes, seconds + so_far.seconds
        self.parts.volumes[key] = Volume(*key, calls, sent, seconds)
