"""What the profiler writes: traces of real loops on the CPU, and memory snapshots.

There is no accelerator here, so the allocator's two functions are stand-ins that check every call
by the signatures of PyTorch's own; the history is made by hand, and PyTorch's own visualizer runs
on it.
"""

import contextlib
import gzip
import inspect
import json
import pickle
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.device import Device
from fsdptoys.profiler import NPULevel, ProfileConfig, Profiler
from fsdptoys.profiler.memory_snapshot import MAX_ENTRIES, Snapshot
from fsdptoys.profiler.memory_snapshot_page import (
    UNKNOWN,
    read_timeline,
    render_snapshot,
    timeline_picture,
)
from fsdptoys.profiler.trace import Trace
from tests.harness.snapshots import MIB, make_snapshot, summary_of


def window(skip: int, warmup: int, active: int, **others: Any) -> ProfileConfig:
    return ProfileConfig(
        enabled=True, skip_steps=skip, warmup_steps=warmup, active_steps=active, **others
    )


def take_steps(profiler: Profiler, first: int, last: int, fail_in: int | None = None) -> None:
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
    """Oracle: the calls of the loop; step n adds n times."""
    said: list[str] = []
    config = window(1, 1, 2, memory=True)
    profiler = Profiler(
        config, Device("cpu"), 0, tmp_path / "profile", first_step=first, message=said.append
    )
    take_steps(profiler, first, first + 6)
    path = tmp_path / "profile" / "rank0.json.gz"
    events = read_trace(path)
    active = [first + 2, first + 3]
    assert marks(events) == set(active)
    assert count(events, "aten::mm") == 2
    assert count(events, "aten::add") == sum(active)
    assert list(path.parent.iterdir()) == [path]
    assert said == [
        f"trace of steps {active[0]} to {active[1]}: {path} (open it at https://ui.perfetto.dev "
        "or in chrome://tracing)"
    ]
    page = summary_of(profiler)
    assert f"Rank 0, steps {active[0]} to {active[1]}; trace: `profile/rank0.json.gz`." in page
    assert "| operator | calls | self CPU time | total CPU time | self memory |" in page
    calls = dict(re.findall(r"^\| `([^`]+)` \| ([\d,]+) \|", page, re.MULTILINE))
    assert calls["aten::mm"] == "2" and calls["aten::add"] == str(sum(active))
    assert calls["Python, outside operators"] == "2"


@pytest.mark.parametrize(
    ("last", "fail_in", "traced", "words"),
    [
        (4, None, {3, 4}, "trace of steps 3 to 4 (the run ended before step 6 was done)"),
        (6, 5, {3, 4, 5}, "trace of steps 3 to 4 (the run ended before step 6 was done)"),
        (6, 3, {3}, "trace of step 3 (the run ended before step 6 was done)"),
        (2, None, set(), "nothing was traced: the run ended after step 2"),
        (6, 1, set(), "nothing was traced: the run ended after step 0"),
    ],
)
def test_early_end_keeps_the_trace_or_reports_its_absence(tmp_path, last, fail_in, traced, words):
    """Oracle: the steps that the loop began within the window 3 to 6."""
    said: list[str] = []
    profiler = Profiler(window(1, 1, 4), Device("cpu"), 0, tmp_path, message=said.append)
    with (
        pytest.raises(RuntimeError, match="the step failed")
        if fail_in
        else contextlib.nullcontext()
    ):
        take_steps(profiler, 1, last, fail_in)
    path = tmp_path / "rank0.json.gz"
    assert (marks(read_trace(path)) - {last + 1} if path.exists() else set()) == traced
    assert len(said) == 1 and said[0].startswith(words)
    assert (summary_of(profiler) is None) == (not traced)


@pytest.mark.parametrize(
    ("switch", "field"),
    [("stacks", "Python parent id"), ("shapes", "Input Dims"), ("memory", "Bytes")],
)
def test_each_switch_adds_its_field_to_the_trace(tmp_path, switch, field):
    """Oracle: the same loop without the switch, whose trace has no such field."""

    def fields(config: ProfileConfig, folder: Path) -> set[str]:
        take_steps(Profiler(config, Device("cpu"), 0, folder), 1, 3)
        return {
            name for event in read_trace(folder / "rank0.json.gz") for name in event.get("args", {})
        }

    assert field not in fields(window(0, 1, 2), tmp_path / "without")
    assert field in fields(window(0, 1, 2, **{switch: True}), tmp_path / "with")


def test_failed_trace_write_does_not_end_the_run(tmp_path):
    """Oracle: a folder where the file should be."""
    (tmp_path / "rank0.json.gz").mkdir()
    said: list[str] = []
    profiler = Profiler(window(0, 0, 1), Device("cpu"), 0, tmp_path, message=said.append)
    take_steps(profiler, 1, 3)
    assert "cannot be written" in said[0] and summary_of(profiler) is None


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


OP_STATISTIC = """OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)
Add,AI_VECTOR_CORE,4,8.5,2,2.125,2.5,7.8
MatMulV2,AI_CORE,2,100.25,50,50.125,50.25,92.2
"""


def test_npu_trace_uses_the_names_and_keywords_of_torch_npu(tmp_path, monkeypatch):
    """Oracle: keyword-only stand-ins with torch_npu 2.13.0's parameter names; they trace with
    torch's own profiler.

    Not tested: that torch_npu accepts the values and writes the analysis that is read.
    """
    levels: list[str] = []
    waits: list[int] = []

    def experimental_config(*, profiler_level, export_type):
        levels.append(f"{profiler_level} {export_type}")

    def tensorboard_trace_handler(*, dir_name, worker_name, analyse_flag):
        def write(profiler):
            output = Path(dir_name) / f"{worker_name}_1_2_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
            output.mkdir(parents=True)
            (output / "op_statistic.csv").write_text(OP_STATISTIC)

        return write

    def profile(
        *,
        activities,
        schedule,
        on_trace_ready,
        record_shapes,
        profile_memory,
        with_stack,
        experimental_config,
    ):
        assert activities == ["CPU", "NPU"]
        return torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=schedule,
            on_trace_ready=on_trace_ready,
        )

    fake = types.ModuleType("torch_npu")
    fake.profiler = types.SimpleNamespace(
        profile=profile,
        schedule=torch.profiler.schedule,
        tensorboard_trace_handler=tensorboard_trace_handler,
        ProfilerActivity=types.SimpleNamespace(CPU="CPU", NPU="NPU"),
        ProfilerLevel=types.SimpleNamespace(Level0="Level0", Level1="Level1", Level2="Level2"),
        ExportType=types.SimpleNamespace(Text="text"),
        _ExperimentalConfig=experimental_config,
    )
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    device = types.SimpleNamespace(
        type="npu", synchronize=lambda: waits.append(profiler._trace._last_done + 1)
    )
    profiler = Profiler(window(0, 1, 1, npu_level=NPULevel.level2, ranks=[3]), device, 3, tmp_path)
    take_steps(profiler, 1, 3)
    assert waits == [1], "kernels of the step before the window would be in the trace"
    assert levels == ["Level2 text"]
    assert "Rank 3, step 2; trace: `profile/rank3_1_2_ascend_pt`." in summary_of(profiler)
    operators = re.findall(
        r"^\| `(\w+)` \| (\d) \| ([\d.]+ ms) \|", summary_of(profiler), re.MULTILINE
    )
    assert operators == [("MatMulV2", "2", "0.10 ms"), ("Add", "4", "0.01 ms")]


def test_missing_analysis_of_an_npu_trace_is_reported(tmp_path):
    """Oracle: the files of torch_npu 2.13.0 if CANN's profiler records nothing; one message."""
    reported: list[str] = []
    trace = Trace(ProfileConfig(enabled=True), "npu", 0, tmp_path, 1, reported.append)
    left = tmp_path / "rank0_1_2_ascend_pt"
    left.mkdir()
    for name in ("profiler_info_0.json", "profiler_metadata.json"):
        (left / name).write_text("{}")
    trace._last_done = trace._first_traced  # a run that ends in the window
    trace._profiler = types.SimpleNamespace(stop=trace._find_npu_files)
    trace.close(within_step=False)
    assert reported == [
        f"torch_npu's profiler wrote no trace to {left}; its own messages give the reason"
    ]
    assert trace.path is None


@pytest.mark.parametrize("device_type", ["cuda", "npu", "cpu"])
def test_disabled_profiler_is_always_valid(device_type):
    """Oracle: no error for a run of one step on one rank, which is too short for any window."""
    ProfileConfig().validate(world_size=1, device_type=device_type, steps=1)


class Memory:
    """Stand-in for the functions of ``torch.cuda.memory``; records the order of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _record_memory_history(self, *args, **kwargs) -> None:
        bound = inspect.signature(torch.cuda.memory._record_memory_history).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["enabled"]:
            assert (
                bound.arguments["stacks"] == "python"
                and bound.arguments["max_entries"] == MAX_ENTRIES
            )
        self.calls.append("record" if bound.arguments["enabled"] else "stop")

    def _snapshot(self) -> dict:
        inspect.signature(torch.cuda.memory._snapshot).bind()
        self.calls.append("snapshot")
        return make_snapshot()


def record_steps(
    folder: Path, last: int, fail_in: int | None = None, error: str = ""
) -> tuple[list[str], list[str], str | None]:
    """Steps of a run whose window is 2 to 3: the allocator's calls, the messages, and the
    summary."""
    memory, said = Memory(), []
    device = types.SimpleNamespace(
        type="cuda", torch_device=torch.device("cuda", 1), memory_history=memory
    )
    config = ProfileConfig(snapshot=True, snapshot_first_step=2, snapshot_steps=2)
    profiler = Profiler(config, device, 0, folder / "profile", message=said.append)
    with profiler:
        for step in range(1, last + 1):
            memory.calls.append(f"step {step}")
            if step == fail_in:
                raise torch.OutOfMemoryError(error)
            profiler.step(step)
    return memory.calls, said, summary_of(profiler)


def test_history_covers_the_chosen_steps_and_is_written_once(tmp_path):
    """Oracle: the order of calls: emptied before step 2, read after step 3."""
    calls, said, summary = record_steps(tmp_path, 4)
    assert calls == [
        "record",
        "step 1",
        "stop",
        "record",
        "step 2",
        "step 3",
        "snapshot",
        "step 4",
        "stop",
    ]
    folder = tmp_path / "profile"
    names = ["memory-rank0-interactive.html", "memory-rank0.html", "memory-rank0.pickle"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert pickle.loads((folder / "memory-rank0.pickle").read_bytes()) == make_snapshot()
    assert said == [f"memory snapshot (steps 2 to 3): {folder / 'memory-rank0.html'}"]
    assert summary == "Memory of rank 0: [profile/memory-rank0.html](profile/memory-rank0.html)."


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (2, "memory snapshot (steps 2 to 2, where the run ended)"),
        (1, "no memory snapshot: the run ended after step 1, before profile.snapshot_first_step=2"),
    ],
)
def test_early_end_writes_the_history_or_reports_its_absence(tmp_path, last, words):
    """Oracle: the message; the window is 2 to 3."""
    calls, said, _ = record_steps(tmp_path, last)
    assert calls[-1] == "stop" and len(said) == 1 and said[0].startswith(words)
    assert ("snapshot" in calls) == (last == 2)


@pytest.mark.parametrize("step", [1, 4])
def test_out_of_memory_writes_a_snapshot_inside_and_outside_the_window(tmp_path, step):
    """Oracle: the files, and the original error."""
    with pytest.raises(torch.OutOfMemoryError, match="tried"):
        record_steps(tmp_path, 6, fail_in=step, error="tried")
    assert (tmp_path / "profile" / "memory-rank0-out-of-memory.pickle").exists()
    page = (tmp_path / "profile" / "memory-rank0-out-of-memory.html").read_text()
    assert f"out of memory in step {step}" in page


def test_failed_snapshot_write_keeps_the_original_error(tmp_path):
    """Oracle: the error that ends the run."""
    (tmp_path / "profile" / "memory-rank0-out-of-memory.pickle").mkdir(parents=True)
    with pytest.raises(torch.OutOfMemoryError, match="tried"):
        record_steps(tmp_path, 6, fail_in=1, error="tried")


def test_timeline_includes_allocations_older_than_the_history():
    """Oracle: computed by hand; the norm's request was 512 bytes below its block, which the history
    does not record."""
    timeline = read_timeline(make_snapshot(), 1)
    mib = [round(count / MIB, 2) for count in timeline.live_bytes]
    assert mib == [8, 32, 34, 10, 2, 3, 3]
    assert timeline.peak_index == 2 and timeline.out_of_memory == [6]
    holders = [
        (holder.live_bytes // MIB, [frame["name"] for frame in holder.frames])
        for holder in timeline.holders
    ]
    assert holders == [
        (24, ["linear", "cross_entropy_sum", "_train_step"]),
        (8, []),
        (1, ["forward", "_train_step"]),
    ]


class Page(HTMLParser):
    """Collects the resources that a browser would load, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.open_tags: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):  # noqa: D102
        self.loads += [
            value for name, value in attrs if name == "src" or (name == "href" and tag != "a")
        ]
        self.loads += [tag] if tag in ("script", "iframe", "object", "link") else []
        if tag not in ("meta", "img"):
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attrs):  # noqa: D102
        pass  # such a tag has no end to wait for

    def handle_endtag(self, tag):  # noqa: D102
        assert self.open_tags.pop() == tag

    def handle_data(self, data):  # noqa: D102
        self.text += data


def test_page_lists_holders_of_memory_and_loads_no_resources():
    """Oracle: the history made by hand, and PyTorch's own summary of it."""
    source = render_snapshot(
        make_snapshot(), 1, "steps 2 & 3", "memory-rank0.pickle", "memory-rank0-interactive.html"
    )
    page = Page(source)
    assert len(page.loads) == 1 and page.loads[0].startswith("data:image/png;base64,")
    assert page.open_tags == [] and "url(" not in source and "@import" not in source
    assert "steps 2 & 3" in page.text
    assert (
        "34.00 MiB at the peak" in page.text
        and "Reserved by the allocator at the end: 64.00 MiB" in page.text
    )
    rows = re.findall(r"<tr><td>([^<]+)</td><td>([^<]+)</td>.*?<summary>([^<]+)</summary>", source)
    assert rows == [
        ("24.00 MiB", "70.6%", "loss.py:17 cross_entropy_sum"),
        ("8.00 MiB", "23.5%", UNKNOWN),
        ("2.00 MiB", "5.9%", "norm.py:9 forward"),
    ]
    assert "3.00 MiB stream_0 › trainer.py:180:_train_step2.00 MiB norm.py:9:forward" in page.text
    assert torch.cuda._memory_viz.segsum(make_snapshot()) in page.text
    (crosses,) = timeline_picture(read_timeline(make_snapshot(), 1)).series[1:]
    assert crosses.name == "memory ran out" and len(crosses.x) == 1


def test_thinning_of_many_events_keeps_the_peak():
    """Oracle: the height of the one allocation among 50,000 small ones."""
    trace = []
    for index in range(25_000):
        size = 2**30 if index == 12_345 else 512
        trace += [
            {"action": action, "addr": index, "size": size}
            for action in ("alloc", "free_completed")
        ]
    picture = timeline_picture(read_timeline({"segments": [], "device_traces": [trace]}, 0))
    heights = picture.series[0].y
    assert len(heights) < 2100 and max(heights) == 1.0
    assert picture.y.unit == "GiB"


def test_snapshot_reads_the_given_device(tmp_path):
    """Oracle: the page of device 0, which has neither segments nor events in the history."""
    snapshot = Snapshot(Memory(), 0, 2, tmp_path, 1, 1, lambda _: None)
    snapshot.start(1)
    snapshot.step(1)
    assert "Nothing is live." in (tmp_path / "memory-rank2.html").read_text()
