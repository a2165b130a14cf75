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
    ways = [bench_loss.PLAIN, bench_loss.CHECKPOINTED, bench_loss.OURS, bench_loss.OURS_BF16]
    ways += [bench_loss.TORCH] if hasattr(torch.nn.functional, "linear_cross_entropy") else []
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert sorted(rows) == sorted(ways * 2)
    assert text.count("MISSED") == 2 * status


def test_wrong_loss_ends_the_script_before_timing() -> None:
    """Oracle: the check, given a loss that counts one token less."""
    inputs = bench_loss.make_inputs("cpu", (64, 8, 50), torch.float32)
    losses = {"short": lambda hidden_ND, weight_VD, labels_N: cross_entropy_sum(hidden_ND[1:], weight_VD, labels_N[1:])}
    with pytest.raises(SystemExit, match="loss of short is off"):
        bench_loss.check(losses, *inputs)


def test_peak_memory_of_a_known_step() -> None:
    """Oracle: computed by hand; 3 MiB allocated, 1 MiB freed, 1 MiB allocated, and a gradient of 4 MiB at the end."""
    hidden = torch.zeros(2**20, requires_grad=True)

    class Known(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, hidden: torch.Tensor) -> torch.Tensor:
            first, second = torch.ones(2**19), torch.ones(2**18)
            del first
            return second.sum() + torch.ones(2**18)[0]

        @staticmethod
        def backward(ctx: object, *upstream: torch.Tensor) -> torch.Tensor:
            return torch.ones(2**20)

    peak = bench_loss.peak_bytes(lambda hidden, weight, labels: Known.apply(hidden), hidden, hidden, torch.ones(1))
    assert 4 * 2**20 <= peak < 4 * 2**20 + 4096
