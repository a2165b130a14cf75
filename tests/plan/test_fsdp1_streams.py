"""Stream on which FSDP1's gradients are joined: the planned device must agree with autograd on a real one."""

import pytest

from fsdptoys.plan.simulator.events import Alloc, Kernel, Mark, RecordStream, Trace
from scripts.validate_plan import trace_row
from tests.plan.processes import in_fresh_process
from tests.scripts.test_published_programs import newer_torch

BLOCK, REST = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 2 * 32000 * 4096 + 4096


def of_phase(trace: Trace, phase: str) -> list[object]:
    """Events of a phase of the second step."""
    begins = trace.events.index(Mark(2, phase))
    ends = next(i for i in range(begins + 1, len(trace.events)) if isinstance(trace.events[i], Mark))
    return list(trace.events[begins + 1 : ends])


@pytest.mark.usefixtures("unmeasured")
@newer_torch
@pytest.mark.parametrize("strategy", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.extended)])
def test_fsdp1_concatenates_gradients_on_the_all_gather_stream(strategy: str) -> None:
    """Oracle: ``Node::stream``: FSDP1's views are made on the gathering stream, FSDP2 makes none."""
    trace = in_fresh_process(trace_row, f"{strategy} block gc", 2)
    (gathering,) = (number for number, purpose in trace.streams.items() if purpose == "all-gather")
    events = of_phase(trace, "backward")
    joins = [event for event in events if isinstance(event, Kernel) and event.stream == gathering]
    if strategy == "fsdp2":
        assert not joins
        return
    assert [event.name for event in joins] == ["aten::cat"] * 3
    # On the gathering stream: a unit's parameters again, except the root's, which stayed, and its joined gradient.
    sizes = sorted(event.bytes for event in events if isinstance(event, Alloc) and event.stream == gathering)
    assert sizes == sorted([2 * BLOCK] * 4 + [2 * REST])
    # Its single gradients, nine a block and three of the rest, are used there too, and the joined one by the reduction.
    recorded = [event.stream for event in events if isinstance(event, RecordStream)]
    assert recorded.count(gathering) >= 2 * 9 + 3
