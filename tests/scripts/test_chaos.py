"""Real runs that are killed and stopped: the chaos script, and the signals that it does not
send."""

import json
import os
import signal
from pathlib import Path

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.chaos import count_wrong
from scripts.chaos_runs import Attempt, Campaign, overrides_of, read_resumes
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks

STEPS = 64  # enough that the run still trains when the signal arrives
CAMPAIGN = Campaign(2, ("parallel=fsdp2", "checkpoint.async_save=true"), restarts=True)


def wait_for_step(attempt: Attempt, step: int) -> list[int]:
    """Wait for a step of a running attempt; return the ranks' processes."""
    pids: list[int] = []

    def reached() -> bool:
        nonlocal pids
        assert not attempt.ended
        # Read while waiting: a heartbeat under rewrite has no process id, and the end of the run
        # removes all.
        pids = pids if len(pids) == CAMPAIGN.ranks else attempt.rank_pids()
        return len(pids) == CAMPAIGN.ranks and attempt.last_step() >= step

    wait_until(reached, f"step {step}", [attempt.process.pid])
    return pids


@pytest.mark.extended
@pytest.mark.launcher
@pytest.mark.usefixtures("warm")
def test_run_stopped_by_signals_resumes_to_identical_results(tmp_path: Path) -> None:
    """Oracle: the undisturbed run, bitwise in steps and final weights; status 0 at each stop."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    config = compose_config(overrides_of(CAMPAIGN, whole, STEPS))
    config.validate(CAMPAIGN.ranks, "cpu")
    run_ranks(CAMPAIGN.ranks, lambda: Run(Trainer(config)).run())
    for number, of_launcher, step in (
        (signal.SIGTERM, False, 4),
        (signal.SIGUSR1, True, 8),
    ):
        attempt = Attempt(CAMPAIGN, stopped, STEPS, tmp_path / "log", resume=True)
        pids = wait_for_step(attempt, step)
        os.kill(attempt.process.pid if of_launcher else pids[1], number)
        assert attempt.wait() == 0, (tmp_path / "log").read_text()
        assert attempt.whole() == attempt.last_step() < STEPS
        assert f"{number.name} received" in (stopped / "summary.md").read_text()
    assert Attempt(CAMPAIGN, stopped, STEPS, tmp_path / "log", resume=True).wait() == 0
    assert len(read_resumes(stopped)) == 2
    assert count_wrong(whole, stopped, STEPS) == 0


def write_run(folder: Path, losses: list[float], resumes: str, weights: bytes) -> Path:
    (folder / "weights").mkdir(parents=True)
    steps = (
        {"step": step, "loss": loss, "grad_norm": 1.0}
        for step, loss in enumerate(losses, 1)
    )
    rest = {"learning_rate": 0.1, "valid_tokens": 4, "skipped": False}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(step | rest) + "\n" for step in steps)
    )
    (folder / "resumes.jsonl").write_text(resumes)
    (folder / "weights" / "weights.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(
    ("losses", "weights", "wrong"),
    [
        ([5.0, 4.0, 3.0], b"same", 0),
        ([5.0, 4.0, 3.0000000000000004], b"same", 1),
        ([5.0, 4.0], b"same", 1),
        ([5.0, 4.0, 3.0], b"other", 1),
    ],
    ids=["same", "bit", "missing", "weights"],
)
def test_comparison_detects_wrong_losses_steps_and_weights(
    losses: list[float], weights: bytes, wrong: int, tmp_path: Path
) -> None:
    """Oracle: runs that differ in one of them."""
    whole = write_run(tmp_path / "whole", [5.0, 4.0, 3.0], "", b"same")
    assert (
        count_wrong(
            whole, write_run(tmp_path / "resumed", losses, '{"step": 2}\n', weights), 3
        )
        == wrong
    )
