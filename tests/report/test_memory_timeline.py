"""The memory timeline: lifetimes of blocks in real traces and in snapshots."""

import gc
import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdptoys.errors import ConfigError
from fsdptoys.profiler.memory_snapshot_page import read_timeline as read_events
from fsdptoys.report.memory_timeline import (
    Lifetime,
    Timeline,
    lifetime,
    phase_of_stack,
    read_snapshot,
    read_timeline,
    read_trace,
)
from tests.harness.ranks import run_ranks
from tests.harness.snapshots import make_snapshot

ROWS = 64
WIDTH = 256


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, list[int], int]:
    """Two real steps: the timeline, the profiler's own counter, and the bytes of all parameters.

    In a fork: the profiler would also record memory that other tests hold or free.
    """
    folder = tmp_path_factory.mktemp("profile")
    (parameter_bytes,) = run_ranks(1, trace_steps, folder)
    trace = json.loads(gzip.decompress((folder / "rank0.json.gz").read_bytes()))
    events = [e for e in trace["traceEvents"] if e.get("name") == "[memory]"]
    events.sort(key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    timeline = read_timeline(folder, "cpu")
    assert timeline is not None
    return timeline, [e["args"]["Total Allocated"] for e in events], parameter_bytes


def trace_steps(folder: Path) -> int:
    """Write the trace of two real steps; return the bytes of all parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(16, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, 16),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(ROWS) % 16
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for step in (1, 2):
            with record_function(f"ProfilerStep#{step}"):
                torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    plain = folder / "rank0.json"
    profiler.export_chrome_trace(str(plain))
    (folder / "rank0.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return sum(parameter.nbytes for parameter in model.parameters())


def test_lifetimes_of_a_real_trace(traced: tuple[Timeline, list[int], int]) -> None:
    """Oracle: the profiler's own counter, at its highest and at its last event; every parameter has
    one gradient of its size; and the outputs of ROWS x WIDTH floats of the embedding, the first
    layer and GELU must be kept for the backward."""
    timeline, counter, parameter_bytes = traced
    assert timeline.total.max() == max(counter)
    assert timeline.total[-1] == counter[-1]
    assert timeline.layers[Lifetime.gradients].max() == pytest.approx(
        parameter_bytes, rel=0.02
    )
    assert len(timeline.backwards) == 2
    assert not timeline.knows_before
    peak = timeline.layers[Lifetime.activations].max()
    assert 3 * ROWS * WIDTH * 4 <= peak <= 4 * ROWS * WIDTH * 4


def test_snapshot_peak_equals_that_of_its_own_page(tmp_path: Path) -> None:
    """Oracle: the profiler's walk over the same history, back from its end; a block is 512 bytes
    short there."""
    (tmp_path / "memory-rank0.pickle").write_bytes(pickle.dumps(make_snapshot()))
    timeline = read_timeline(tmp_path, "cuda")
    events = read_events(make_snapshot(), 1)
    assert timeline is not None
    assert timeline.total.max() == pytest.approx(max(events.live_bytes), abs=512)
    assert timeline.total[-1] == pytest.approx(events.live_bytes[-1], abs=512)
    assert timeline.knows_before


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0.5, 0.6, Lifetime.temporary),
        (0.5, 1.5, Lifetime.activations),
        (1.5, 2.5, Lifetime.gradients),
        (1.5, np.inf, Lifetime.gradients),
        (2.5, np.inf, Lifetime.persistent),
        (0.5, 2.5, Lifetime.other),
        (-np.inf, 1.0, Lifetime.before),
    ],
)
def test_block_is_classified_by_the_phases_of_its_begin_and_end(
    begin: float, end: float, expected: Lifetime
) -> None:
    """Oracle: the definitions of the lifetimes."""
    phases = [(0.0, "forward"), (1.0, "backward"), (2.0, "update")]
    assert lifetime(begin, end, phases) is expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["fsdptoys/train/trainer.py train_step"], "forward"),
        (
            [
                "fsdptoys/memory/optimizer_stepper.py step",
                "fsdptoys/train/trainer.py train_step",
            ],
            "update",
        ),
        (
            [
                "torch/autograd/graph.py _engine_run_backward",
                "fsdptoys/train/trainer.py train_step",
            ],
            "backward",
        ),
        ([], "backward"),
    ],
)
def test_stack_identifies_the_phase(names: list[str], expected: str) -> None:
    """Oracle: the trainer's own functions; autograd's thread has no Python below it."""
    calls = [name.split() for name in names]
    assert (
        phase_of_stack(
            [
                {"filename": f"/src/{file}", "name": name, "line": 1}
                for file, name in calls
            ]
        )
        == expected
    )


class Touch:
    """Runs a command when it is unpickled by an ordinary unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """Oracle: the folder that the code would make does not exist."""
    path = tmp_path / "memory-rank0.pickle"
    path.write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    with pytest.raises(ConfigError, match=r"asks for (posix|nt)\.mkdir"):
        read_snapshot(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b'{"traceEvents": [{"name": "[memory]"}]}', mtime=0),
    ],
)
def test_unreadable_trace_is_reported_in_one_sentence(
    tmp_path: Path, content: bytes
) -> None:
    """Oracle: the message names the file and a fix."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"rank0\.json\.gz cannot be read .*profile\.memory=true"
    ):
        read_trace(path, "cpu")


def test_trace_without_memory_has_no_timeline(tmp_path: Path) -> None:
    """Oracle: profile.memory=false leaves no event of memory; other events may hold numbers beyond
    JSON."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(
        gzip.compress(
            b'{"traceEvents": [{"name": "mul", "args": {"Concrete Inputs": [NaN, Infinity]}}]}'
        )
    )
    assert read_trace(path, "cpu") is None
