"""The toy ZeRO-1 and ZeRO-2 as strategies: full parameters on every rank, flat slices for the optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.toys.flat_slices import Slices
from fsdptoys.toys.zero1 import Zero1
from fsdptoys.toys.zero2 import Zero2

from .ddp import DDPConfig
from .strategy import ParallelContext
from .toy_ddp import ToyDDP
from .toy_state import Holding, ShardedState, load_sharded


@dataclass
class ToyZero1Config(DDPConfig):
    """Optimizer states sharded."""

    name: ClassVar[str] = "toy_zero1"
    # The optimizer sees flat slices, which end in the middle of a row.
    keeps_full_states: ClassVar[bool] = False
    matrices_lost: ClassVar[str | None] = "cuts elsewhere than between rows"

    def build(self, context: ParallelContext) -> "ToyZero1":
        """Construct the strategy."""
        return ToyZero1(self, context)


@dataclass
class ToyZero2Config(ToyZero1Config):
    """Optimizer states and gradients sharded."""

    name: ClassVar[str] = "toy_zero2"

    def build(self, context: ParallelContext) -> "ToyZero2":
        """Construct the strategy."""
        return ToyZero2(self, context)


class ToyZero1(ToyDDP):
    """The toy's Zero1: DDP until the optimizer, which works on flat slices of the parameters."""

    model: Any
    kind = Zero1

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce as DDP; after the last micro-batch, give the pieces their gradients."""
        if index == 0:
            self.model.drop_gradients()  # of a skipped step
        with super().microbatch(index, count):
            yield
        if index == count - 1:
            self.model.collect()

    @property
    def _slices(self) -> Slices:
        slices: Slices = self.model.slices
        return slices

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the exchange of updates."""
        self.model.attach(optimizer)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Flat slices, with the names of their parameters."""
        for name, param in self._unwrapped.named_parameters():
            bucket, slot = self._slices.places[param]
            yield name, bucket.pieces[slot]

    def shard_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD

    def state_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return live parameters, and copies of the states, sharded along their first dim. A collective."""
        return self._live() | self._sharded(optimizer).tensors()

    def load_state_tensors(self, optimizer: torch.optim.Optimizer, load: Callable[[dict[str, Tensor]], None]) -> None:
        """Load parameters in place and states through copies. A collective."""
        load_sharded(self._sharded(optimizer), self._live(), load)

    def _live(self) -> dict[str, Tensor]:
        return {f"model.{name}": param.detach() for name, param in self._unwrapped.named_parameters()}

    def _sharded(self, optimizer: torch.optim.Optimizer) -> ShardedState:
        holdings = []
        for name, param in self._unwrapped.named_parameters():
            bucket, slot = self._slices.places[param]
            spans = [bucket.span(slot, rank) for rank in range(self._slices.ranks)]
            holdings.append(Holding(name, param.shape, spans, bucket.pieces[slot]))
        mesh = self.context.build_mesh()
        return ShardedState(holdings, optimizer, mesh, keeps_parameters=False)


class ToyZero2(ToyZero1):
    """The toy's Zero2: gradients are reduced to slices after every micro-batch."""

    def _wrap(self, model: nn.Module) -> Any:
        return Zero2(model, bucket_cap_mb=self.config.bucket_cap_mb, reduce_dtype=self.config.reduce_dtype.torch)

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Every backward reduces; the slices accumulate."""
        yield
