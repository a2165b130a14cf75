"""Expert parallelism: spread experts, compared with one process that has all of them.

``test_pages.py`` and ``tests/parallel/test_expert_parallelism.py`` train with them.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.toys.ep import Experts, plan_routes
from tests.harness.ranks import run_ranks
from tests.toys.part_runs import DTYPES, TOLERANCES, relative

TOKENS = 12
DIM = 8
HIDDEN = 6
EXPERTS = 8
TOP_K = 2


class OneProcess(nn.Module):
    """All experts applied to all tokens, one by one, without sorting; the names of parameters are
    those of the toy."""

    def __init__(self, gate_up_EHD: Tensor, down_EDF: Tensor) -> None:
        super().__init__()
        self.gate_up_LHD = nn.Parameter(gate_up_EHD.clone())
        self.down_LDF = nn.Parameter(down_EDF.clone())

    def forward(
        self, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor
    ) -> Tensor:
        """Weighted sum over all experts, with weight 0 for those that are not chosen."""
        out = torch.zeros_like(hidden_ND)
        for expert in range(EXPERTS):
            gate, up = (hidden_ND @ self.gate_up_LHD[expert].T).chunk(2, dim=-1)
            weight_N = (weights_NK * (experts_NK == expert)).sum(1)
            out = out + weight_N[:, None] * (
                (F.silu(gate) * up) @ self.down_LDF[expert].T
            )
        return out


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate, up and down of all experts."""
    torch.manual_seed(0)
    gate_up_EHD = torch.randn(EXPERTS, 2 * HIDDEN, DIM, dtype=dtype) / DIM**0.5
    return gate_up_EHD, torch.randn(EXPERTS, DIM, HIDDEN, dtype=dtype) / HIDDEN**0.5


def choose(routing: str, ranks: int) -> Tensor:
    """Experts of the tokens of all ranks, (ranks * TOKENS, TOP_K)."""
    if routing == "random":
        scores = torch.rand(
            ranks * TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)
        )
        return scores.topk(TOP_K, dim=1).indices
    first = 0 if routing == "first rank's" else EXPERTS - TOP_K
    return torch.arange(first, first + TOP_K).expand(ranks * TOKENS, TOP_K)


def layer_errors(routing: str, dtype: torch.dtype) -> tuple[float, int]:
    """Largest error of the result and all gradients of this rank, and the number of rows that it
    received."""
    group: Any = dist.group.WORLD
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    stacks = matrices(dtype)
    hidden, grad = torch.randn(2, ranks * TOKENS, DIM, dtype=dtype)
    weights = torch.rand(ranks * TOKENS, TOP_K, dtype=dtype)
    chosen = choose(routing, ranks)
    rows = slice(rank * TOKENS, (rank + 1) * TOKENS)
    records: list[Any] = []
    for layer, own in (
        (OneProcess(*stacks), slice(None)),
        (Experts(*stacks, group), rows),
    ):
        inputs = [tensor[own].clone().requires_grad_() for tensor in (hidden, weights)]
        out = layer(inputs[0], chosen[own], inputs[1])
        out.backward(grad[own])
        records.append((layer, [out, *(tensor.grad for tensor in inputs)]))
    (whole, expected), (spread, results) = records
    errors = [
        relative(result, all_rows[rows])
        for result, all_rows in zip(results, expected, strict=True)
    ]
    for name, param in spread.named_parameters():
        own_experts = getattr(whole, name).grad.chunk(ranks)[rank]
        if own_experts.any():
            errors.append(relative(param.grad, own_experts))
        else:
            assert torch.equal(param.grad, own_experts)
    return max(errors), sum(plan_routes(chosen[rows], EXPERTS // ranks, group).received)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize("routing", ["random", "first rank's", "last rank's"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_spread_experts_equal_all_experts_on_one_process(
    dtype: torch.dtype, routing: str, ranks: int
) -> None:
    """Oracle: every expert on every token, results and gradients; experts without tokens have zero
    gradients."""
    errors, received = zip(*run_ranks(ranks, layer_errors, routing, dtype), strict=True)
    assert max(errors) < TOLERANCES[dtype]
    assert sum(received) == ranks * TOKENS * TOP_K
    if routing == "first rank's":
        assert received[0] == sum(received)
