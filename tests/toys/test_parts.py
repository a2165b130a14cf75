"""Attention over slices of sequences, compared with whole ones; and parts of either toy that do not
divide evenly.

``test_pages.py`` and ``tests/parallel/test_context.py`` train with it.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.toys.cp import (
    RingAttention,
    own_positions,
    seen_parts,
    ulysses_attention,
)
from fsdptoys.toys.ep import Experts, make_groups
from tests.harness.ranks import run_ranks
from tests.toys.part_runs import TOLERANCES, relative

KINDS = ("ulysses", "ring", "unbalanced_ring")
BATCH = 2
LENGTH = 24


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's, over whole sequences."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attention_errors(kind: str, dtype: torch.dtype, kv_heads: int) -> float:
    """Largest error of this rank's part of the result and of the gradients of q, k and v."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    whole = [
        torch.randn(BATCH, heads, LENGTH, 8, dtype=torch.float64)
        for heads in (4, kv_heads, kv_heads, 4)
    ]
    leaves = [
        tensor.to(dtype).double().clone().requires_grad_() for tensor in whole[:3]
    ]
    expected = causal_attention(*leaves)
    expected.backward(whole[3].to(dtype).double())
    own = own_positions(LENGTH, ranks, rank, kind == "ring")
    parts = [
        tensor.to(dtype)[:, :, own].contiguous().requires_grad_()
        for tensor in whole[:3]
    ]
    group: Any = dist.group.WORLD
    if kind == "ulysses":
        result = ulysses_attention(*parts, group)
    else:
        result = RingAttention.apply(*parts, group, kind == "ring")
    result.backward(whole[3].to(dtype)[:, :, own])
    pairs = [
        (result, expected),
        *((part.grad, leaf.grad) for part, leaf in zip(parts, leaves, strict=True)),
    ]
    assert all(one.dtype == dtype for one, _ in pairs)
    return max(relative(one.double(), other[:, :, own]) for one, other in pairs)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_over_slices_equals_attention_over_whole_sequences(
    kv_heads: int, kind: str, ranks: int
) -> None:
    """Oracle: PyTorch's attention in float64, result and gradients, with own, shared and single key
    heads."""
    for errors in run_ranks(
        ranks, lambda: [attention_errors(kind, dtype, kv_heads) for dtype in TOLERANCES]
    ):
        for error, (dtype, tolerance) in zip(errors, TOLERANCES.items(), strict=True):
            assert error < tolerance, dtype


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_all_pairs_that_a_causal_mask_leaves(
    ranks: int, balanced: bool
) -> None:
    """Oracle: positions, compared pair by pair; balanced parts of other ranks have equally many
    pairs."""
    length = 24 // ranks
    own = [own_positions(24, ranks, rank, balanced) for rank in range(ranks)]
    assert torch.equal(torch.cat(own).sort().values, torch.arange(24))
    for rank, source in itertools.permutations(range(ranks), 2):
        turn = (rank - source) % ranks
        queries, keys = seen_parts(turn, rank, length // 2, balanced)
        mask = torch.zeros(length, length, dtype=torch.bool)
        mask[queries, keys] = True
        assert torch.equal(mask, own[rank][:, None] > own[source])
        assert not balanced or mask.sum() == length**2 // 2
    for positions in own:  # so the own block's mask is the plain causal one
        assert positions.equal(positions.sort().values)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            lambda: own_positions(10, 4, 0, True),
            "sequences of 10 tokens cannot be cut into 8 equal chunks",
        ),
        (
            lambda: ulysses_attention(*[torch.ones(1, 3, 2, 4)] * 3, dist.group.WORLD),
            "3 heads cannot be shared by 2 ranks",
        ),
        (lambda: make_groups(3), "2 ranks cannot form groups of 3"),
        (
            lambda: Experts(torch.ones(3, 4, 2), torch.ones(3, 2, 2), dist.group.WORLD),
            "3 experts cannot be spread evenly over 2 ranks",
        ),
    ],
    ids=["tokens", "heads", "groups", "experts"],
)
def test_uneven_parts_are_refused(split: Callable[[], object], message: str) -> None:
    """Oracle: the numbers in the messages."""
    with pytest.raises(RuntimeError, match=f"ValueError: {message}"):
        run_ranks(2, split)
