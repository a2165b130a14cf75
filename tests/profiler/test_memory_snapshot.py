"""Memory snapshots: the history that is recorded, and the page of what is live.

There is no accelerator here, so the allocator's two functions are stand-ins that check every call
by the signatures of PyTorch's own; the history is made by hand, and PyTorch's own visualizer runs
on it.
"""

import html
import inspect
import pickle
import re
import types
from pathlib import Path

import pytest
import torch

from fsdptoys.profiler import ProfileConfig, Profiler
from fsdptoys.profiler.memory_snapshot import MAX_ENTRIES, Snapshot
from fsdptoys.profiler.memory_snapshot_page import (
    UNKNOWN,
    read_timeline,
    render_snapshot,
    timeline_picture,
)
from tests.harness.snapshots import MIB, make_snapshot, summary_of


class Memory:
    """Stand-in for the functions of ``torch.cuda.memory``; records the order of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _record_memory_history(self, *args, **kwargs) -> None:
        bound = inspect.signature(torch.cuda.memory._record_memory_history).bind(
            *args, **kwargs
        )
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
    """Steps of a run with a window of 2 to 3: the allocator's calls, the messages, and the
    summary."""
    memory = Memory()
    messages = []
    device = types.SimpleNamespace(
        type="cuda", torch_device=torch.device("cuda", 1), memory_history=memory
    )
    config = ProfileConfig(snapshot=True, snapshot_first_step=2, snapshot_steps=2)
    profiler = Profiler(config, device, 0, folder / "profile", message=messages.append)
    with profiler:
        for step in range(1, last + 1):
            memory.calls.append(f"step {step}")
            if step == fail_in:
                raise torch.OutOfMemoryError(error)
            profiler.step(step)
    return memory.calls, messages, summary_of(profiler)


def test_history_covers_the_chosen_steps_and_is_written_once(tmp_path):
    """Oracle: the order of calls: emptied before step 2, read after step 3."""
    calls, messages, summary = record_steps(tmp_path, 4)
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
    names = [
        "memory-rank0-interactive.html",
        "memory-rank0.html",
        "memory-rank0.pickle",
    ]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (
        pickle.loads((folder / "memory-rank0.pickle").read_bytes()) == make_snapshot()
    )
    assert messages == [
        f"memory snapshot (steps 2 to 3): {folder / 'memory-rank0.html'}"
    ]
    assert (
        summary
        == "Memory of rank 0: [profile/memory-rank0.html](profile/memory-rank0.html)."
    )


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (2, "memory snapshot (steps 2 to 2, where the run ended)"),
        (
            1,
            "no memory snapshot: the run ended after step 1, before profile.snapshot_first_step=2",
        ),
    ],
)
def test_early_end_writes_the_history_or_reports_its_absence(tmp_path, last, sentence):
    """Oracle: the message; the window is 2 to 3."""
    calls, messages, _ = record_steps(tmp_path, last)
    assert (
        calls[-1] == "stop" and len(messages) == 1 and messages[0].startswith(sentence)
    )
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


def test_page_lists_holders_of_memory_and_loads_no_resources():
    """Oracle: the history made by hand, and PyTorch's own summary of it."""
    source = render_snapshot(
        make_snapshot(),
        1,
        "steps 2 & 3",
        "memory-rank0.pickle",
        "memory-rank0-interactive.html",
    )
    (image,) = re.findall(r'src="([^"]+)"', source)
    assert image.startswith("data:image/png;base64,")
    assert not re.findall(r"<(?:script|iframe|object|link)|url\(|@import", source)
    text = html.unescape(re.sub("<[^>]+>", "", source))
    assert "steps 2 & 3" in text
    assert "34.00 MiB at the peak" in text
    assert "Reserved by the allocator at the end: 64.00 MiB" in text
    rows = re.findall(
        r"<tr><td>([^<]+)</td><td>([^<]+)</td>.*?<summary>([^<]+)</summary>", source
    )
    assert rows == [
        ("24.00 MiB", "70.6%", "loss.py:17 cross_entropy_sum"),
        ("8.00 MiB", "23.5%", UNKNOWN),
        ("2.00 MiB", "5.9%", "norm.py:9 forward"),
    ]
    assert (
        "3.00 MiB stream_0 › trainer.py:180:_train_step2.00 MiB norm.py:9:forward"
        in text
    )
    assert torch.cuda._memory_viz.segsum(make_snapshot()) in text
    (crosses,) = timeline_picture(read_timeline(make_snapshot(), 1)).series[1:]
    assert crosses.name == "memory ran out" and len(crosses.x) == 1


def test_snapshot_reads_the_given_device(tmp_path):
    """Oracle: the page of device 0, which has neither segments nor events in the history."""
    snapshot = Snapshot(Memory(), 0, 2, tmp_path, 1, 1, lambda _: None)
    snapshot.start(1)
    snapshot.step(1)
    assert "Nothing is live." in (tmp_path / "memory-rank2.html").read_text()
