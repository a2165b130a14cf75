"""Expert parallelism: each of n ranks has 1/n of the experts, and tokens travel to their experts.

Experts are most of a model's parameters, and a token uses K of E. FSDP gathers all of them on every
rank. Here they stay, and rows of activations move, twice in the forward and twice in the backward:

    rank 0   route, sort by expert ─┐                ┌─ experts 0 1 ─┐                ┌─ unsort, sum
    rank 1   route, sort by expert ─┴── all-to-all ──┴─ experts 2 3 ─┴── all-to-all ──┴─ unsort, sum

How many rows go where differs from layer to layer and step to step, so E counts travel first, which
the host reads to allocate the rows: one device sync a layer. No token is dropped and nothing is
padded. All wait for a rank with popular experts: that is why routers are balanced.

A rank that receives no rows still takes part: its experts multiply empty matrices, so that its
backward joins the all-to-alls of the others, and its experts' gradients are zeros rather than None.

Of W ranks W/n have the same experts; attention, norms and router are on all W, with other tokens on
each. So dense gradients are summed over all ranks. An expert's gradient already has the tokens of n
ranks, and is summed only over the W/n ranks with the same experts. The loss is a sum over tokens,
divided by the number of labels on all ranks: averaging over both groups would make experts'
gradients n times too large.

A rank keeps E/n experts, with gradients and optimizer states. For N tokens of width D it sends
about 4·K·N·D·(n−1)/n numbers a layer and step, however large the experts are. Left out: capacity
limits, losses that balance the router, overlap of rows and computation, grouped matmuls.
Sources: arXiv:2006.16668 (GShard), arXiv:2211.15841 (MegaBlocks: without dropping tokens)

Shapes: N tokens of this rank, K experts of a token, D width, F width of an expert's hidden layer, E
experts, L = E/n experts of this rank, P = N·K pairs of a token and an expert, R received rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows_RD and the numbers local_R of their experts, among this rank's, to results_RD."""


def make_groups(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Form groups of ``size`` ranks that share all experts; return this rank's and its experts'."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    if ranks % size:
        raise ValueError(f"{ranks} ranks cannot form groups of {size}")
    layout = torch.arange(ranks).view(-1, size)
    together = [dist.new_group(group) for group in layout.tolist()]
    same = [dist.new_group(group) for group in layout.T.tolist()]
    return together[rank // size], same[rank % size]


class SendRows(torch.autograd.Function):
    """All-to-all of rows, sorted by rank; the backward sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Send ``sent[r]`` rows to rank r and receive ``received[r]`` from it."""
        ctx.reverse = received, sent, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send gradients against the rows' direction."""
        return SendRows.apply(grads[0], *ctx.reverse), None, None, None


@dataclass
class Routes:
    """The way of this rank's pairs to their experts and back."""

    order_P: Tensor
    """Pairs n·K + k sorted by expert, and so by rank."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    local_R: Tensor
    """Each received row's expert, counted among this rank's."""


def plan_routes(experts_NK: Tensor, local_experts: int, group: dist.ProcessGroup) -> Routes:
    """Exchange the counts of rows for each expert."""
    ranks = group.size()
    counts = torch.bincount(experts_NK.flatten(), minlength=ranks * local_experts)
    counts = counts.view(ranks, local_experts)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)
    local = torch.arange(local_experts, device=counts.device).repeat(ranks)
    return Routes(
        order_P=experts_NK.flatten().argsort(stable=True),
        sent=counts.sum(1).tolist(),
        received=coming.sum(1).tolist(),
        local_R=local.repeat_interleave(coming.flatten()),
    )


def apply_elsewhere(
    hidden_ND: Tensor,
    experts_NK: Tensor,
    local_experts: int,
    group: dist.ProcessGroup,
    compute: Compute,
) -> Tensor:
    """Send tokens to their experts, which ``compute``; return results of all pairs, (N, K, D)."""
    routes = plan_routes(experts_NK, local_experts, group)
    sorted_PD = hidden_ND[routes.order_P // experts_NK.shape[1]]
    rows_RD = SendRows.apply(sorted_PD, routes.sent, routes.received, group)
    back_PD = SendRows.apply(compute(rows_RD, routes.local_R), routes.received, routes.sent, group)
    return back_PD[routes.order_P.argsort()].view(*experts_NK.shape, -1)


class Experts(nn.Module):
    """Gated feed-forwards (SwiGLU); this rank keeps 1/n of them.

    Args:
        gate_up_EHD: matrices of all experts, the same on all ranks, with H = 2·F rows.
        down_EDF: likewise.
        group: ranks over which the experts are spread.
    """

    def __init__(self, gate_up_EHD: Tensor, down_EDF: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        if len(down_EDF) % group.size():
            experts = len(down_EDF)
            ranks = group.size()
            raise ValueError(f"{experts} experts cannot be spread evenly over {ranks} ranks")
        self.group = group
        self.gate_up_LHD, self.down_LDF = (
            nn.Parameter(stack.detach().chunk(group.size())[group.rank()].clone())
            for stack in (gate_up_EHD, down_EDF)
        )

    def forward(self, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, (N, D)."""
        local = len(self.down_LDF)
        pairs_NKD = apply_elsewhere(hidden_ND, experts_NK, local, self.group, self.compute)
        return (pairs_NKD * weights_NK.unsqueeze(-1)).sum(1)

    def compute(self, rows_RD: Tensor, local_R: Tensor) -> Tensor:
        """Apply to each row its expert; rows are sorted by rank, then by expert."""
        order_R = local_R.argsort(stable=True)
        lengths = torch.bincount(local_R, minlength=len(self.down_LDF)).tolist()
        results = []
        for expert, rows in enumerate(rows_RD[order_R].split(lengths)):  # also if there are none
            gate, up = F.linear(rows, self.gate_up_LHD[expert]).chunk(2, dim=-1)
            results.append(F.linear(F.silu(gate) * up, self.down_LDF[expert]))
        return torch.cat(results)[order_R.argsort()]


class MoE(nn.Module):
    """A router on every rank, and experts that are spread over some; takes any leading dims.

    Args:
        router_ED: the router's matrix, the same on all ranks.
        experts: the experts.
        top_k: experts of a token.
    """

    def __init__(self, router_ED: Tensor, experts: Experts, top_k: int) -> None:
        super().__init__()
        self.router_ED = nn.Parameter(router_ED.detach().clone())
        self.experts = experts
        self.top_k = top_k

    def forward(self, hidden: Tensor) -> Tensor:
        """Send each token to the most probable experts, and weight by their probabilities."""
        hidden_ND = hidden.flatten(0, -2)
        probabilities_NE = F.linear(hidden_ND, self.router_ED).softmax(-1)
        weights_NK, experts_NK = probabilities_NE.topk(self.top_k, dim=-1)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return self.experts(hidden_ND, experts_NK, weights_NK).view_as(hidden)


@torch.no_grad()
def sum_gradients(model: nn.Module, same_experts: dist.ProcessGroup) -> None:
    """Sum experts' gradients over the ranks with the same experts, all others over all ranks."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    spread = {param for layer in layers for param in layer.parameters()}
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad, group=same_experts if param in spread else None)
