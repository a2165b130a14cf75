"""Context parallelism: slices of sequences, compared with one process; and parts of either toy that
do not divide evenly."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.toys.cp import (
    ContextParallel,
    RingAttention,
    own_positions,
    seen_parts,
    ulysses_attention,
)
from fsdptoys.toys.ep import Experts, make_groups
from tests.harness.ranks import run_ranks
from tests.toys.part_runs import DTYPES, TOLERANCES, descend, relative

KINDS = ("ulysses", "ring", "unbalanced_ring")
BATCH, LENGTH, WIDTH, WORDS = 2, 24, 16, 11


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's, over whole sequences."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Decoder(nn.Module):
    """Two blocks of attention with 4 query heads, and a classifier."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH + 2 * kv_heads * WIDTH // 4) for _ in range(2)
        )
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens_BT: Tensor, positions_T: Tensor, attend: Any) -> Tensor:
        """Logits of the next word."""
        hidden = self.words(tokens_BT) + self.places(positions_T)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            heads = qkv(hidden).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2)
            q, k, v = heads.split([4, *[(heads.shape[1] - 4) // 2] * 2], dim=1)
            hidden = hidden + out(attend(q, k, v).transpose(1, 2).flatten(2))
        return self.head(hidden)


def attention_errors(kind: str, dtype: torch.dtype, kv_heads: int) -> float:
    """Largest error of this rank's part of the result and of the gradients of q, k and v."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [
        torch.randn(BATCH, heads, LENGTH, 8, dtype=torch.float64)
        for heads in (4, kv_heads, kv_heads, 4)
    ]
    leaves = [tensor.to(dtype).double().clone().requires_grad_() for tensor in whole[:3]]
    expected = causal_attention(*leaves)
    expected.backward(whole[3].to(dtype).double())
    own = own_positions(LENGTH, ranks, rank, kind == "ring")
    parts = [tensor.to(dtype)[:, :, own].contiguous().requires_grad_() for tensor in whole[:3]]
    group: Any = dist.group.WORLD
    if kind == "ulysses":
        found = ulysses_attention(*parts, group)
    else:
        found = RingAttention.apply(*parts, group, kind == "ring")
    found.backward(whole[3].to(dtype)[:, :, own])
    pairs = [
        (found, expected),
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


def train_slices(
    model: ContextParallel | Decoder, tokens: Tensor, labels: Tensor
) -> tuple[list[float], list[Tensor]]:
    """Losses of three steps, and the gradients of the last."""

    def loss() -> Tensor:
        if isinstance(model, ContextParallel):
            logits, own_labels = model(tokens), model.cut(labels)[0]
        else:
            logits, own_labels = model(tokens, torch.arange(LENGTH), causal_attention), labels
        return (
            F.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum")
            / valid_labels()
        )

    losses = descend(
        model, loss, 0.5, model.sum_gradients if isinstance(model, ContextParallel) else None
    )
    return losses, [param.grad for param in model.parameters()]


def batch() -> tuple[Tensor, Tensor]:
    """Four sequences, and their labels, of which the last slices have few."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (4, LENGTH + 1), generator=generator)
    labels = words[:, 1:].clone()
    labels[0, 5:] = -100
    return words[:, :-1], labels


def valid_labels() -> int:
    """Labels of the batch that count."""
    return int((batch()[1] != -100).sum())


def training_error(kind: str, dtype: torch.dtype, shared_by: int) -> float:
    """Largest error of losses and gradients; ``shared_by`` ranks have parts of the same
    sequences."""
    tokens, labels = batch()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [
        dist.new_group(list(range(first, first + shared_by)))
        for first in range(0, ranks, shared_by)
    ]
    rows = slice(*(4 * (rank // shared_by + step) * shared_by // ranks for step in (0, 1)))
    torch.manual_seed(0)
    model = Decoder(kv_heads=2).to(dtype)
    parallel = ContextParallel(copy.deepcopy(model), groups[rank // shared_by], kind)
    losses, grads = train_slices(model, tokens, labels)
    own_losses, own_grads = train_slices(parallel, tokens[rows], labels[rows])
    return max(
        relative(
            torch.tensor(own_losses, dtype=torch.float64), torch.tensor(losses, dtype=torch.float64)
        ),
        *(relative(own, grad) for own, grad in zip(own_grads, grads, strict=True)),
    )


@pytest.mark.parametrize(
    ("ranks", "shared_by"),
    [
        (2, 2),
        pytest.param(4, 4, marks=pytest.mark.extended),
        pytest.param(4, 2, marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_training_over_slices_equals_one_process(kind: str, ranks: int, shared_by: int) -> None:
    """Oracle: losses and gradients of three steps of one process, also with two groups of other
    sequences."""
    for dtype in DTYPES:
        assert (
            max(run_ranks(ranks, training_error, kind, dtype, shared_by)) < 10 * TOLERANCES[dtype]
        )


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_all_pairs_that_a_causal_mask_leaves(ranks: int, balanced: bool) -> None:
    """Oracle: positions, compared pair by pair; balanced parts of other ranks have equally many
    pairs."""
    length = 24 // ranks
    own = [own_positions(24, ranks, rank, balanced) for rank in range(ranks)]
    assert torch.equal(torch.cat(own).sort().values, torch.arange(24))
    for rank, source in itertools.permutations(range(ranks), 2):
        queries, keys = seen_parts(rank, source, length, balanced)
        seen = torch.zeros(length, length, dtype=torch.bool)
        seen[queries, keys] = True
        assert torch.equal(seen, own[rank][:, None] > own[source])
        assert not balanced or seen.sum() == length**2 // 2
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
