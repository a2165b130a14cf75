"""A right answer to each of the exercises, which each take what they need of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from fsdptoys.toys.optim import adamw_update


def pass_on(sent: Tensor, received: Tensor) -> Tensor:
    """Send to the next rank of a ring and receive from the one before."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def gather(shard: Tensor) -> Tensor:
    """All ranks' rows."""
    whole = shard.new_empty(len(shard) * dist.get_world_size(), *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard)
    return whole


def all_reduce(tensor: Tensor) -> None:
    """N−1 rounds of adding, after which rank r has the full sum of part r+1; N−1 rounds of
    forwarding sums."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    parts = list(tensor.tensor_split(ranks))
    for turn in range(2 * (ranks - 1)):
        sent = parts[(rank - turn) % ranks]
        received = parts[(rank - turn - 1) % ranks]
        arrived = pass_on(sent.clone(), torch.empty_like(received))
        if turn < ranks - 1:
            received.add_(arrived)
        else:
            received.copy_(arrived)


def fill_buckets(sizes: list[int], cap: int) -> list[list[int]]:
    """Close a bucket when it is full."""
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(sizes))):
        if room <= 0:
            buckets.append([])
            room = cap
        buckets[-1].append(number)
        room -= sizes[number]
    return buckets


def sharded_adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: int,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Padded to equal slices."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    length = -(-len(parameter) // ranks)
    padding = length * ranks - len(parameter)
    own = pad(parameter, (0, padding)).view(ranks, length)[rank].clone()
    grad = pad(gradient, (0, padding)).view(ranks, length)[rank]
    adamw_update(own, grad, state, step, lr, betas, eps, weight_decay)
    parameter.copy_(gather(own)[: len(parameter)])


def own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Chunks of ⌈rows / ranks⌉ until there are no more."""
    most = -(-rows // ranks)
    return min(rank * most, rows), min((rank + 1) * most, rows)


def gather_rows(shard: Tensor, rows: int) -> Tensor:
    """Padding comes last, since only the last ranks have fewer rows."""
    most = -(-rows // dist.get_world_size())
    return gather(pad(shard, (0, 0, 0, most - len(shard))))[:rows]


def assign_owners(sizes: list[int], ranks: int) -> list[int]:
    """Graham's rule."""
    owners = [0] * len(sizes)
    loads = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = min(range(ranks), key=loads.__getitem__)
        loads[owners[number]] += sizes[number]
    return owners


class GatheredLinear(torch.autograd.Function):
    """A linear map that gathers its full weight for each use."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, shard: Tensor) -> Tensor:
        """Save the inputs and the shard."""
        ctx.save_for_backward(inputs, shard)
        return inputs @ gather(shard).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the inputs, and of the rows of this rank."""
        inputs, shard = ctx.saved_tensors
        own = torch.empty_like(shard)
        dist.reduce_scatter_tensor(own, gradient.T @ inputs / dist.get_world_size())
        return gradient @ gather(shard), own


class ShardedLinear(nn.Module):
    """Rows of one rank."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(
            weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by the full weight."""
        return GatheredLinear.apply(inputs, self.shard)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merge attention to one block after the other."""
    ranks = dist.get_world_size()
    block = torch.stack([k, v])
    out = torch.zeros_like(q)
    lse = torch.full_like(q[:, :1], -torch.inf)
    for turn in range(ranks):
        scores = q @ block[0].T / q.shape[1] ** 0.5
        block_lse = scores.logsumexp(1, keepdim=True)
        sum_lse = torch.logaddexp(lse, block_lse)
        out = out * (lse - sum_lse).exp() + (scores - sum_lse).exp() @ block[1]
        lse = sum_lse
        if turn < ranks - 1:
            block = pass_on(block, torch.empty_like(block))
    return out


class Send(torch.autograd.Function):
    """Rows one way, gradients the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows that are sorted by rank."""
        ctx.sent = sent
        ctx.received = received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Send the gradients back."""
        return Send.apply(gradient, ctx.received, ctx.sent), None, None


def apply_elsewhere(
    rows: Tensor, targets: Tensor, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sort, send, compute, send back, restore the order."""
    counts = torch.bincount(targets, minlength=dist.get_world_size())
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    sent = counts.tolist()
    received = coming.tolist()
    order = targets.argsort(stable=True)
    results = function(Send.apply(rows[order], sent, received))
    return Send.apply(results, received, sent)[order.argsort()]
