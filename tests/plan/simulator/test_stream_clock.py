"""Timelines worked out by hand: one byte, one FLOP and one parameter take a second each."""

import pytest

from fsdptoys.plan.simulator.events import (
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
from fsdptoys.plan.simulator.stream_clock import Clock, Lane
from tests.plan.simulator.imagined import imagined_hardware


def compute(seconds: float, stream: int = 0) -> Kernel:
    return Kernel("mm", stream, KernelKind.matmul, seconds, 0, "bfloat16")


def gather(seconds: float, stream: int = 1, axis: str = "shard", stride: int = 1) -> Collective:
    """Of two ranks: half of the bytes are sent."""
    return Collective("all_gather", stream, round(2 * seconds), 2, stride, axis)


def run(*events: Event, device_type: str = "cuda", **hardware: float) -> Clock:
    clock = Clock(imagined_hardware(device_type, **hardware))
    clock.begin_window()
    for event in events:
        clock.advance(event)
    clock.end_window()
    waits, kinds = clock.parts.waits.values(), clock.parts.kinds.values()
    assert sum(waits) + sum(kinds) == pytest.approx(clock.now)
    return clock


def waits(clock: Clock) -> dict[str, float]:
    return {cause.name: seconds for cause, seconds in clock.parts.waits.items() if seconds}


TO_DEVICE = {"to_device": True, "blocking": False}
TRANSFER_AND_UPDATE = [
    compute(2),
    RecordEvent(0, 0),
    WaitEvent(0, 1),
    Transfer(1, 3, to_device=False, blocking=True),
    HostWork("adam", 0, 5, worker=False),
    Transfer(2, 4, **TO_DEVICE),
    RecordEvent(1, 2),
    WaitEvent(1, 3),
    gather(1, stream=3),
    RecordEvent(2, 3),
    WaitEvent(2, 0),
    compute(1),
]
"""A copy down of 3 waits for compute of 2; the host then updates for 5, uploads for 4, and a gather of 1 follows: the
compute stream is idle from 2 to 15."""
UPDATES = [HostWork("adam", 0, 3, worker=True), HostWork("adam", 0, 4, worker=True)]
GATHER_4 = [gather(4), RecordEvent(0, 1)]
TIMELINES: dict[str, tuple[list[Event], float, dict[str, float]]] = {
    "streams run concurrently": ([compute(10), gather(4)], 10, {}),
    "a waiting stream starts when its event completes": (
        [*GATHER_4, compute(1), WaitEvent(0, 0), compute(2)],
        6,
        {"communication": 3},
    ),
    "an event covers only work issued before it": (
        [*GATHER_4, gather(4), WaitEvent(0, 0), compute(2)],
        6,
        {"communication": 4},
    ),
    "a wait for a completed event is free": ([RecordEvent(0, 1), compute(5), WaitEvent(0, 0), compute(1)], 6, {}),
    "a final wait of the host counts": ([compute(1), gather(4), HostWaitStream(1)], 4, {"communication": 3}),
    "idle time is attributed to its causes": (
        TRANSFER_AND_UPDATE,
        16,
        {"transfer": 7, "host": 5, "communication": 1},
    ),
    "kernels of a communication stream count as communication": (
        [gather(3), compute(2, stream=1), RecordEvent(0, 1), WaitEvent(0, 0), compute(1)],
        6,
        {"communication": 5},
    ),
    "a blocking copy stalls the host": (
        [compute(2), Transfer(0, 3, to_device=False, blocking=True), compute(1)],
        6,
        {"transfer": 3},
    ),
    "worker threads run concurrently with the host": (
        [*UPDATES, HostWaitWorkers(1), compute(1), HostWaitWorkers(2), compute(1)],
        8,
        {"host": 6},
    ),
}


@pytest.mark.parametrize(("events", "end", "waiting"), TIMELINES.values(), ids=TIMELINES)
def test_timeline(events: list[Event], end: float, waiting: dict[str, float]) -> None:
    """Oracle: computed by hand: the end, and the compute stream's waits by cause."""
    clock = run(*events)
    assert (clock.now, waits(clock)) == (end, waiting)


@pytest.mark.parametrize(
    ("events", "tails"),
    [
        ([gather(4), gather(3, stream=2)], (4, 7)),
        ([gather(4), gather(3, stream=2, axis="replicate", stride=2)], (4, 3)),
        # Machines of two, so stride 2 is between machines only; each copy has 1 of latency.
        ([Transfer(1, 3, **TO_DEVICE), Transfer(2, 3, **TO_DEVICE)], (4, 8)),
        ([Transfer(1, 3, **TO_DEVICE), Transfer(2, 3, to_device=False, blocking=False)], (4, 4)),
    ],
    ids=["one group", "different links", "one direction", "opposite directions"],
)
def test_work_on_one_link_is_serialized(events: list[Event], tails: tuple[float, float]) -> None:
    """Oracle: computed by hand: ends of the two streams."""
    clock = run(*events, transfer_latency_seconds=1)
    assert (clock.tail(1), clock.tail(2)) == tails


def test_host_executes_the_kernels_on_a_cpu() -> None:
    """Oracle: computed by hand: two operators of 3 seconds, each after 2 of host time."""
    clock = run(compute(3), compute(3), device_type="cpu", host_operator_seconds=2)
    assert clock.now == clock.host == 10 and waits(clock) == {"host": 4}


def test_slow_host_determines_the_step_time() -> None:
    """Oracle: computed by hand: three operators issued 2 seconds apart, of one second each."""
    clock = run(compute(1), compute(1), compute(1), host_operator_seconds=2)
    assert clock.now == 7 and clock.host == 6 and waits(clock) == {"host": 4}


@pytest.mark.parametrize("wait", [HostWaitEvent(0), HostWaitStream(1), HostWaitStream(None)])
def test_host_wait_delays_later_work(wait: Event) -> None:
    """Oracle: computed by hand: work issued after the wait starts after the gather of 4, the cause of the wait."""
    clock = run(*GATHER_4, wait, compute(1), host_operator_seconds=1)
    assert clock.host == 5 and clock.now == 6 and waits(clock) == {"communication": 4, "host": 1}


def test_another_group_uses_gaps_of_a_shared_link() -> None:
    """Oracle: by hand: the first gather waits until 5 and needs the link until 9; a later one of another group, of 3,
    fits before it, one of 6 does not."""
    before = [compute(5), RecordEvent(0, 0), WaitEvent(0, 1), gather(4, stream=1)]
    assert run(*before, gather(3, stream=2, axis="world")).tail(2) == 3
    assert run(*before, gather(6, stream=2, axis="world")).tail(2) == 15
    assert run(*before, gather(3, stream=2)).tail(2) == 12  # of the same group: in order
    assert run(gather(3, stream=3, axis="all"), *before, gather(3, stream=2, axis="world")).tail(2) == 12


def test_volumes_add_up_by_collective_and_axis() -> None:
    """Oracle: computed by hand: two gathers send half of 8 and of 4 bytes, an all-reduce of 6 sends 6."""
    clock = run(gather(4), gather(2), Collective("all_reduce", 2, 6, 2, 2, "replicate"))
    volumes = clock.parts.volumes
    gathers, reduction = volumes["all_gather", "shard", 2], volumes["all_reduce", "replicate", 2]
    assert (gathers.calls, gathers.bytes, gathers.seconds) == (2, 6, 6.0)
    assert (reduction.calls, reduction.bytes, reduction.seconds) == (1, 6, 6.0)


def test_window_counts_only_work_after_its_start() -> None:
    """Oracle: computed by hand: of two kernels of 5 with a window started between them, one counts."""
    clock = Clock(imagined_hardware())
    clock.advance(compute(5))
    clock.begin_window()
    clock.advance(compute(5))
    clock.end_window()
    assert clock.parts.kinds[KernelKind.matmul] == 5 and not waits(clock) and clock.now == 10


def test_lane_intervals_never_overlap() -> None:
    """Oracle: a list of all reserved intervals."""
    lane, taken = Lane(), []
    for ready, seconds in [(3, 2), (0, 3), (0, 1), (4, 1), (0, 0.5), (6, 4), (0, 2), (5, 0)]:
        start = lane.free_from(ready, seconds)
        lane.take(start, seconds)
        assert start >= ready and all(start >= end or start + seconds <= begin for begin, end in taken)
        taken.append((start, start + seconds))
    assert taken[:4] == [(3, 5), (0, 3), (5, 6), (6, 7)]
