"""Messages between ranks that are replayed together."""

import pytest

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.plan.simulator import costs
from fsdptoys.plan.simulator.allocator import Allocator, build_allocator
from fsdptoys.plan.simulator.events import (
    COMPUTE_STREAM,
    Kernel,
    KernelKind,
    Mark,
    Message,
    Messages,
    Trace,
)
from tests.harness.multi_rank_replay import replay_together
from tests.harness.traced_runs import imagined_hardware, only_attention_takes_time


def messages(rank: int, *parts: tuple[int, bool], size: int = 100) -> Messages:
    return Messages(
        1, tuple(Message(peer, size, sends) for peer, sends in parts), rank, 2, 1, "pp"
    )


def two_allocators() -> list[Allocator]:
    return [build_allocator(AllocatorKind.expandable) for _ in range(2)]


def kernel(seconds: float) -> Kernel:
    return Kernel("k", 1, KernelKind.attention, seconds, 0, "bfloat16")


def test_a_message_waits_for_its_later_rank_and_takes_the_time_of_its_link() -> None:
    """Oracle: arithmetic: arrivals after 2 s and 5 s, 100 bytes at 50 bytes per second."""
    hardware = only_attention_takes_time(intra_node_bandwidth=50.0)
    sender = Trace(
        [
            Mark(1, "forward"),
            kernel(2.0)._replace(stream=1),
            messages(0, (1, True)),
            Mark(1, "end"),
        ]
    )
    receiver = Trace([Mark(1, "forward"), kernel(5.0)._replace(stream=COMPUTE_STREAM)])
    receiver.events += [
        messages(1, (0, False))._replace(stream=COMPUTE_STREAM),
        Mark(1, "end"),
    ]
    replayed = replay_together([sender, receiver], hardware, two_allocators())
    assert replayed[1].time().step_seconds == 5 + 2
    assert replayed[1].time().exposed_communication_seconds == 2
    late = Trace(
        [
            Mark(1, "forward"),
            messages(1, (0, False))._replace(stream=COMPUTE_STREAM),
            Mark(1, "end"),
        ]
    )
    replayed = replay_together([sender, late], hardware, two_allocators())
    assert replayed[1].time().stage_seconds == 2
    assert replayed[1].time().step_seconds == 2 + 2


def test_ranks_that_wait_for_one_another_are_reported() -> None:
    """Oracle: the definition of a deadlock."""
    traces = [
        Trace([Mark(1, "forward"), messages(rank, (1 - rank, False)), Mark(1, "end")])
        for rank in range(2)
    ]
    with pytest.raises(RuntimeError, match="these ranks wait for one another"):
        replay_together(traces, imagined_hardware(), two_allocators())


@pytest.mark.parametrize(
    ("stride", "rank", "peer", "leaves"),
    [
        (2, 0, 1, False),
        (2, 1, 2, True),
        (2, 3, 0, True),
        (3, 0, 1, True),
        (8, 0, 1, True),
        (1, 2, 3, False),
    ],
)
def test_messages_leave_a_node_between_ranks_of_different_nodes(
    stride: int, rank: int, peer: int, leaves: bool
) -> None:
    """Oracle: nodes of four devices, counted by hand; with three ranks in each part one of them has
    the other node."""
    event = messages(rank, (peer, True))._replace(group_stride=stride)
    assert (
        costs.leaves_node(
            imagined_hardware(devices_per_node=4), event, event.messages[0]
        )
        is leaves
    )
