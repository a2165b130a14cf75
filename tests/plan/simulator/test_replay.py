"""Timelines and the time-dependent reuse of memory by hand: one byte, one FLOP and one parameter
take a second each."""

from typing import Any

import pytest

from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.allocator import NativeAllocator
from fsdptoys.plan.simulator.events import (
    Alloc,
    Collective,
    Event,
    Free,
    HostWaitEvent,
    HostWaitStream,
    HostWaitWorkers,
    HostWork,
    Kernel,
    KernelKind,
    Mark,
    RecordEvent,
    RecordStream,
    Trace,
    Transfer,
    WaitEvent,
)
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.simulator.stream_clock import Clock
from tests.harness.traced_runs import imagined_hardware


def compute(seconds: float, stream: int = 0) -> Kernel:
    return Kernel("mm", stream, KernelKind.matmul, seconds, 0, "bfloat16")


def gather(
    seconds: float, stream: int = 1, axis: str = "shard", stride: int = 1
) -> Collective:
    """Of two ranks: half of the bytes are sent."""
    return Collective("all_gather", stream, round(2 * seconds), 2, stride, axis)


def run(*events: Event, device_type: str = "cuda", **hardware: float) -> Clock:
    clock = Clock(imagined_hardware(device_type, **hardware))
    clock.begin_window()
    for event in events:
        clock.advance(event)
    clock.end_window()
    waits = clock.parts.waits.values()
    kinds = clock.parts.kinds.values()
    assert sum(waits) + sum(kinds) == pytest.approx(clock.now)
    return clock


def waits(clock: Clock) -> dict[str, float]:
    return {
        cause.name: seconds for cause, seconds in clock.parts.waits.items() if seconds
    }


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
"""A copy down of 3 waits for compute of 2; the host then updates for 5, uploads for 4, and a gather
of 1 follows: the compute stream is idle from 2 to 15."""
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
    "a wait for a completed event is free": (
        [RecordEvent(0, 1), compute(5), WaitEvent(0, 0), compute(1)],
        6,
        {},
    ),
    "a final wait of the host counts": (
        [compute(1), gather(4), HostWaitStream(1)],
        4,
        {"communication": 3},
    ),
    "idle time is attributed to its causes": (
        TRANSFER_AND_UPDATE,
        16,
        {"transfer": 7, "host": 5, "communication": 1},
    ),
    "kernels of a communication stream count as communication": (
        [
            gather(3),
            compute(2, stream=1),
            RecordEvent(0, 1),
            WaitEvent(0, 0),
            compute(1),
        ],
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


SLOW = {"host_operator_seconds": 2}
HOSTS: dict[str, tuple[list[Event], float, dict[str, float], dict[str, Any]]] = {
    "a cpu executes the kernels": (
        [compute(3), compute(3)],
        10,
        {"host": 4},
        {"device_type": "cpu"} | SLOW,
    ),
    "a slow host issues operators 2 seconds apart": (
        [compute(1)] * 3,
        7,
        {"host": 4},
        SLOW,
    ),
}
AFTER_GATHER = (6, {"communication": 4, "host": 1}, {"host_operator_seconds": 1})
HOSTS |= {
    f"work after {wait} starts after the gather": (
        [*GATHER_4, wait, compute(1)],
        *AFTER_GATHER,
    )
    for wait in (HostWaitEvent(0), HostWaitStream(1), HostWaitStream(None))
}
ALL = {name: (*row, {}) for name, row in TIMELINES.items()} | HOSTS


@pytest.mark.parametrize(
    ("events", "end", "waiting", "hardware"), ALL.values(), ids=ALL
)
def test_timeline(
    events: list[Event], end: float, waiting: dict[str, float], hardware: dict[str, Any]
) -> None:
    """Oracle: computed by hand: the end, and the compute stream's waits by cause."""
    clock = run(*events, **hardware)
    assert (clock.now, waits(clock)) == (end, waiting)


@pytest.mark.parametrize(
    ("events", "tails"),
    [
        ([gather(4), gather(3, stream=2)], (4, 7)),
        ([gather(4), gather(3, stream=2, axis="replicate", stride=2)], (4, 3)),
        # Machines of two, so stride 2 is between machines only; each copy has 1 of latency.
        ([Transfer(1, 3, **TO_DEVICE), Transfer(2, 3, **TO_DEVICE)], (4, 8)),
        (
            [
                Transfer(1, 3, **TO_DEVICE),
                Transfer(2, 3, to_device=False, blocking=False),
            ],
            (4, 4),
        ),
    ],
    ids=["one group", "different links", "one direction", "opposite directions"],
)
def test_work_on_one_link_is_serialized(
    events: list[Event], tails: tuple[float, float]
) -> None:
    """Oracle: computed by hand: ends of the two streams."""
    clock = run(*events, transfer_latency_seconds=1)
    assert (clock.tail(1), clock.tail(2)) == tails


def test_another_group_uses_gaps_of_a_shared_link() -> None:
    """Oracle: by hand: the first gather waits until 5 and needs the link until 9; a later one of
    another group, of 3, fits before it, one of 6 does not."""
    before = [compute(5), RecordEvent(0, 0), WaitEvent(0, 1), gather(4, stream=1)]
    assert run(*before, gather(3, stream=2, axis="world")).tail(2) == 3
    assert run(*before, gather(6, stream=2, axis="world")).tail(2) == 15
    # Of the same group: in order
    assert run(*before, gather(3, stream=2)).tail(2) == 12
    assert (
        run(
            gather(3, stream=3, axis="all"), *before, gather(3, stream=2, axis="world")
        ).tail(2)
        == 12
    )


def test_volumes_add_up_by_collective_and_axis() -> None:
    """Oracle: computed by hand: two gathers send half of 8 and of 4 bytes, an all-reduce of 6 sends
    6."""
    clock = run(gather(4), gather(2), Collective("all_reduce", 2, 6, 2, 2, "replicate"))
    volumes = clock.parts.volumes
    gathers = volumes["all_gather", "shard", 2]
    reduction = volumes["all_reduce", "replicate", 2]
    assert (gathers.calls, gathers.bytes, gathers.seconds) == (2, 6, 6.0)
    assert (reduction.calls, reduction.bytes, reduction.seconds) == (1, 6, 6.0)


MIB = 2**20
STREAMS = {0: "compute", 1: "all-gather"}


def replay_of(
    *events: Event, categories: dict[int, Category] | None = None, **hardware: float
) -> Replay:
    trace = Trace(list(events), STREAMS, categories or {})
    return replay(trace, imagined_hardware(**hardware), NativeAllocator())


def block(
    number: int, mib: int, category: Category = Category.activations, stream: int = 0
) -> Alloc:
    return Alloc(number, mib * MIB, stream, category)


def test_phases_of_the_last_step_have_peak_end_and_categories() -> None:
    """Oracle: computed by hand; the second step's phases count, and later categories override
    earlier ones."""
    parameters = [Mark(0, "construction"), block(0, 40, Category.parameters)]
    step = []
    for number in (1, 2):
        step += [
            Mark(number, "forward"),
            block(number * 10 + 1, 20),
            block(number * 10 + 2, 30),
            Free(number * 10 + 2),
            Mark(number, "backward"),
            block(number * 10 + 3, 50, Category.temporary),
            Free(number * 10 + 1),
            Free(number * 10 + 3),
        ]
    result = replay_of(*parameters, *step, categories={23: Category.gradients})
    assert [phase.name for phase in result.phases] == ["construction"] + 2 * [
        "forward",
        "backward",
    ]
    forward, backward = result.last_step
    assert (forward.peak_bytes, forward.end_bytes) == (90 * MIB, 60 * MIB)
    assert (backward.peak_bytes, backward.end_bytes) == (110 * MIB, 40 * MIB)
    memory = result.memory()
    assert (memory.peak_bytes, memory.end_bytes, memory.peak_phase) == (
        110 * MIB,
        40 * MIB,
        "backward",
    )
    assert memory.categories == {
        Category.parameters: 40 * MIB,
        Category.activations: 20 * MIB,
        Category.gradients: 50 * MIB,
    }
    # 40, 20, 30 and 50: native segments of 30 and 50 do not fit into others
    assert memory.reserved_bytes == 140 * MIB


@pytest.mark.parametrize(("waits", "segments"), [(False, 2), (True, 1)])
def test_memory_used_by_another_stream_is_reused_after_that_use(
    waits: bool, segments: int
) -> None:
    """Oracle: by hand: the compute stream uses the block until 10; the host requests the next at 0,
    or at 10 if it waits. Allocated memory falls with the free, before the reuse."""
    wait = [HostWaitStream(0)] if waits else []
    result = replay_of(
        Mark(1, "forward"),
        block(0, 30, stream=1),
        RecordStream(0, 0),
        compute(10),
        Free(0),
        *wait,
        block(1, 30, stream=1),
    )
    assert result.memory().streams == {"all-gather": segments * 30 * MIB}
    assert result.memory().peak_bytes == 30 * MIB


@pytest.mark.parametrize(
    "later", [Kernel("mm", 2, KernelKind.matmul, 10, 0, "bfloat16"), compute(10)]
)
def test_only_work_issued_before_the_free_delays_reuse(later: Kernel) -> None:
    """Oracle: by hand: stream 2 is done with the block at 2 and, or else the computing stream, busy
    until 10 at least; the host asks at 3."""
    result = replay_of(
        Mark(1, "forward"),
        block(0, 30, stream=1),
        RecordStream(0, 2),
        Kernel("mm", 2, KernelKind.matmul, 2, 0, "bfloat16"),
        *([later] if later.stream == 0 else []),
        Free(0),
        *([later] if later.stream == 2 else []),
        Collective("all_gather", 1, 6, 2, 1, "shard"),
        HostWaitStream(1),
        block(1, 30, stream=1),
    )
    assert result.memory().reserved_bytes == 30 * MIB


def test_step_time_is_that_of_the_last_step_with_matching_parts() -> None:
    """Oracle: computed by hand: the first step takes 20; of the second's 9 a gather of 4 is
    exposed."""
    result = replay_of(
        compute(7),
        Mark(1, "forward"),
        compute(20),
        Mark(2, "forward"),
        HostWaitStream(None),
        Collective("all_gather", 1, 8, 2, 1, "shard"),
        RecordEvent(0, 1),
        WaitEvent(0, 0),
        compute(2),
        Mark(2, "backward"),
        compute(3),
    )
    time = result.time()
    assert (
        time.step_seconds,
        time.compute_seconds,
        time.exposed_communication_seconds,
    ) == (
        9,
        5,
        4,
    )
    assert time.exposed_transfer_seconds == time.host_seconds == 0
    assert [(phase.name, phase.seconds) for phase in result.last_step] == [
        ("forward", 6),
        ("backward", 3),
    ]
    assert time.kinds["matrix products"] == 5 and [
        volume.bytes for volume in time.volumes
    ] == [4]
    assert result.phases[0].name == "construction" and result.phases[0].seconds == 7
