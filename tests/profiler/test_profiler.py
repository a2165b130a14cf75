"""Traces that the profiler writes of real loops on the CPU."""

import contextlib
import gzip
import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.device import Device
from fsdptoys.profiler import ProfileConfig, Profiler
from fsdptoys.profiler.trace import npu_top_ops
from tests.harness.snapshots import summary_of


def window(skip: int, warmup: int, active: int, **others: Any) -> ProfileConfig:
    return ProfileConfig(
        enabled=True,
        skip_steps=skip,
        warmup_steps=warmup,
        active_steps=active,
        **others,
    )


def take_steps(
    profiler: Profiler, first: int, last: int, fail_in: int | None = None
) -> None:
    """Take steps with distinct calls: each multiplies matrices once, and step n adds n times."""
    a = torch.randn(32, 32)
    with profiler:
        for step in range(first, last + 1):
            torch.mm(a, a)
            for _ in range(step):
                torch.add(a, a)
            if step == fail_in:
                raise RuntimeError("the step failed")
            profiler.step(step)


def read_trace(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def count(events: list[dict], name: str) -> int:
    return sum(event.get("name") == name and event.get("ph") == "X" for event in events)


def marks(events: list[dict]) -> set[int]:
    """Step numbers with marks in the trace."""
    return {
        int(event["name"].split("#")[1])
        for event in events
        if event.get("name", "").startswith("ProfilerStep#")
    }


@pytest.mark.parametrize("first", [1, 11], ids=["from the start", "resumed"])
def test_trace_holds_only_the_chosen_steps_under_their_numbers(tmp_path, first):
    """Oracle: the calls of the loop; step n adds n times. Kernels of the step before the window
    would be in the trace."""
    messages: list[str] = []
    waits: list[str] = []
    config = window(1, 1, 2, memory=True)
    device = types.SimpleNamespace(
        type="cpu", synchronize=lambda: waits.append("waited")
    )
    profiler = Profiler(
        config,
        device,
        0,
        tmp_path / "profile",
        first_step=first,
        message=messages.append,
    )
    take_steps(profiler, first, first + 6)
    assert waits == ["waited"]
    path = tmp_path / "profile" / "rank0.json.gz"
    events = read_trace(path)
    active = [first + 2, first + 3]
    assert marks(events) == set(active)
    assert count(events, "aten::mm") == 2
    assert count(events, "aten::add") == sum(active)
    assert list(path.parent.iterdir()) == [path]
    assert messages == [
        f"trace of steps {active[0]} to {active[1]}: {path} (open it at https://ui.perfetto.dev "
        "or in chrome://tracing)"
    ]
    page = summary_of(profiler)
    assert (
        f"Rank 0, steps {active[0]} to {active[1]}; trace: `profile/rank0.json.gz`."
        in page
    )
    assert "| operator | calls | self CPU time | total CPU time | self memory |" in page
    calls = dict(re.findall(r"^\| `([^`]+)` \| ([\d,]+) \|", page, re.MULTILINE))
    assert calls["aten::mm"] == "2" and calls["aten::add"] == str(sum(active))
    assert calls["Python, outside operators"] == "2"


@pytest.mark.parametrize(
    ("last", "fail_in", "traced", "sentence"),
    [
        (
            4,
            None,
            {3, 4},
            "trace of steps 3 to 4 (the run ended before step 6 was done)",
        ),
        (
            6,
            5,
            {3, 4, 5},
            "trace of steps 3 to 4 (the run ended before step 6 was done)",
        ),
        (6, 3, {3}, "trace of step 3 (the run ended before step 6 was done)"),
        (2, None, set(), "nothing was traced: the run ended after step 2"),
        (6, 1, set(), "nothing was traced: the run ended after step 0"),
    ],
)
def test_early_end_keeps_the_trace_or_reports_its_absence(
    tmp_path, last, fail_in, traced, sentence
):
    """Oracle: the steps that the loop began within the window 3 to 6."""
    messages: list[str] = []
    profiler = Profiler(
        window(1, 1, 4), Device("cpu"), 0, tmp_path, message=messages.append
    )
    with (
        pytest.raises(RuntimeError, match="the step failed")
        if fail_in
        else contextlib.nullcontext()
    ):
        take_steps(profiler, 1, last, fail_in)
    path = tmp_path / "rank0.json.gz"
    assert (marks(read_trace(path)) - {last + 1} if path.exists() else set()) == traced
    assert len(messages) == 1 and messages[0].startswith(sentence)
    assert (summary_of(profiler) is None) == (not traced)


@pytest.mark.parametrize(
    ("switch", "field"),
    [("stacks", "Python parent id"), ("shapes", "Input Dims"), ("memory", "Bytes")],
)
def test_each_switch_adds_its_field_to_the_trace(tmp_path, switch, field):
    """Oracle: the same loop without the switch; its trace has no such field."""

    def fields(config: ProfileConfig, folder: Path) -> set[str]:
        take_steps(Profiler(config, Device("cpu"), 0, folder), 1, 3)
        return {
            name
            for event in read_trace(folder / "rank0.json.gz")
            for name in event.get("args", {})
        }

    assert field not in fields(window(0, 1, 2), tmp_path / "without")
    assert field in fields(window(0, 1, 2, **{switch: True}), tmp_path / "with")


def test_failed_trace_write_does_not_end_the_run(tmp_path):
    """Oracle: a folder where the file should be."""
    (tmp_path / "rank0.json.gz").mkdir()
    messages: list[str] = []
    profiler = Profiler(
        window(0, 0, 1), Device("cpu"), 0, tmp_path, message=messages.append
    )
    take_steps(profiler, 1, 3)
    assert "cannot be written" in messages[0] and summary_of(profiler) is None


def test_symbolic_link_in_place_of_a_trace_is_replaced(tmp_path):
    """Oracle: the unchanged target of the link, and a trace under its name."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "rank0.json.gz").symlink_to("precious")
    take_steps(Profiler(window(0, 0, 1), Device("cpu"), 0, tmp_path), 1, 3)
    assert (tmp_path / "precious").read_text() == "precious"
    assert (
        not (tmp_path / "rank0.json.gz").is_symlink()
        and (tmp_path / "rank0.json.gz").stat().st_size > 100
    )


OP_STATISTIC = """\
OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)
Add,AI_VECTOR_CORE,4,8.5,2,2.125,2.5,7.8
MatMulV2,AI_CORE,2,100.25,50,50.125,50.25,92.2
"""


def test_npu_operators_are_read_from_the_analysis():
    """Oracle: a table in the format of CANN. ``tests/torch_npu`` traces with torch_npu itself."""
    operators = [
        (op.name, op.calls, op.self_device_us) for op in npu_top_ops(OP_STATISTIC)
    ]
    assert operators == [("MatMulV2", 2, 100.25), ("Add", 4, 8.5)]
