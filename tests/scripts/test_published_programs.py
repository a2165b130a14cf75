"""The programs behind published tables: real training, and the final memory of their traces."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from scripts import published_llama2
from scripts.published_programs import ROWS, first_program
from scripts.ranks import run_ranks
from scripts.validate_plan import a2, trace_row
from tests.plan.processes import in_fresh_process

TINY = {"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 64, "vocab_size": 96, "seq_len": 16}
CPU = torch.device("cpu")
newer_torch = pytest.mark.skipif(
    tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 9),
    reason="older FSDP2 averages over two axes by NCCL alone, and older fused AdamW knows no planned device",
)


class Unmarked:
    """Records nothing."""

    def mark(self, step: int, phase: str) -> None:
        """Ignore."""


def fill(values: Tensor) -> None:
    """Fill a tensor with values that depend on its size only, not on its sharding."""
    generator = torch.Generator().manual_seed(values.numel())
    with torch.no_grad():
        values.copy_(torch.randn(values.shape, generator=generator) * 0.05)


def losses_of_rows(strategy: str, names: Sequence[str]) -> dict[str, list[float]]:
    sizes = published_llama2.Sizes(**TINY, positions=32, chunk_tokens=8)
    return {
        name: first_program(switches, Unmarked(), CPU, sizes, 3, fill)
        for (owner, name), (switches, _) in ROWS.items()
        # FSDP1 offloads to the CPU from an accelerator only.
        if owner == strategy and name in names and not (strategy == "fsdp1" and switches.cpu_offload)
    }


@pytest.mark.extended
@newer_torch
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_all_published_rows_have_equal_losses(strategy: str) -> None:
    """Oracle: FSDP2's plainest row, on one rank; the first README promised that FSDP1 and FSDP2 agree."""
    expected = run_ranks(1, losses_of_rows, "fsdp2", ["block"])[0]["block"]
    assert expected[0] > expected[1] > expected[2]
    rows = run_ranks(2, losses_of_rows, strategy, [name for _, name in ROWS])
    assert rows[0] == rows[1] and len(rows[0]) > 5
    for losses in rows[0].values():
        assert losses == pytest.approx(expected, abs=2e-5)


@pytest.mark.extended
@newer_torch
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("name", ["block", "block gc chunk oo", "block gc chunk co", "parts gc"])
def test_traced_row_ends_with_parameters_states_and_outputs(strategy: str, name: str) -> None:
    """Oracle: parameters and states over 8 ranks, the rotary table, hidden states and logits, by hand."""
    switches = ROWS[strategy, name][0]
    trace = in_fresh_process(trace_row, f"{strategy} {name}", 2)
    end_bytes = replay(trace, a2(), build_allocator(AllocatorKind.expandable)).memory().end_bytes
    block, rest = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 2 * 32000 * 4096 + 4096
    resident = 0 if switches.cpu_offload else 4 if switches.optimizer_offload else 12
    expected = resident * (2 * block + rest) // 8
    expected += 65536 * 128 * 4 + 2 * 4096 * 4096 + 2 * 4096 * 32000 * (not switches.chunk_loss)
    # Also tokens, labels, the loss, and the optimizer's step counts.
    assert 0 <= end_bytes - expected < 2**20
