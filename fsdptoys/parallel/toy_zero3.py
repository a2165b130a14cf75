"""The toy ZeRO-3 as a strategy: full tensors on owner ranks, broadcast around each block's forward
and backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.toys.partition import Evenness
from fsdptoys.toys.zero3 import Zero3
from fsdptoys.utils.options import Effect, Stage, option

from .capabilities import FORMS, Capabilities
from .config import ReducingConfig
from .init_weights import ParamInit, init_buffers
from .mesh import MeshConfig
from .precision import DType
from .single import unsharded_units
from .strategy import Strategy, UnitParams
from .toy_state import Holding, ShardedState


class ToyZero3(Strategy):
    """The toy's Zero3."""

    config: "ToyZero3Config"
    model: Zero3

    def shard(self, model: DecoderModel, param_init: ParamInit) -> None:
        """Distribute the parameters unit by unit; each owner initializes its own."""
        device = self.world.device.torch_device
        self._unwrapped = model
        self.model = Zero3(
            model,
            list(model.layers),
            device,
            fill=param_init,
            evenness=self.config.evenness,
            prefetch=self.config.prefetch,
            reduce_dtype=self.config.reduce_dtype.torch,
        )
        config = self.config
        init_buffers(model, device, config.buffer_dtype.torch, config.param_dtype.torch)
        self._own = {
            name: param
            if self.model.owner_of[param] == self.world.rank
            else nn.Parameter(param.new_empty(0), param.requires_grad)
            for name, param in model.named_parameters()
        }

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Every backward reduces; the owners accumulate."""
        yield

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's tensors, and empty ones in place of the others."""
        yield from self._own.items()

    def units(self) -> list[UnitParams]:
        """Return the units of the wrapped model."""
        return unsharded_units(self._unwrapped)

    def unit_names(self) -> list[list[str]]:
        """The rest of the model, and each block."""
        whole = self._unwrapped
        blocks = range(len(whole.layers))
        return [[""], *([f"{whole.blocks_name}.{number}"] for number in blocks)]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Broadcast one parameter at a time."""
        device = self.world.device.torch_device
        for holding in self._holdings():
            own = holding.own.detach()
            yield (
                holding.name,
                holding.assemble(own, own.dtype, device).to("cpu", torch.float32),
            )

    def gradient_bytes(self, trained: list[Tensor], frozen: list[Tensor]) -> int:
        """A share's gradients have room for its frozen parameters."""
        return super().gradient_bytes(trained, [])

    def shard_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD

    def _holdings(self) -> list[Holding]:
        holdings = []
        for name, param in self._unwrapped.named_parameters():
            owner = self.model.owner_of[param]
            spans = [
                (0, param.numel() if rank == owner else 0)
                for rank in range(self.world.world_size)
            ]
            holdings.append(Holding(name, param.shape, spans, self._own[name]))
        return holdings

    def state(self, optimizer: torch.optim.Optimizer) -> ShardedState:
        """Copies, sharded along their first dim."""
        holdings = [
            holding for holding in self._holdings() if holding.own.requires_grad
        ]
        return ShardedState(holdings, optimizer, self.build_mesh(), live={})


@dataclass
class ToyZero3Config(ReducingConfig):
    """Parameters, gradients and optimizer states on owners."""

    name: ClassVar[str] = "toy_zero3"
    strategy = ToyZero3
    capabilities = Capabilities(
        deterministic=True,
        owns_parameters=True,
        context_forms=FORMS,
        lazy_updates=True,
        float8=True,
    )

    evenness: Evenness = option(
        Evenness.model, effect=Effect.rounding, acts=Stage.gradient
    )
    """Balance the bytes of the model, or of each unit, over the ranks."""
    prefetch: bool = option(True, effect=Effect.none)
    """Gather the next block while one computes."""

    def validate(
        self, world_size: int, mesh: MeshConfig, device_type: str, cpu_offload: bool
    ) -> None:
        """Reject lower precision."""
        super().validate(world_size, mesh, device_type, cpu_offload)
        if self.param_dtype is not DType.float32:
            raise ConfigError(
                f"parallel.param_dtype={self.param_dtype.value} is not an option of "
                "parallel=toy_zero3, which computes with the tensors that it broadcasts; set "
                "parallel=fsdp2 or parallel.param_dtype=float32"
            )
