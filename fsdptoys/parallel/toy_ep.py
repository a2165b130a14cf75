"""The toy's expert parallelism as a strategy: the toy DDP, whose ranks split the experts
(``mesh.ep_size``).

Each rank keeps 1/n of every stack of experts, as a plain parameter. DDP leaves these alone: their
gradients are summed over the ranks with the same experts, after the last micro-batch. The model's
own kernels compute the rows that arrive.

Checkpoints have DTensors of the stacks, views of the parameters, so a run resumes under any
strategy.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.models import DecoderModel
from fsdptoys.models.experts import apply_experts
from fsdptoys.models.grouped import Product
from fsdptoys.models.moe import Experts
from fsdptoys.toys.ep import apply_elsewhere

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
        self.shapes: dict[nn.Parameter, torch.Size] = {}
        """This rank's part of a stack → the stack's shape."""

    def split(self, model: DecoderModel, seq_len: int) -> None:
        """Keep a part of each stack of experts."""
        stacks: dict[str, torch.Size] = {}
        for name, module in model.named_modules():
            if self.expert_ranks > 1 and isinstance(module, Experts):
                for kind, stack in list(module.named_parameters()):
                    stacks[f"{name}.{kind}"] = stack.shape
                    part = stack.detach().chunk(self.expert_ranks)[0]
                    setattr(module, kind, nn.Parameter(part, stack.requires_grad))
                module.dispatch = partial(_apply, self.together)
        self._stacks = stacks

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
        self.shapes = {
            self._unwrapped.get_parameter(name): shape for name, shape in self._stacks.items()
        }
        return self.shapes

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce as DDP; after the last micro-batch, sum experts' gradients over the ranks that
        have them."""
        with super().microbatch(index, count):
            yield
        if index == count - 1:
            for param in self.shapes:
                assert param.grad is not None
                total = param.grad.to(self.config.reduce_dtype.torch)
                dist.all_reduce(total, group=self.mesh.get_group(REPLICATE_AXIS))
                param.grad = total.div_(self.reduces.divisor).to(param.dtype)

    def local_norms(self, grads: list[Tensor], map_parts: MapParts = map) -> list[Tensor]:
        """Count gradients that all ranks have on one of those with different experts."""
        if self.expert_ranks > 1 and self.together.rank() > 0:
            of_experts = {param.grad.data_ptr() for param in self.shapes if param.grad is not None}
            grads = [grad for grad in grads if grad.data_ptr() in of_experts]
        return super().local_norms(grads, map_parts)

    def total_norm(self, norms: list[Tensor]) -> Tensor:
        """Norm over the ranks with different experts."""
        if self.expert_ranks == 1:
            return super().total_norm(norms)
        total = torch.zeros((), dtype=self.world.sum_dtype, device=self.world.device.torch_device)
        total += torch.cat([norm.flatten() for norm in norms]).to(total.dtype).square().sum()
        dist.all_reduce(total, group=self.together)
        return total.sqrt().float()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters, and gathered stacks."""
        for name, param in self._unwrapped.named_parameters():
            full = param.detach()
            if param in self.shapes:
                parts = [torch.empty_like(full) for _ in range(self.expert_ranks)]
                dist.all_gather(parts, full, group=self.together)
                full = torch.cat(parts)
            yield name, unrounded(name, full)

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Live tensors; stacks and their states as DTensors."""
        return (
            State(self.trainable_parameters, optimizer)
            if self.expert_ranks == 1
            else SplitState(self, optimizer)
        )


class SplitState(State):
    """Live tensors, of which those of stacks are DTensors sharded between experts."""

    def __init__(self, strategy: ToyEP, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(strategy.trainable_parameters, optimizer)
        self.mesh = strategy.mesh
        self.stacks = {
            name: strategy.shapes[param]
            for name, param in self.named_parameters
            if param in strategy.shapes
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors; a state without dims is the same on all ranks."""
        from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

        tensors = super().tensors()
        for key, local in tensors.items():
            name = key.split(".", 1)[1]
            name = name if name in self.stacks else name.rpartition(".")[0]
            if name in self.stacks and local.ndim:
                shape = self.stacks[name]
                tensors[key] = DTensor.from_local(
                    local,
                    self.mesh,
                    [Replicate(), Shard(0)],
                    run_check=False,
                    shape=shape,
                    stride=local.stride(),
                )
        return tensors


def _apply(
    group: dist.ProcessGroup,
    hidden_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    product: Product,
    *,
    scale_input: bool = False,
) -> Tensor:
    """In place of ``apply_experts``, with the same arguments."""

    def compute(rows_RD: Tensor, local_R: Tensor) -> Tensor:
        ones_R1 = rows_RD.new_ones(len(rows_RD), 1)
        return apply_experts(rows_RD, local_R[:, None], ones_R1, gate_up_EHD, down_EDF, product)

    local = len(down_EDF)
    if scale_input:  # each pair is a token of its own
        pairs_PD = (hidden_ND.unsqueeze(1) * weights_NK.unsqueeze(-1)).flatten(0, 1)
        pairs_NKD = apply_elsewhere(pairs_PD, experts_NK.reshape(-1, 1), local, group, compute)
        return pairs_NKD.view(*experts_NK.shape, -1).sum(1)
    pairs_NKD = apply_elsewhere(hidden_ND, experts_NK, local, group, compute)
    return (pairs_NKD * weights_NK.unsqueeze(-1)).sum(1)


@dataclass
class ToyEPConfig(ToyDDPConfig):
    """The full model on every rank but for experts, of which each has a part, from scratch."""

    name: ClassVar[str] = "toy_ep"
    strategy = ToyEP
