"""Orders of pipeline schedules, and the time and memory that they take."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import pipelining

from fsdptoys.config.rules.pipeline import SCHEDULES_SINCE
from fsdptoys.models.stages import Stage
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.plan.simulator.pipeline_schedules import (
    Action,
    duration,
    most_in_flight,
    order_of,
)

ONE_BY_ONE = PipelineSchedule("1f1b")
INTERLEAVED = PipelineSchedule.interleaved

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(TORCH < SCHEDULES_SINCE, reason="this torch has one schedule"),
]


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 6), (4, 4), (4, 8), (3, 9)])
def test_interleaved_order_is_pytorchs(ranks: int, count: int) -> None:
    """Oracle: ``ScheduleInterleaved1F1B.pipeline_order``, without slots in which a rank does
    nothing."""
    common = {
        "num_stages": 2 * ranks,
        "group_size": ranks,
        "group_rank": 0,
        "group": None,
        "is_last": False,
    }
    common |= {"has_backward": True, "submod": None, "device": torch.device("cpu")}
    stages = [
        SimpleNamespace(stage_index=index, is_first=index == 0, **common)
        for index in (0, ranks)
    ]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, count)  # type: ignore[arg-type]
    for rank, actions in schedule.pipeline_order.items():
        expected = [
            Action(
                action.computation_type.name == "FORWARD",
                action.stage_index,
                action.microbatch_index or 0,
            )
            for action in actions
            if action is not None
        ]
        assert list(order_of(INTERLEAVED, ranks, rank, count)) == expected


@pytest.mark.parametrize(
    ("schedule", "ranks", "count"),
    [
        (PipelineSchedule.gpipe, 4, 4),
        (ONE_BY_ONE, 2, 4),
        (ONE_BY_ONE, 4, 12),
        (INTERLEAVED, 2, 2),
        (INTERLEAVED, 2, 8),
    ],
)
def test_equal_stages_wait_for_the_published_share(
    schedule: PipelineSchedule, ranks: int, count: int
) -> None:
    """Oracle: (p − 1) / (v·m + p − 1) of a step, with v stages on each of p ranks
    (arXiv:2104.04473, section 2.2).

    With more ranks PyTorch's order of messages makes interleaved slower: those tests compare with
    traces.
    """
    per_rank = schedule.stages_per_rank
    orders = [list(order_of(schedule, ranks, rank, count)) for rank in range(ranks)]
    seconds = duration(orders, [(1.0, 2.0)] * ranks * per_rank)
    assert seconds == pytest.approx(3.0 * (per_rank * count + ranks - 1))


def test_a_slow_stage_determines_the_time() -> None:
    """Oracle: two stages of 1 and 3 seconds, worked by hand: the slow one begins after a forward of
    the other."""
    orders = [list(order_of(ONE_BY_ONE, 2, rank, 4)) for rank in range(2)]
    assert duration(orders, [(0.25, 0.75), (1.0, 2.0)]) == pytest.approx(
        0.25 + 4 * 3.0 + 0.75
    )


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    """Oracle: all m of gpipe; p − r of 1f1b; 3 p − 1 forwards of half of rank 0's layers, p + 1 of
    the last's."""
    stages = [Stage(index, index + 1, index == 0, index == 7) for index in range(8)]
    for schedule, expected in (
        (PipelineSchedule.gpipe, [8, 8, 8, 8]),
        (ONE_BY_ONE, [4, 3, 2, 1]),
        (INTERLEAVED, [11, 9, 7, 5]),
    ):
        orders = [list(order_of(schedule, 4, rank, 8)) for rank in range(4)]
        assert [most_in_flight(order, stages) for order in orders] == expected
