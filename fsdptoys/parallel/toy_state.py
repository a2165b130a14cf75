"""Checkpoint tensors of a toy's parameters and optimizer states. Each rank owns spans of their
elements.

A span, in the order of elements, is no DTensor. Each tensor is therefore assembled on every rank,
one at a time, and cut along its first dim; the copies take 1/N of the tensors' memory, plus one
whole tensor. Scalars, such as the number of steps, come from the first owner.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.utils.dtensor import is_dtensor

from .state import State, kept_tensors, settle


@dataclass(frozen=True)
class Holding:
    """Ownership of one parameter."""

    name: str
    shape: torch.Size
    spans: list[tuple[int, int]]
    """Half-open range of elements that each rank owns."""
    own: nn.Parameter
    """This rank's elements, in any shape; the optimizer updates them."""

    def assemble(
        self, own: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Assemble a tensor of the parameter's shape from all ranks' parts. A collective."""
        whole = torch.empty(self.shape.numel(), dtype=dtype, device=device)
        for rank, (low, high) in enumerate(self.spans):
            if high > low:
                if rank == dist.get_rank():
                    assert own is not None
                    whole[low:high].copy_(own.reshape(-1))
                dist.broadcast(whole[low:high], rank)
        return whole.view(self.shape)

    def first_owner(self) -> int:
        """Return the first rank that owns any elements."""
        return next(rank for rank, (low, high) in enumerate(self.spans) if high > low)


class ShardedState(State):
    """Copies of the states of holdings, sharded along their first dims over a mesh of one axis.

    Args:
        holdings: of all parameters, the same order on all ranks.
        optimizer: over each rank's own parameters.
        live: full parameters of every rank; parameters that have owners are copied too.
    """

    def __init__(
        self,
        holdings: list[Holding],
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        live: dict[str, Tensor],
    ) -> None:
        self.holdings = holdings
        self.optimizer = optimizer
        self.mesh = mesh
        self.live = live
        self.device = (
            torch.device(mesh.device_type)
            if mesh.device_type == "cpu"
            else holdings[0].own.device
        )
        settle(optimizer)
        mine = [
            {
                kind: (state.dtype, state.ndim > 0)
                for kind, state in kept_tensors(
                    holding.name, optimizer.state.get(holding.own, {})
                ).items()
            }
            for holding in holdings
        ]
        everyones: list[list[dict[str, tuple[torch.dtype, bool]]]] = [
            [] for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(everyones, mine)
        self._kinds = [
            everyones[holding.first_owner()][number]
            for number, holding in enumerate(holdings)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Live parameters, and copies: DTensors, and plain tensors of scalars. A collective."""
        tensors = dict(self.live)
        for number, holding in enumerate(self.holdings):
            if not self.live:
                tensors[f"model.{holding.name}"] = self._shard(
                    holding.assemble(
                        holding.own.detach(), holding.own.dtype, self.device
                    )
                )
            states = self.optimizer.state.get(holding.own, {})
            for kind, (dtype, is_whole) in self._kinds[number].items():
                key = f"optim.{holding.name}.{kind}"
                if is_whole:
                    tensors[key] = self._shard(
                        holding.assemble(states.get(kind), dtype, self.device)
                    )
                else:
                    value = (
                        states[kind].clone()
                        if kind in states
                        else torch.zeros((), dtype=dtype)
                    )
                    tensors[key] = value.to(self.device)
                    dist.broadcast(tensors[key], holding.first_owner())
        return tensors

    def install(self, tensors: dict[str, Tensor]) -> None:
        """Copy values from the copies. A collective."""
        for number, holding in enumerate(self.holdings):
            if not self.live:
                self._install(
                    holding, holding.own.detach(), tensors[f"model.{holding.name}"]
                )
            states = self.optimizer.state.get(holding.own, {})
            for kind in self._kinds[number]:
                self._install(
                    holding, states.get(kind), tensors[f"optim.{holding.name}.{kind}"]
                )
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _install(self, holding: Holding, own: Tensor | None, tensor: Tensor) -> None:
        whole = tensor.full_tensor() if is_dtensor(tensor) else tensor
        if own is None:
            return
        if not own.ndim:
            own.copy_(whole)
            return
        low, high = holding.spans[dist.get_rank()]
        own.view(-1).copy_(whole.reshape(-1)[low:high])

    def _shard(self, whole: Tensor) -> Tensor:
        chunks = whole.chunk(self.mesh.size())
        rank = dist.get_rank()
        local = chunks[rank].clone() if rank < len(chunks) else whole[:0].clone()
        from torch.distributed.tensor import DTensor, Shard  # takes a second to import

        return DTensor.from_local(
            local,
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
