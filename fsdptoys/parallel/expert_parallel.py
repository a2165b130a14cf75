"""Expert parallelism: ``mesh.ep_size`` consecutive ranks split the experts, and tokens travel to
them and back.

A layer's stacks are sharded between experts over the ``ep`` axis; then FSDP2 shards the part of
each rank along another dim over ``efsdp``, the ranks that have the same experts. A unit so gathers
1/ep of the experts.

    ranks 0 to 3, ep_size=2      experts 0, 1      experts 2, 3
    first half of dim 1          rank 0            rank 1
    second half of dim 1         rank 2            rank 3

Each rank sorts its (token, choice) pairs by expert and sends each pair's row and routing weight to
the rank that has the expert; no row is dropped or padded. The results return weighted, and are
summed over a token's choices. With N tokens, K choices and width D, a rank sends about N·K·D·(ep -
1)/ep numbers each way, and again in the backward. It also keeps the received rows for the backward,
about N·K·D numbers that it would otherwise not have.

The sizes of the pieces must be on the host: one device sync for each layer and forward, and another
where activation checkpointing recomputes the forward. Therefore the next unit is gathered before
the sync.

Not covered: capacity limits; one row for several experts of the same rank; overlap of exchange and
matmuls.
Sources: arXiv:2006.16668 (GShard), arXiv:2211.15841 (without dropping tokens).

Shapes: N tokens, K experts of a token, E experts, D width, R = N·K rows sent, M rows received, W
width of a row.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, ModelConfig, MoEConfig
from fsdptoys.models.experts import apply_experts, gather_sum
from fsdptoys.models.grouped import Product
from fsdptoys.models.moe import Experts
from fsdptoys.utils.dtensor import is_dtensor

from .mesh import Axes

if TYPE_CHECKING:  # the command line composes configs without loading DTensor
    from torch.distributed.tensor import Shard


class Route(NamedTuple):
    """Where a rank's rows go, and how many come."""

    group: dist.ProcessGroup
    sends: list[int]
    """Rows for each rank."""
    gets: list[int]
    """Rows from each rank."""

    def back(self) -> "Route":
        """The way back of the rows that came."""
        return Route(self.group, self.gets, self.sends)

    def exchange(self, rows_RW: Tensor) -> Tensor:
        """Send rows, which are sorted by rank; returns those of other ranks, in the order of ranks.
        A collective."""
        rows_MW = rows_RW.new_empty(sum(self.gets), rows_RW.shape[1])
        dist.all_to_all_single(
            rows_MW, rows_RW.contiguous(), self.gets, self.sends, group=self.group
        )
        return rows_MW


class ExpertExchange:
    """``apply_experts`` with experts split over a group of ranks. A collective, in forward and
    backward.

    Args:
        group: its ranks have equally many experts each, in order.
        gradient_divisor: divides the gradients of experts if a reduction averages over too few
            ranks.
    """

    def __init__(self, group: dist.ProcessGroup, gradient_divisor: int = 1) -> None:
        self.group = group
        self.gradient_divisor = gradient_divisor

    def __call__(
        self,
        hidden_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EHD: Tensor,
        down_EDF: Tensor,
        product: Product,
        *,
        scale_input: bool = False,
    ) -> Tensor:
        """See ``Experts.forward``."""
        top_k = experts_NK.shape[1]
        n_experts = gate_up_EHD.shape[0]
        experts_R, pairs_R = torch.sort(experts_NK.flatten(), stable=True)
        rows_NK = torch.argsort(pairs_R).view_as(experts_NK)
        route, ids_M = self._route(experts_R, n_experts)
        tokens_R = pairs_R.div(top_k, rounding_mode="floor")
        hidden_MD = _Send.apply(hidden_ND, tokens_R, rows_NK, route, product)
        weights_M1 = _Send.apply(
            weights_NK.reshape(-1, 1), pairs_R, rows_NK.view(-1, 1), route, product
        )
        gate_up = self._own(gate_up_EHD)
        down = self._own(down_EDF)
        out_MD = apply_experts(
            hidden_MD,
            ids_M.unsqueeze(1),
            weights_M1,
            gate_up,
            down,
            product,
            scale_input=scale_input,
        )
        out_ND: Tensor = _Return.apply(out_MD, tokens_R, rows_NK, route.back(), product)
        return out_ND

    def multiply_groups(
        self,
        rows_RD: Tensor,
        counts_EG: Tensor,
        gate_up_EHD: Tensor,
        down_EDF: Tensor,
        multiply: Callable[[Tensor, Tensor, Tensor, list[list[list[int]]]], Tensor],
    ) -> Tensor:
        """Multiply rows that are sorted by expert, and by grain within an expert
        (``exact.experts``). A collective.

        Args:
            rows_RD: of all experts.
            counts_EG: rows of each expert and grain.
            gate_up_EHD: a DTensor of all experts; this rank has some.
            down_EDF: likewise.
            multiply: called with rows, matrices of this rank's experts, and the numbers of rows by
                source, expert and grain, in this order.
        """
        ranks = self.group.size()
        counts = counts_EG.flatten()
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        # One device sync
        sent, received = (
            torch.stack([counts, coming])
            .view(2, ranks, -1, counts_EG.shape[1])
            .tolist()
        )
        sends, gets = (
            [sum(map(sum, of_rank)) for of_rank in splits]
            for splits in (sent, received)
        )
        route = Route(self.group, sends, gets)
        out_MD = multiply(
            _Exchange.apply(rows_RD, route),
            self._own(gate_up_EHD),
            self._own(down_EDF),
            received,
        )
        out_RD: Tensor = _Exchange.apply(out_MD, route.back())
        return out_RD

    @torch.no_grad()
    def _route(self, experts_R: Tensor, n_experts: int) -> tuple[Route, Tensor]:
        """Splits of the exchange, and the local expert of each row that comes. A collective."""
        ranks = self.group.size()
        device = experts_R.device
        local = n_experts // ranks
        # Neither bincount nor one_hot: both sync with the device.
        ends_E = torch.searchsorted(
            experts_R, torch.arange(n_experts, device=device), right=True
        )
        counts = ends_E.diff(prepend=ends_E.new_zeros(1))
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        sends, gets = read_splits(
            torch.stack([counts, coming]).view(2, ranks, local).sum(2),
            experts_R.numel(),
        )
        ids_M = (
            torch.arange(local, device=device)
            .repeat(ranks)
            .repeat_interleave(coming, output_size=sum(gets))
        )
        return Route(self.group, sends, gets), ids_M

    def _own(self, stack: Tensor) -> Tensor:
        """This rank's experts, as a plain tensor."""
        own: Tensor = stack.to_local() if is_dtensor(stack) else stack
        return (
            own
            if self.gradient_divisor == 1
            else _DivideGradient.apply(own, self.gradient_divisor)
        )


def read_splits(splits_2N: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Copy the split sizes of an exchange to the host. Costs one device sync.

    A planner replaces it, and needs ``rows``, the number of rows that this rank sends.
    """
    sends, gets = splits_2N.tolist()
    return sends, gets


class _Send(torch.autograd.Function):
    """Rows to the ranks that have their experts; the backward returns gradients and sums them over
    choices.

    ``values`` has a row for each of some items, ``order_R`` is the item of each row sent, ``rows``
    (items, choices) the row sent for each choice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        order_R: Tensor,
        rows: Tensor,
        route: Route,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.route = route
        ctx.product = product
        return route.exchange(values.index_select(0, order_R))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MW: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return (
            gather_sum(ctx.route.back().exchange(grad_MW), rows, ctx.product),
            None,
            None,
            None,
            None,
        )


class _Return(torch.autograd.Function):
    """Results to the ranks of their tokens, summed over choices; the transpose of ``_Send``."""

    @staticmethod
    def forward(
        ctx: Any,
        values_MW: Tensor,
        order_R: Tensor,
        rows: Tensor,
        route: Route,
        product: Product,
    ) -> Tensor:
        # Not saved for the backward, so that a recomputation may stop before this exchange.
        ctx.order_R = order_R
        ctx.route = route
        return gather_sum(route.exchange(values_MW), rows, product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (
            ctx.route.back().exchange(grad.index_select(0, ctx.order_R)),
            None,
            None,
            None,
            None,
        )


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.exchange(rows_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        return ctx.route.back().exchange(grad_MD), None


class _DivideGradient(torch.autograd.Function):
    """Return the input; divide its gradient by a number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None


def split_experts(
    model: DecoderModel, mesh: DeviceMesh, exchange: ExpertExchange
) -> None:
    """Leave each rank of a mesh of one axis its part of each stack of a model on the meta
    device."""
    from torch.distributed.tensor import DTensor, Shard

    for experts in model.modules():
        if not isinstance(experts, Experts):
            continue
        for name, stack in list(experts.named_parameters()):
            assert stack.is_meta
            local = stack.new_empty(stack.shape[0] // mesh.size(), *stack.shape[1:])
            part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(part, stack.requires_grad))
        experts.dispatch = exchange


def expert_placement(stack: nn.Parameter, ranks: int) -> "Shard":
    """The dim, not the first, along which N ranks shard their common part of a stack."""
    from torch.distributed.tensor import Shard

    dim = expert_dim(stack.shape, ranks)
    assert dim is not None, "the configuration was not validated"
    return Shard(dim)


def expert_dim(shape: Sequence[int], ranks: int) -> int | None:
    """``expert_placement`` by a stack's shape; None if N ranks divide no dim."""
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def check_experts(model: ModelConfig, axes: Axes) -> None:
    """Check that a model has experts, and that the ranks divide them and their matrices.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if axes.ep == 1:
        return
    if not isinstance(model, MoEConfig):
        raise ConfigError(
            f"mesh.ep_size={axes.ep} splits experts, and a {model.family} model has none; set "
            "mesh.ep_size=1"
        )
    width = model.dim
    hidden = model.expert_ffn_dim

    def fits(ep: int) -> bool:
        ranks = axes.ranks_per_replica // ep
        divides = all(
            expert_dim(shape, ranks) is not None
            for shape in ((1, 2 * hidden, width), (1, width, hidden))
        )
        return ep == 1 or (
            model.n_experts % ep == 0 and axes.ranks_per_replica % ep == 0 and divides
        )

    if fits(axes.ep):
        return
    fix = f"set mesh.ep_size={max(ep for ep in range(1, axes.ranks_per_replica + 1) if fits(ep))}"
    if model.n_experts % axes.ep:
        raise ConfigError(
            f"mesh.ep_size={axes.ep} must divide model.n_experts={model.n_experts}; {fix}"
        )
    raise ConfigError(
        f"mesh.ep_size={axes.ep} leaves {axes.efsdp} ranks to shard the same experts, which must "
        f"divide model.dim={width} or model.expert_ffn_dim={hidden}; {fix}"
    )


def fsdp2_can_sum() -> bool:
    """Whether FSDP2 of this torch can sum gradients rather than average them: 2.11 to 2.15 can, 2.7
    cannot."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def sums_gradients(units: Sequence[Any]) -> bool:
    """Make FSDP2 sum gradients instead of averaging. Return False if torch is too old.

    A size of the group as divisor would be another for experts than for the rest.
    ``set_force_sum_reduction_for_comms`` makes gloo and float64 sum too.
    """
    if not fsdp2_can_sum():
        return False
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return True
