"""DistributedDataParallel: the full model on every rank, gradients all-reduced in buckets
(arXiv:2006.15704)."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdptoys.utils.bounds import at_least
from fsdptoys.utils.options import Effect, Stage, option

from .capabilities import FORMS, Capabilities
from .config import ReducingConfig
from .single import UnshardedStrategy


class DDP(UnshardedStrategy):
    """PyTorch's DistributedDataParallel."""

    config: "DDPConfig"
    model: DistributedDataParallel
    sync_buffers: ClassVar[str] = (
        "forward_sync_buffers"
        if "forward_sync_buffers"
        in inspect.signature(DistributedDataParallel).parameters
        else "broadcast_buffers"
    )
    """Keyword for broadcasting buffers in every forward; renamed in torch 2.13."""

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        device = self.world.device
        buffers: dict[str, Any] = {self.sync_buffers: False}
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.torch_device.index] if device.is_accelerator else None,
            **buffers,
            bucket_cap_mb=self.config.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        if self.world.deterministic.uses_float64:
            wrapped.register_comm_hook(None, all_reduce_sum)
            self.gradient_divisor = 1
        elif self.config.reduce_dtype.torch != torch.float32:
            wrapped.register_comm_hook(
                self.config.reduce_dtype.torch, all_reduce_in_dtype
            )
        return wrapped

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """All-reduce once a step, with the last micro-batch; in the deterministic mode, after
        each."""
        last = index == count - 1
        with (
            nullcontext()
            if last or self.world.deterministic.reduces_each_microbatch
            else self.model.no_sync()
        ):
            yield
        if self._leaves and last:
            self._leaves.move_gradients()
        if not self.world.deterministic.reduces_each_microbatch or count == 1:
            return
        # DDP would reduce the .grad of earlier micro-batches once more, so each sum is set aside.
        for param in self._unwrapped.parameters():
            if param.grad is not None:
                self._add_microbatch(param, param.grad, last)


@dataclass
class DDPConfig(ReducingConfig):
    """The full model on every rank."""

    name: ClassVar[str] = "ddp"
    strategy = DDP
    capabilities = Capabilities(
        deterministic=True,
        context_forms=FORMS,
        optimizer_offload=True,
        lazy_updates=True,
        float8=True,
        layout_mode=True,
        muon=True,
        low_bit_states=True,
        mixed_dtypes=True,
    )

    bucket_cap_mb: int = option(
        25, at_least(1, 2**20), effect=Effect.rounding, acts=Stage.gradient
    )
    """Gradients are all-reduced in buckets of this many MiB during the backward."""


def all_reduce_sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: sum a bucket over the default group in its own dtype."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda future: future.value()[0])


def all_reduce_in_dtype(
    dtype: torch.dtype, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Communication hook: average a bucket over the default group in ``dtype``; the result has the
    bucket's dtype.

    DDP reads the annotations of ``bucket`` and of the return value at run time: they must not be
    strings.
    """
    buffer = bucket.buffer()
    summed = buffer.to(dtype)
    future = dist.all_reduce(summed, async_op=True).get_future()

    def average(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0].div_(dist.get_world_size()))

    return future.then(average)
