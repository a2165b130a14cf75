"""The loss benchmark: measured rows, and missed targets."""

from pathlib import Path

import pytest
import torch

from fsdptoys.loss import cross_entropy_sum
from scripts import bench_loss

TINY = ["--shapes", "96x16x300", "--repeats", "1", "--threads", "1", "--chunk-tokens", "32"]


@pytest.mark.parametrize("time_limit, memory_limit, status", [(1e9, 1e9, 0), (0.0, 1e9, 1), (1e9, 0.0, 1)])
def test_script_lists_every_loss_and_exit_status_follows_the_targets(
    time_limit: float, memory_limit: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the contestants of its first page, and bars always or never met."""
    monkeypatch.setattr(bench_loss, "TIME_TARGET", time_limit)
    monkeypatch.setattr(bench_loss, "MEMORY_TARGET", memory_limit)
    path = tmp_path / "loss.md"
    assert bench_loss.main([*TINY, "--write", str(path)]) == status
    text = path.read_text()
    for name in (bench_loss.PLAIN, bench_loss.CHECKPOINTED, bench_loss.OURS, bench_loss.OURS_BF16):
        assert text.count(f"│ {name} ") == 2
    assert text.count("MISSED") == 2 * status


def test_wrong_loss_ends_the_script_before_timing() -> None:
    """Oracle: the check, given a loss that counts one token less."""
    inputs = bench_loss.make_inputs("cpu", (64, 8, 50), torch.float32)
    losses = {"short": lambda hidden_ND, weight_VD, labels_N: cross_entropy_sum(hidden_ND[1:], weight_VD, labels_N[1:])}
    with pytest.raises(SystemExit, match="loss of short is off"):
        bench_loss.check(losses, *inputs)


def test_peak_memory_of_a_known_step() -> None:
    """Oracle: by hand: 6 MiB for a moment, then the gradient of 4 MiB."""

    def step(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        torch.ones(3 * 2**19)
        return hidden.expand(1).sum()

    peak = bench_loss.peak_bytes(step, torch.zeros(1, requires_grad=True), torch.ones(1), torch.ones(1))
    assert 6 * 2**20 <= peak < 6 * 2**20 + 4096
