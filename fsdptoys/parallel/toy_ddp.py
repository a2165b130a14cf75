"""The toy DDP, ZeRO-1 and ZeRO-2 as strategies: ``DDP`` with the toys' classes for PyTorch's.

Under ZeRO every rank has full parameters, and flat slices of them for the optimizer.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.toys import ddp
from fsdptoys.toys.zero1 import Zero1
from fsdptoys.toys.zero2 import Zero2
from fsdptoys.utils.options import Effect, option

from .capabilities import FORMS, Capabilities
from .ddp import DDP, DDPConfig
from .toy_state import Holding, ShardedState


class ToyDDP(DDP):
    """The toy's DDP."""

    config: "ToyDDPConfig"
    kind: ClassVar[Any] = ddp.DDP

    def _wrap(self, model: nn.Module) -> Any:
        reduce_dtype = self.config.reduce_dtype.torch
        assert not self.world.deterministic.uses_float64, (
            "the configuration was not validated"
        )
        return self.kind(
            model,
            bucket_cap_mb=self.config.bucket_cap_mb,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            ignored_params=self._ignored_params(),
            reduce_dtype=None if reduce_dtype is torch.float32 else reduce_dtype,
            overlap=self.config.overlap,
        )

    def _ignored_params(self) -> Collection[nn.Parameter]:
        """Return parameters that DDP leaves alone."""
        return ()


class ToyZero1(ToyDDP):
    """The toy's Zero1: DDP until the optimizer, which works on flat slices of the parameters."""

    model: Any
    kind = Zero1
    sharded = "optimizer states"

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce as DDP; after the last micro-batch, give the pieces their gradients."""
        if index == 0:
            self.model.drop_gradients()  # of a skipped step
        with super().microbatch(index, count):
            yield
        if index == count - 1:
            self.model.collect()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the exchange of updates."""
        self.model.attach(optimizer)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Flat slices of those that train, with the names of their parameters."""
        for name, param in self._trained():
            bucket, slot = self.model.slices.places[param]
            yield name, bucket.pieces[slot]

    def held_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Also full frozen ones."""
        yield from self.named_parameters()
        yield from (
            (name, param)
            for name, param in self._unwrapped.named_parameters()
            if not param.requires_grad
        )

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, param)
            for name, param in self._unwrapped.named_parameters()
            if param.requires_grad
        )

    def shard_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD

    def state(self, optimizer: torch.optim.Optimizer) -> ShardedState:
        """Live parameters, and copies of the states, sharded along their first dim."""
        slices = self.model.slices
        holdings = []
        live = {}
        for name, param in self._trained():
            bucket, slot = slices.places[param]
            spans = [bucket.span(slot, rank) for rank in range(slices.ranks)]
            holdings.append(Holding(name, param.shape, spans, bucket.pieces[slot]))
            live[f"model.{name}"] = param.detach()
        return ShardedState(holdings, optimizer, self.build_mesh(), live)


class ToyZero2(ToyZero1):
    """The toy's Zero2: gradients are reduced to slices after every micro-batch."""

    sharded = "gradients and optimizer states"

    def gradient_bytes(self, trained: list[Tensor], frozen: list[Tensor]) -> int:
        """One slice of each bucket."""
        return super().gradient_bytes(trained, frozen) // self.world.world_size

    def _wrap(self, model: nn.Module) -> Any:
        return Zero2(
            model,
            bucket_cap_mb=self.config.bucket_cap_mb,
            reduce_dtype=self.config.reduce_dtype.torch,
            overlap=self.config.overlap,
        )

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Every backward reduces; the slices accumulate."""
        yield


@dataclass
class ToyDDPConfig(DDPConfig):
    """The full model on every rank, all-reduced from scratch."""

    name: ClassVar[str] = "toy_ddp"
    strategy = ToyDDP
    capabilities = replace(DDPConfig.capabilities, layout_mode=False)

    overlap: bool = option(True, effect=Effect.none)
    """Reduce gradients during the backward; false reduces after it (same bits), to measure the gain
    of overlap."""


@dataclass
class ToyZero1Config(ToyDDPConfig):
    """Optimizer states sharded."""

    name: ClassVar[str] = "toy_zero1"
    strategy = ToyZero1
    capabilities = Capabilities(
        deterministic=True,
        context_forms=FORMS,
        lazy_updates=True,
        float8=True,
        mixed_dtypes=True,
    )


@dataclass
class ToyZero2Config(ToyZero1Config):
    """Optimizer states and gradients sharded."""

    name: ClassVar[str] = "toy_zero2"
    strategy = ToyZero2
