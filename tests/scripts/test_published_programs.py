"""The programs behind published tables: real training, and the final memory of their traces."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from scripts import published_llama2, published_torchtitan
from scripts.finding import Finding
from scripts.published_programs import ROWS, Switches, first_program
from scripts.published_torchtitan import torchtitan_program
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
    """Takes the place of a recorder where nothing is recorded."""

    def mark(self, step: int, phase: str) -> None:
        """Forget it."""


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


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (lambda: published_llama2.Llama2(published_llama2.Sizes(), False), 6_738_415_616),
        (lambda: published_torchtitan.Llama3(published_torchtitan.Sizes()), 8_030_261_248),
    ],
    ids=["llama2_7b", "llama3_8b"],
)
def test_models_have_the_published_parameter_count(model: Any, parameters: int) -> None:
    """Oracle: the published counts."""
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model().parameters()) == parameters


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


class ProductCount(TorchDispatchMode):
    """Counts matmuls."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then call the operator."""
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def torchtitan_products() -> int:
    with ProductCount() as count:
        torchtitan_program(Unmarked(), CPU, published_torchtitan.Sizes(**TINY, n_kv_heads=2), 1, fill)
    return count.products


def test_selective_checkpointing_recomputes_every_other_matmul() -> None:
    """Oracle: 7 matmuls per block, of which the second, fourth and sixth are recomputed, and one in the head."""
    blocks = TINY["n_layers"]
    assert run_ranks(1, torchtitan_products) == [3 * (7 * blocks + 1) + 3 * blocks]


def gathers(stock_order: bool) -> int:
    sizes = published_llama2.Sizes(**TINY | {"n_layers": 4}, positions=32, chunk_tokens=8)
    switches = Switches("fsdp2", parts=True, checkpointing=True, stock_order=stock_order)
    original = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", side_effect=original) as counted:
        first_program(switches, Unmarked(), CPU, sizes, 1, fill)
    return counted.call_count


@pytest.mark.extended
@newer_torch
def test_stock_prefetch_order_gathers_more_often() -> None:
    """Oracle: each of 3 units a block once in the forward and once in the backward, and the root once."""
    assert run_ranks(2, gathers, False)[0] == 2 * 3 * 4 + 1
    assert run_ranks(2, gathers, True)[0] > 2 * 3 * 4 + 1


@pytest.mark.parametrize(
    ("predicted", "relative", "met"),
    [(10.39, True, True), (10.41, True, False), (9.59, True, False), (10.054, False, True), (10.056, False, False)],
)
def test_tolerance_applies_in_both_directions(predicted: float, relative: bool, met: bool) -> None:
    """Oracle: 4 % of 10, or 0.05 and the rounding of two digits."""
    assert Finding("row", "GiB", 10.0, predicted, 0.04 if relative else 0.05, relative).met is met
