"""Benchmarks: measured rows, and targets that can be missed."""

import argparse
import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.device import GIB
from fsdptoys.loss import cross_entropy_sum
from fsdptoys.metrics.prediction import MemoryPrediction, Prediction, TimePrediction
from fsdptoys.utils.dtensor import local_tensor
from scripts.benchmarks import (
    bench_data,
    bench_loss,
    bench_memory,
    bench_plan,
    bench_toys,
    memory_page,
)
from scripts.benchmarks.bench_plan import Compared
from scripts.benchmarks.memory_rows import Result
from scripts.benchmarks.toys_page import Contestant, Measured, ratios
from tests.harness.ranks import run_ranks

DATA = shlex.split(
    "--tokens 64000 --shards 2 --seq-lens 64 --seconds 0.01 --repeats 1 --files 3"
)
DATA += shlex.split("--vocab-size 300 --processes 1 --steps 0")


@pytest.mark.parametrize(("bar", "status"), [(0.0, 0), (1e15, 1)])
def test_page_lists_every_row_and_exit_status_follows_the_target(
    bar, status, tmp_path: Path, monkeypatch
) -> None:
    """Oracle: counts of rows by kind, and bars always or never reached."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(bench_data, "BAR", bar)
    assert bench_data.main([*DATA, "--write", str(tmp_path / "data.md")]) == status
    page = (tmp_path / "data.md").read_text()
    assert (
        page.count("| 64 | ") == 5
        and page.count("| 1 | ") == 2
        and page.count("MISSED") == status
    )


def test_read_rate_is_tokens_over_elapsed_seconds(tmp_path: Path, monkeypatch) -> None:
    """Oracle: a clock that advances one second per read: an interval of 4.5 has 4 batches of 8
    rows, in 5 seconds."""
    folder = bench_data.write_shards(tmp_path / "out", 64_000, 1, wide=True)
    seconds = iter(range(1000))
    monkeypatch.setattr(bench_data.time, "process_time", lambda: next(seconds))
    assert (
        bench_data.read_rate(PreparedConfig(folder=folder), 64, 4.5, 2)
        == 4 * 8 * 64 / 5
    )


LOSS = shlex.split("--shapes 96x16x300 --repeats 1 --threads 1 --chunk-tokens 32")


@pytest.mark.parametrize(
    "time_limit, memory_limit, status", [(1e9, 1e9, 0), (0.0, 1e9, 1), (1e9, 0.0, 1)]
)
def test_script_lists_every_loss_and_exit_status_follows_the_targets(
    time_limit: float,
    memory_limit: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the contestants of its first page, and bars always or never met."""
    monkeypatch.setattr(bench_loss, "TIME_TARGET", time_limit)
    monkeypatch.setattr(bench_loss, "MEMORY_TARGET", memory_limit)
    path = tmp_path / "loss.md"
    assert bench_loss.main([*LOSS, "--write", str(path)]) == status
    text = path.read_text()
    for name in (
        bench_loss.PLAIN,
        bench_loss.CHECKPOINTED,
        bench_loss.OURS,
        bench_loss.OURS_BF16,
    ):
        assert text.count(f"| {name} |") == 2
    assert text.count("MISSED") == 2 * status


def test_wrong_loss_ends_the_script_before_timing() -> None:
    """Oracle: the check, given a loss that counts one token less."""
    inputs = bench_loss.make_inputs("cpu", (64, 8, 50), torch.float32)
    losses = {
        "short": lambda hidden_ND, weight_VD, labels_N: cross_entropy_sum(
            hidden_ND[1:], weight_VD, labels_N[1:]
        )
    }
    with pytest.raises(SystemExit, match="loss of short is off"):
        bench_loss.check(losses, *inputs)


@pytest.mark.extended
def test_rows_run_on_the_cpu_or_give_their_reason(tmp_path: Path) -> None:
    """Oracle: the table of the real command; a CPU cannot run one of its rows."""
    page = tmp_path / "table.md"
    argv = shlex.split(
        "--device=cpu --model=llama_debug --seq-len=32 --steps=3 --warmup-steps=1"
    )
    argv += [
        "--strategies",
        "fsdp1",
        "fsdp2",
        "--rows",
        "gc chunk co",
        "--write",
        str(page),
    ]
    subprocess.run(
        [sys.executable, bench_memory.__file__, *argv], check=True, capture_output=True
    )
    first, second = (
        line.split(" | ")
        for line in page.read_text().splitlines()
        if line.startswith("| fsdp")
    )
    assert first[:2] == ["| fsdp1", "gc chunk co"]
    assert first[2].startswith("not run: memory.cpu_offload=true needs an accelerator")
    assert second[:2] == ["| fsdp2", "gc chunk co"]
    assert float(second[2]) > 0


def test_verdicts_follow_from_ratios_and_published_memory() -> None:
    """Oracle: verdicts by hand."""
    measured = {
        "gc": Result(2.0, 9.72, 15.0, 18.0),
        "gc chunk": Result(2.0, 9.6, 14.0, 17.0),
        "gc chunk oo": Result(2.3, 3.2, 9.0, 13.0),
        "gc chunk co": Result(2.9, 0.05, 5.0, 8.0),
        "gc chunk co overlapped": Result(failure="OutOfMemoryError"),
    }
    verdicts = memory_page.judge(
        {("fsdp2", name): result for name, result in measured.items()}, True
    )
    assert len(verdicts) == 13
    assert [verdict for verdict in verdicts if verdict.startswith("missed")] == [
        "missed: fsdp2 gc chunk co overlapped failed: OutOfMemoryError",
        "missed: fsdp2 gc chunk oo takes 1.15 times as long as gc chunk, bar 1.1",
        "missed: fsdp2 gc chunk: 9.60 GiB allocated at the end, published 9.48",
    ]


ARGS = argparse.Namespace(
    device="cpu", model="llama_debug", world_size=8, seq_len=16, steps=2, warmup_steps=1, cores=1,
    one=("fsdp2", "plain"), write=None, resume=True, seconds=None, row_seconds=60.0,
)  # fmt: skip


def measure_with(value: float) -> Result:
    """A row of parameters that begin with this value."""
    bench_memory.fill = lambda param, name: local_tensor(param).fill_(value)
    return bench_memory.measure(ARGS)


@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_row_fails_if_an_update_was_skipped(value: float) -> None:
    """Oracle: parameters of NaN. Their loss is NaN; fake collectives turn their gradients to
    zeros."""
    result = run_ranks(1, measure_with, value)[0]
    skipped = (
        result.failure == "an update was skipped: a loss or gradient was not finite"
    )
    assert skipped == (value != value) and (result.seconds is None) == skipped


MEASURED = Result(seconds=2.0, end_gib=9.72, peak_gib=15.0, reserved_gib=18.0)


def prediction(seconds: float, end: float, peak: float, reserved: float) -> Prediction:
    """Prediction of one row."""
    memory = MemoryPrediction(
        round(end * GIB), round(peak * GIB), round(reserved * GIB), "backward"
    )
    time = TimePrediction(seconds, seconds, 0.0, 0.0, 0.0)
    return Prediction("traced", "h100", 8, 1, 1.0, None, memory, time)


def test_verdicts_compare_each_prediction_with_its_tolerance() -> None:
    """Oracle: the bars of the page, worked by hand: 0.01 GiB, 2%, 5%, 20% and 8%."""
    near = Compared(
        MEASURED,
        prediction(2.39, 9.725, 15.29, 18.8),
        prediction(2.15, 9.725, 15.29, 18.8),
        True,
    )
    assert [
        verdict.split(":")[0] for verdict in bench_plan.judge({("fsdp2", "gc"): near})
    ] == ["met"] * 5
    far = Compared(
        MEASURED,
        prediction(2.41, 9.74, 15.31, 19.0),
        prediction(2.17, 9.74, 15.31, 19.0),
        True,
    )
    assert [
        verdict.split(":")[0] for verdict in bench_plan.judge({("fsdp2", "gc"): far})
    ] == ["missed"] * 5
    offload = dataclasses.replace(far, on_device=False)
    assert len(bench_plan.judge({("fsdp2", "gc chunk oo"): offload})) == 3


TOYS = shlex.split("--rounds 1 --turns 2 --warmup 1 --dim 128 --layers 2 --heads 2")
TOYS += shlex.split("--vocab-size 4001 --batch-size 1 --seq-len 16")


@pytest.mark.parametrize(
    "target",
    [pytest.param(1e9, marks=pytest.mark.extended), 0.0],
    ids=["met", "missed"],
)
def test_script_lists_every_contestant_and_exit_status_follows_the_targets(
    target: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the contestants of its first page, and targets always or never met; real ranks, equal
    losses."""
    groups = {
        name: [
            dataclasses.replace(contestant, target=contestant.target and target)
            for contestant in group
        ]
        for name, group in bench_toys.GROUPS.items()
    }
    chosen = list(groups) if target else ["ddp"]
    monkeypatch.setattr(bench_toys, "GROUPS", groups)
    assert bench_toys.main([*TOYS, "--only", *chosen]) == (0 if target else 1)
    text = capsys.readouterr().out
    rows = [
        line.split("|")
        for line in text.splitlines()
        if line.startswith("| ") and "×" not in line and "---" not in line
    ]
    assert [row[1].strip() for row in rows] == [
        contestant.name for name in chosen for contestant in groups[name]
    ]
    assert all(
        float(row[2]) > 0 and float(row[6]) > 0 and row[7].strip().endswith("%")
        for row in rows
    )
    assert all(0 < float(row[8]) < float(row[9]) for row in rows), (
        "memory at the end of a step, and its peak"
    )
    judged = [
        contestant.name
        for name in chosen
        for contestant in groups[name]
        if contestant.target is not None
    ]
    assert text.count("- met: ") + text.count("- MISSED: ") == len(judged)
    assert ("MISSED" in text) is not bool(target)


def test_different_loss_ends_the_script() -> None:
    """Oracle: the check itself, given a loss off by a thousandth."""
    group = [Contestant("native", "ddp"), Contestant("toy", "toy_ddp", 1.05)]
    with pytest.raises(SystemExit, match="not the same work: step 2 of toy"):
        bench_toys.check_losses(
            group, [Measured(losses=[2.0, 1.0]), Measured(losses=[2.0, 1.001])]
        )


def test_step_time_is_that_of_the_slower_rank_and_ratios_are_per_turn() -> None:
    """Oracle: computed by hand; two ranks, two turns."""
    ranks = [
        [
            Measured([1.0, 4.0], [1.0, 1.0], [3.0, 2.0]),
            Measured([2.0, 2.0], [1.0, 2.0], [3.0, 2.0]),
        ],
        [
            Measured([2.0, 1.0], [3.0, 3.0], [5.0, 2.0]),
            Measured([1.0, 6.0], [1.0, 4.0], [5.0, 2.0]),
        ],
    ]
    native, toy = bench_toys.over_ranks(ranks)
    assert (native.seconds, toy.seconds) == ([2.0, 4.0], [2.0, 6.0])
    assert native.cpu_seconds == [4.0, 4.0] and native.losses == [4.0, 2.0]
    assert ratios(toy, native) == [1.0, 1.5]
