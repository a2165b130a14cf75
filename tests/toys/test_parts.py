"""Context and expert parallelism: slices of sequences and spread experts, compared with one
process."""

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
from fsdptoys.toys.ep import Experts, MoE, make_groups, plan_routes, sum_gradients
from tests.harness.ranks import run_ranks

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = (torch.float64, torch.float32)
KINDS = ("ulysses", "ring", "unbalanced_ring")
BATCH, LENGTH, WIDTH, WORDS = 2, 24, 16, 11


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, divided by the largest expected number."""
    assert found is not None and expected is not None
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()


def descend(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    rate: float,
    exchange: Callable[[], object] | None,
) -> list[float]:
    """Take three steps of gradient descent, and return the losses; gradients of the last step
    remain.

    Args:
        model: with the parameters.
        loss_of: computes this rank's part of the loss.
        rate: learning rate.
        exchange: sums the gradients over ranks; None for one process.
    """
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        if exchange is not None:
            exchange()
            dist.all_reduce(loss.detach())
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param -= rate * param.grad
    return losses


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


TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 12, 8, 6, 8, 2
LABELS = 30
"""Of 4 sequences of 8 labels, those that count."""


class OneProcess(nn.Module):
    """All experts applied to all tokens, one by one, without sorting; the names of parameters are
    those of the toy."""

    def __init__(self, gate_up_EHD: Tensor, down_EDF: Tensor) -> None:
        super().__init__()
        self.gate_up_LHD, self.down_LDF = (
            nn.Parameter(gate_up_EHD.clone()),
            nn.Parameter(down_EDF.clone()),
        )

    def forward(self, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Weighted sum over all experts, with weight 0 for those that are not chosen."""
        out = torch.zeros_like(hidden_ND)
        for expert in range(EXPERTS):
            gate, up = (hidden_ND @ self.gate_up_LHD[expert].T).chunk(2, dim=-1)
            weight_N = (weights_NK * (experts_NK == expert)).sum(1)
            out = out + weight_N[:, None] * ((F.silu(gate) * up) @ self.down_LDF[expert].T)
        return out


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate, up and down of all experts."""
    torch.manual_seed(0)
    gate_up_EHD = torch.randn(EXPERTS, 2 * HIDDEN, DIM, dtype=dtype) / DIM**0.5
    return gate_up_EHD, torch.randn(EXPERTS, DIM, HIDDEN, dtype=dtype) / HIDDEN**0.5


def choose(routing: str, ranks: int) -> Tensor:
    """Experts of the tokens of all ranks, (ranks * TOKENS, TOP_K)."""
    if routing == "random":
        scores = torch.rand(ranks * TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
        return scores.topk(TOP_K, dim=1).indices
    first = 0 if routing == "first rank's" else EXPERTS - TOP_K
    return torch.arange(first, first + TOP_K).expand(ranks * TOKENS, TOP_K)


def layer_errors(routing: str, dtype: torch.dtype) -> tuple[float, int]:
    """Largest error of the result and all gradients of this rank, and the number of rows that it
    received."""
    group: Any = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stacks = matrices(dtype)
    hidden, grad = torch.randn(2, ranks * TOKENS, DIM, dtype=dtype)
    weights, chosen = torch.rand(ranks * TOKENS, TOP_K, dtype=dtype), choose(routing, ranks)
    rows = slice(rank * TOKENS, (rank + 1) * TOKENS)
    found: list[Any] = []
    for layer, own in ((OneProcess(*stacks), slice(None)), (Experts(*stacks, group), rows)):
        inputs = [tensor[own].clone().requires_grad_() for tensor in (hidden, weights)]
        out = layer(inputs[0], chosen[own], inputs[1])
        out.backward(grad[own])
        found.append((layer, [out, *(tensor.grad for tensor in inputs)]))
    (whole, expected), (spread, results) = found
    errors = [
        relative(result, all_rows[rows]) for result, all_rows in zip(results, expected, strict=True)
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


class SpreadModel(nn.Module):
    """A dense layer and experts, twice, and a classifier."""

    def __init__(self, experts: list[Any], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM, dtype=dtype) for _ in experts)
        self.moes = nn.ModuleList(
            MoE(torch.randn(EXPERTS, DIM, dtype=dtype), each, TOP_K) for each in experts
        )
        self.head = nn.Linear(DIM, 5, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        for dense, moe in zip(self.dense, self.moes, strict=True):
            hidden = hidden + moe(torch.tanh(dense(hidden)))
        return self.head(hidden)


def train_experts(
    model: SpreadModel, hidden: Tensor, labels: Tensor, same: dist.ProcessGroup | None
) -> list[float]:
    """Losses of three steps, sums over all ranks. Gradients of the last step remain."""

    def loss() -> Tensor:
        return (
            F.cross_entropy(model(hidden).flatten(0, -2), labels.flatten(), reduction="sum")
            / LABELS
        )

    return descend(model, loss, 0.3, None if same is None else lambda: sum_gradients(model, same))


def training_errors(dtype: torch.dtype, size: int) -> float:
    """Largest error of losses and gradients; ``size`` ranks share all experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    together, same = make_groups(size)
    stacks = matrices(dtype)
    hidden, labels = torch.randn(4, 8, DIM, dtype=dtype), torch.randint(5, (4, 8))
    labels[0, :2] = -100
    whole = SpreadModel([OneProcess(*stacks) for _ in range(2)], dtype)
    losses = torch.tensor(train_experts(whole, hidden, labels, None), dtype=torch.float64)
    own = slice(4 * rank // ranks, 4 * (rank + 1) // ranks)
    spread = SpreadModel([Experts(*stacks, together) for _ in range(2)], dtype)
    own_losses = torch.tensor(
        train_experts(spread, hidden[own], labels[own], same), dtype=torch.float64
    )
    errors = [relative(own_losses, losses)]
    for (name, param), expected in zip(spread.named_parameters(), whole.parameters(), strict=True):
        grad: Any = expected.grad
        errors.append(
            relative(param.grad, grad.chunk(size)[together.rank()] if ".experts." in name else grad)
        )
    return max(errors)


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        (2, 1),
        (2, 2),
        pytest.param(4, 2, marks=pytest.mark.extended),
        pytest.param(4, 4, marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_with_spread_experts_equals_one_process(
    dtype: torch.dtype, ranks: int, size: int
) -> None:
    """Oracle: losses and gradients of three steps of one process, also where several ranks have the
    same experts."""
    assert max(run_ranks(ranks, training_errors, dtype, size)) < 10 * TOLERANCES[dtype]


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
