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


def run(*events: Event, **hardware: float) -> Clock:
    clock = Clock(imagined_hardware(**hardware))
    clock.begin_window()
    for event in events:
        clock.advance(event)
    clock.end_window()
    waits, kinds = clock.parts.waits.values(), clock.parts.kinds.values()
    assert sum(waits) + sum(kinds) == pytest.approx(clock.now)
    return clock


def waits(clock: Clock) -> dict[str, float]:
    return {cause.name: seconds for cause, seconds in clock.parts.waits.items() if seconds}


def test_streams_run_concurrently() -> None:
    """Oracle: computed by hand: 10 seconds of compute hide 4 of a collective."""
    clock = run(compute(10), gather(4))
    assert (clock.now, clock.tail(0), clock.tail(1), waits(clock)) == (10, 10, 4, {})


def test_waiting_stream_starts_when_its_event_completes() -> None:
    """Oracle: computed by hand: a gather of 4 is needed after 1 of compute, so 3 are exposed."""
    clock = run(gather(4), RecordEvent(0, 1), compute(1), WaitEvent(0, 0), compute(2))
    assert clock.now == 6 and waits(clock) == {"communication": 3}


def test_event_covers_only_work_issued_before_it() -> None:
    """Oracle: computed by hand: the second gather comes after the event and is not waited for."""
    clock = run(gather(4), RecordEvent(0, 1), gather(4), WaitEvent(0, 0), compute(2))
    assert clock.now == 6 and clock.tail(1) == 8


def test_host_executes_the_kernels_on_a_cpu() -> None:
    """Oracle: computed by hand: two operators of 3 seconds, each after 2 of host time."""
    clock = Clock(imagined_hardware("cpu", host_operator_seconds=2))
    clock.advance(compute(3))
    clock.advance(compute(3))
    clock.end_window()
    assert clock.now == clock.host == 10 and waits(clock) == {"host": 4}


def test_wait_for_a_completed_event_is_free() -> None:
    """Oracle: computed by hand: the event is at 0, the stream at 5."""
    assert run(RecordEvent(0, 1), compute(5), WaitEvent(0, 0), compute(1)).now == 6


def test_final_host_wait_counts() -> None:
    """Oracle: computed by hand: nothing computes after the gather of 4."""
    assert waits(run(compute(1), gather(4), HostWaitStream(1))) == {"communication": 3}


def test_slow_host_determines_the_step_time() -> None:
    """Oracle: computed by hand: three operators issued 2 seconds apart, of one second each."""
    clock = run(compute(1), compute(1), compute(1), host_operator_seconds=2)
    assert clock.now == 7 and clock.host == 6 and waits(clock) == {"host": 4}


def test_idle_time_is_attributed_to_its_causes() -> None:
    """Oracle: by hand. A copy down of 3 waits for compute of 2; the host then updates for 5, uploads for 4, and a
    gather of 1 follows: the compute stream is idle from 2 to 15."""
    clock = run(
        compute(2),
        RecordEvent(0, 0),
        WaitEvent(0, 1),
        Transfer(1, 3, to_device=False, blocking=True),
        HostWork("adam", 0, 5, worker=False),
        Transfer(2, 4, to_device=True, blocking=False),
        RecordEvent(1, 2),
        WaitEvent(1, 3),
        gather(1, stream=3),
        RecordEvent(2, 3),
        WaitEvent(2, 0),
        compute(1),
    )
    assert clock.now == 16 and waits(clock) == {"transfer": 7, "host": 5, "communication": 1}


def test_kernels_of_a_communication_stream_count_as_communication() -> None:
    """Oracle: computed by hand: a reduction of 3 and a division of 2 after it, both waited for."""
    clock = run(gather(3), compute(2, stream=1), RecordEvent(0, 1), WaitEvent(0, 0), compute(1))
    assert clock.now == 6 and waits(clock) == {"communication": 5}


def test_collectives_of_one_group_are_serialized() -> None:
    """Oracle: computed by hand: the second gather is on another stream and ready immediately, but runs second."""
    clock = run(gather(4, stream=1), gather(3, stream=2))
    assert (clock.tail(1), clock.tail(2)) == (4, 7)


def test_groups_on_different_links_run_concurrently() -> None:
    """Oracle: computed by hand: machines of two, so stride 2 is between machines only."""
    clock = run(gather(4, stream=1), gather(3, stream=2, axis="replicate", stride=2))
    assert (clock.tail(1), clock.tail(2)) == (4, 3)


def test_another_group_uses_gaps_of_a_shared_link() -> None:
    """Oracle: by hand: the first gather waits until 5 and needs the link until 9; a later one of another group, of 3,
    fits before it, one of 6 does not."""
    before = [compute(5), RecordEvent(0, 0), WaitEvent(0, 1), gather(4, stream=1)]
    assert run(*before, gather(3, stream=2, axis="world")).tail(2) == 3
    assert run(*before, gather(6, stream=2, axis="world")).tail(2) == 15
    assert run(*before, gather(3, stream=2)).tail(2) == 12  # of the same group: in order
    assert run(gather(3, stream=3, axis="all"), *before, gather(3, stream=2, axis="world")).tail(2) == 12


def test_copies_run_concurrently_only_in_opposite_directions() -> None:
    """Oracle: computed by hand: two uploads are serialized, one download runs concurrently; each has 1 of latency."""
    up = [Transfer(stream, 3, to_device=True, blocking=False) for stream in (1, 2)]
    clock = run(*up, Transfer(3, 3, to_device=False, blocking=False), transfer_latency_seconds=1)
    assert [clock.tail(stream) for stream in (1, 2, 3)] == [4, 8, 4]


def test_blocking_copy_stalls_the_host() -> None:
    """Oracle: computed by hand: on the computing stream, behind 2 of compute."""
    clock = run(compute(2), Transfer(0, 3, to_device=False, blocking=True), compute(1))
    assert clock.host == 5 and clock.now == 6 and waits(clock) == {"transfer": 3}


@pytest.mark.parametrize("wait", [HostWaitEvent(0), HostWaitStream(1), HostWaitStream(None)])
def test_host_wait_delays_later_work(wait: Event) -> None:
    """Oracle: computed by hand: work issued after the wait starts after the gather of 4, the cause of the wait."""
    clock = run(gather(4), RecordEvent(0, 1), wait, compute(1), host_operator_seconds=1)
    assert clock.host == 5 and clock.now == 6 and waits(clock) == {"communication": 4, "host": 1}


def test_worker_threads_run_concurrently_with_the_host() -> None:
    """Oracle: computed by hand: updates of 3 and 4; the host waits for the first and continues during the second."""
    jobs = [HostWork("adam", 0, 3, worker=True), HostWork("adam", 0, 4, worker=True)]
    clock = run(*jobs, HostWaitWorkers(1), compute(1), HostWaitWorkers(2), compute(1))
    assert clock.host == 7 and clock.now == 8 and waits(clock) == {"host": 6}


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
