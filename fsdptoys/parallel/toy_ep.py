"""The toy's expert parallelism as a strategy: the toy DDP with split experts (``mesh.ep_size``).

Each rank keeps 1/n of every stack of experts, as a plain parameter. DDP leaves these alone: their
gradients are summed over the ranks with the same experts, after the last micro-batch. The model's
own kernels compute the rows that arrive.

Checkpoints have DTensors of the stacks, views of the parameters, so a run resumes under any
strategy.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.models import DecoderModel
from fsdptoys.models.experts import apply_experts
from fsdptoys.models.grouped import Product
from fsdptoys.models.moe import Experts
from fsdptoys.toys.ep import apply_elsewhere
from fsdptoys.utils.dtensor import full_tensor, is_dtensor

from .device_mesh import named_mesh
from .gradient_norms import MapParts
from .init_weights import ParamInit
from .mesh import EXPERT_AXIS, REPLICATE_AXIS
from .state import State, unrounded
from .strategy import World
from .toy_ddp import ToyDDP, ToyDDPConfig


class ToyEP(ToyDDP):
    """The toy's DDP, with experts on the ranks that tokens are sent to."""

    config: "ToyEPConfig"

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(config, world)
        self.expert_ranks = world.mesh.ep_size
        self.mesh: Any = None
        self.together: Any = None
        """Ranks that have all experts together."""
        if self.expert_ranks > 1:
            sizes = {
                REPLICATE_AXIS: world.world_size // self.expert_ranks,
                EXPERT_AXIS: self.expert_ranks,
            }
            self.mesh = named_mesh(sizes, world.device, world.timeout)
            self.together = self.mesh.get_group(EXPERT_AXIS)
        self._stacks: dict[str, torch.Size] = {}
        """Name of a stack → its shape."""
        self._parts: list[nn.Parameter] = []
        """This rank's parts of the stacks."""

    def split(self, model: DecoderModel, seq_len: int) -> None:
        """Keep a part of each stack of experts."""
        for name, module in model.named_modules():
            if self.expert_ranks > 1 and isinstance(module, Experts):
                for kind, stack in list(module.named_parameters()):
                    self._stacks[f"{name}.{kind}"] = stack.shape
                    part = stack.detach().chunk(self.expert_ranks)[0]
                    setattr(module, kind, nn.Parameter(part, stack.requires_grad))
                module.dispatch = ToyExchange(self.together)

    def shard(self, model: DecoderModel, param_init: ParamInit) -> None:
        """Initialize with one full stack of experts at a time, then wrap."""

        def init_part(param: Tensor, name: str) -> None:
            if name not in self._stacks:
                param_init(param, name)
                return
            full = param.new_empty(self._stacks[name])
            param_init(full, name)
            param.detach().copy_(full.chunk(self.expert_ranks)[self.together.rank()])

        super().shard(model, init_part)

    def _ignored_params(self) -> Collection[nn.Parameter]:
        """Return the stacks."""
        self._parts = [self._unwrapped.get_parameter(name) for name in self._stacks]
        return self._parts

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce as DDP; after the last micro-batch, sum experts' gradients over the ranks that
        have them."""
        with super().microbatch(index, count):
            yield
        if index == count - 1:
            for param in self._parts:
                assert param.grad is not None
                total = param.grad.to(self.config.reduce_dtype.torch)
                dist.all_reduce(total, group=self.mesh.get_group(REPLICATE_AXIS))
                param.grad = total.div_(self.gradient_divisor).to(param.dtype)

    def local_norms(
        self, grads: list[Tensor], map_parts: MapParts = map
    ) -> list[Tensor]:
        """Count gradients that all ranks have on one of those with different experts."""
        if self.expert_ranks > 1 and self.together.rank() > 0:
            of_experts = {
                param.grad.data_ptr() for param in self._parts if param.grad is not None
            }
            grads = [grad for grad in grads if grad.data_ptr() in of_experts]
        return super().local_norms(grads, map_parts)

    def norm_groups(self) -> list[dist.ProcessGroup | None]:
        """The ranks with different experts."""
        return [self.together]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters, and gathered stacks."""
        for name, param in self._unwrapped.named_parameters():
            full = self.spread(name, param.detach())
            yield name, unrounded(name, full_tensor(full) if is_dtensor(full) else full)

    def spread(self, name: str, tensor: Tensor) -> Tensor:
        """A stack of experts, or one of its states, as a DTensor sharded between experts."""
        if name not in self._stacks or not tensor.ndim:
            return tensor
        from torch.distributed.tensor import (  # takes a second to import
            DTensor,
            Replicate,
            Shard,
        )

        shape = self._stacks[name]
        stride = tensor.stride()
        placements = [Replicate(), Shard(0)]
        return DTensor.from_local(
            tensor, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Live tensors; stacks and their states as DTensors."""
        return State(self.trainable_parameters, optimizer, self.spread)


class ToyExchange:
    """``apply_experts`` with experts split over a group of ranks. A collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

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

        def compute(rows_RD: Tensor, local_R: Tensor) -> Tensor:
            ones_R1 = rows_RD.new_ones(len(rows_RD), 1)
            return apply_experts(
                rows_RD, local_R[:, None], ones_R1, gate_up_EHD, down_EDF, product
            )

        local = len(down_EDF)
        if scale_input:  # each pair is a token of its own
            pairs_PD = (hidden_ND.unsqueeze(1) * weights_NK.unsqueeze(-1)).flatten(0, 1)
            pairs_NKD = apply_elsewhere(
                pairs_PD, experts_NK.reshape(-1, 1), local, self._group, compute
            )
            return pairs_NKD.view(*experts_NK.shape, -1).sum(1)
        pairs_NKD = apply_elsewhere(hidden_ND, experts_NK, local, self._group, compute)
        return (pairs_NKD * weights_NK.unsqueeze(-1)).sum(1)


@dataclass
class ToyEPConfig(ToyDDPConfig):
    """The full model on every rank but for experts, of which each has a part, from scratch."""

    name: ClassVar[str] = "toy_ep"
    strategy = ToyEP
    capabilities = replace(
        ToyDDPConfig.capabilities,
        context_forms=(),
        splits_experts=True,
        compiled_experts=False,
        optimizer_offload=False,
    )
