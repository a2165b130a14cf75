"""The replay's numbers by hand, and the time-dependent reuse of memory."""

import pytest

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.allocator import NativeAllocator, OutOfMemory, build_allocator
from fsdptoys.plan.simulator.events import (
    Alloc,
    Collective,
    Event,
    Free,
    HostWaitStream,
    Kernel,
    KernelKind,
    Mark,
    RecordEvent,
    RecordStream,
    Trace,
    WaitEvent,
)
from fsdptoys.plan.simulator.replay import Replay, replay
from tests.plan.simulator.imagined import imagined_hardware

MIB = 2**20
STREAMS = {0: "compute", 1: "all-gather"}


def replay_of(*events: Event, categories: dict[int, Category] | None = None, **hardware: float) -> Replay:
    trace = Trace(list(events), STREAMS, categories or {})
    return replay(trace, imagined_hardware(**hardware), NativeAllocator())


def block(number: int, mib: int, category: Category = Category.activations, stream: int = 0) -> Alloc:
    return Alloc(number, mib * MIB, stream, category)


def compute(seconds: float) -> Kernel:
    return Kernel("mm", 0, KernelKind.matmul, seconds, 0, "bfloat16")


def test_phases_of_the_last_step_have_peak_end_and_categories() -> None:
    """Oracle: computed by hand; the second step's phases count, and later categories override earlier ones."""
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
    assert [phase.name for phase in result.phases] == ["construction"] + 2 * ["forward", "backward"]
    forward, backward = result.last_step
    assert (forward.peak_bytes, forward.end_bytes) == (90 * MIB, 60 * MIB)
    assert (backward.peak_bytes, backward.end_bytes) == (110 * MIB, 40 * MIB)
    memory = result.memory()
    assert (memory.peak_bytes, memory.end_bytes, memory.peak_phase) == (110 * MIB, 40 * MIB, "backward")
    assert memory.categories == {
        Category.parameters: 40 * MIB,
        Category.activations: 20 * MIB,
        Category.gradients: 50 * MIB,
    }
    assert memory.reserved_bytes == 140 * MIB  # 40, 20, 30 and 50: native segments of 30 and 50 do not fit into others


@pytest.mark.parametrize(("waits", "segments"), [(False, 2), (True, 1)])
def test_memory_used_by_another_stream_is_reused_after_that_use(waits: bool, segments: int) -> None:
    """Oracle: by hand: the compute stream uses the block until 10; the host requests the next at 0, or at 10 if it
    waits. Allocated memory falls with the free, before the reuse."""
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


@pytest.mark.parametrize("later", [Kernel("mm", 2, KernelKind.matmul, 10, 0, "bfloat16"), compute(10)])
def test_only_work_issued_before_the_free_delays_reuse(later: Kernel) -> None:
    """Oracle: by hand: stream 2 is done with the block at 2 and, or else the computing stream, busy until 10 at least;
    the host asks at 3."""
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


def test_replay_waits_for_the_device_before_out_of_memory() -> None:
    """Oracle: PyTorch waits for the device and frees blocks in use by streams before it fails, which takes time."""
    events = [
        Mark(1, "forward"),
        block(0, 30, stream=1),
        RecordStream(0, 0),
        compute(10),
        Free(0),
        block(1, 40, stream=1),
        compute(1),
    ]
    trace, hardware = Trace(events, STREAMS), imagined_hardware(host_operator_seconds=1)
    result = replay(trace, hardware, build_allocator(AllocatorKind.native, 60 * MIB))
    assert result.releases == 1 and result.memory().reserved_bytes == 40 * MIB
    assert result.time().step_seconds == 13  # 1 + 10, then the host issues again
    with pytest.raises(OutOfMemory):
        replay(trace, hardware, build_allocator(AllocatorKind.native, 35 * MIB))


def test_step_time_is_that_of_the_last_step_with_matching_parts() -> None:
    """Oracle: computed by hand: the first step takes 20; of the second's 9 a gather of 4 is exposed."""
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
    assert (time.step_seconds, time.compute_seconds, time.exposed_communication_seconds) == (9, 5, 4)
    assert time.exposed_transfer_seconds == time.host_seconds == 0
    assert [(phase.name, phase.seconds) for phase in result.last_step] == [("forward", 6), ("backward", 3)]
    assert time.kinds["matrix products"] == 5 and [volume.bytes for volume in time.volumes] == [4]
    assert result.phases[0].name == "construction" and result.phases[0].seconds == 7
