"""The benchmark of peers: measurements, equal work, and targets that can be missed."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.models import LlamaConfig
from scripts.benchmarks import bench_peers
from scripts.benchmarks.bench_peers import (
    ACCELERATE,
    CONTESTANTS,
    FABRIC,
    OURS_DDP,
    OURS_FSDP2,
    PLAIN,
    Bench,
)
from scripts.benchmarks.peers.measure import Measured, Run, take_turns
from scripts.benchmarks.peers.work import Work
from scripts.benchmarks.peers_inputs import write_batches, write_inputs
from scripts.benchmarks.peers_targets import judge
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks

MIB = 2**20


def run_of(startup: float, step: float, peak_mib: int, loss: float = 2.0) -> Measured:
    """Measurements of a run of three steps; CPU seconds are twice the wall's."""
    seconds = [startup, step, step]
    return Measured(
        seconds, [loss] * 3, [2 * value for value in seconds], peak_mib * MIB
    )


RUNS = {
    ACCELERATE: run_of(10.0, 2.3, 900),
    FABRIC: run_of(11.0, 2.4, 900),
    PLAIN: run_of(9.0, 2.0, 800),
    OURS_DDP: run_of(9.0, 2.0, 900),
    OURS_FSDP2: run_of(8.0, 2.0, 800),
}
"""Runs that meet every target."""


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        (
            {OURS_DDP: run_of(9.0, 2.1, 900)},
            ["has 1.10 of the tokens/s of (a)", "has 1.14 of the tokens/s of (b)"],
        ),
        ({OURS_FSDP2: run_of(8.0, 2.1, 800)}, ["has 0.95 of the tokens/s of (c)"]),
        ({OURS_FSDP2: run_of(8.0, 2.0, 840)}, ["takes 1.05 of the memory of (c)"]),
        (
            {OURS_DDP: run_of(9.5, 2.0, 900)},
            ["is through its first step after 9.5 s, the fastest peer 9.0 s"],
        ),
        ({ACCELERATE: run_of(10.0, 2.3, 900, loss=2.01)}, ["not the same work"] * 4),
        (
            {PLAIN: Measured(failure="status 1 after 0 of 3 steps")},
            ["failed: status 1"] * 2,
        ),
    ],
)
def test_verdicts_cover_speed_memory_startup_and_first_loss(
    changes: dict[str, Measured], missed: list[str]
) -> None:
    """Oracle: verdicts by hand."""
    results = {name: [run, run] for name, run in {**RUNS, **changes}.items()}
    peers = [ACCELERATE, FABRIC, PLAIN]
    verdicts = judge(results, bench_peers.PAIRS, warmup=1, peers=peers)
    missed_lines = [line for line in verdicts if line.startswith("missed")]
    assert len(missed_lines) == len(missed)
    assert all(text in line for text, line in zip(missed, missed_lines, strict=True))


def test_tables_show_speeds_and_ratios_within_a_round(tmp_path: Path) -> None:
    """Oracle: 2 ranks × 2 × 8 tokens in 2 seconds are 16 a second."""
    work = Work(str(tmp_path), "", 2, 2, 8, 3, "float32", "cpu")
    page = bench_peers.render(
        {name: [run, run] for name, run in RUNS.items()}, work, warmup=1
    )
    rows = [line for line in page.splitlines() if line.startswith(f"| {OURS_DDP}")]
    assert rows[0] == f"| {OURS_DDP} | 16 | 1.15 | 1.20 |  | 4.00 | 900 | 9.0 |"
    assert rows[1] == f"| {OURS_DDP} | 2.00000 | 2.00000 | 2.00000 |"


LAUNCHED = """
import signal, time
continued = []
signal.signal(signal.SIGCONT, lambda *_: continued.append(1))
x = bytearray(64 * 2**20)
time.sleep(0.4)
print("note a word", flush=True)
del x
print("step 1/2  loss 2.5", flush=True)
while not continued:
    time.sleep(0.01)
time.sleep(0.4)
print("step 2/2  loss 2.25")
"""
"""Stopped after its first step, it waits until it is continued."""


def test_run_is_measured_from_its_launcher_process(tmp_path: Path) -> None:
    """Oracle: the process below the launcher: 64 MiB for a moment, two lines, a note."""
    launcher = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        f"{LAUNCHED!r}], check=True)"
    )
    run = Run(
        [sys.executable, "-c", launcher],
        os.environ,
        tmp_path,
        steps=2,
        limit_seconds=300,
    )
    take_turns([run])
    result = run.result
    assert result.failure is None
    assert (result.losses, result.note) == ([2.5, 2.25], "a word")
    assert result.startup_seconds >= 0.4
    assert result.step_seconds(warmup=1) >= 0.4
    assert 64 * MIB <= result.peak_bytes < 160 * MIB


@pytest.mark.parametrize(
    ("code", "limit", "failure"),
    [
        (
            "print('no such folder'); raise SystemExit(3)",
            300,
            "status 3 after 0 of 2 steps\nno such folder\n",
        ),
        (
            "import time; time.sleep(600)",
            0.2,
            "status -9 after 0 of 2 steps\nkilled after 0.2 s",
        ),
    ],
)
def test_failed_run_reports_its_output_and_hanging_run_is_killed(
    code: str, limit: float, failure: str, tmp_path: Path
) -> None:
    """Oracle: the process's own output and status."""
    run = Run([sys.executable, "-c", code], os.environ, tmp_path, 2, limit)
    take_turns([run])
    assert run.result.failure == failure


def train_ours(overrides: list[str]) -> list[float]:
    """Losses of the run of a command line."""
    config = compose_config(overrides)
    config.validate(2, "cpu")
    (outcome,) = train_all([config])
    return outcome.losses


def train_plain(work: Work) -> list[float]:
    """Losses of the plain script."""
    sys.path.insert(0, str(bench_peers.PEERS))
    import plain_fully_shard

    return plain_fully_shard.train(work)


@pytest.mark.extended
@pytest.mark.oracle
def test_fsdp2_losses_equal_those_of_the_plain_script(tmp_path: Path) -> None:
    """Oracle: transformers' Llama under ``fully_shard``, three steps with clipping and AdamW, on
    two ranks."""
    sizes = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "ffn_dim": 88,
        "vocab_size": 64,
    }
    model = LlamaConfig(name="peers", max_seq_len=64, **sizes)
    write_inputs(tmp_path, model)
    work = Work(
        str(tmp_path / "weights"),
        str(tmp_path / "batches.bin"),
        2,
        2,
        16,
        3,
        "float32",
        "cpu",
    )
    write_batches(tmp_path, work, model.vocab_size)
    (contestant,) = (row for row in CONTESTANTS if row.name == OURS_FSDP2)
    overrides = [
        *Bench(work, model, tmp_path, Path("bin")).overrides(),
        *contestant.overrides,
        "metrics.console=none",
    ]
    losses = run_ranks(2, train_ours, overrides)[0]
    expected = run_ranks(2, train_plain, work)[0]
    assert losses[0] != losses[2]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
