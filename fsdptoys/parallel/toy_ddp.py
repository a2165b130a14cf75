"""The toy DDP as a strategy: ``DDP`` with the toy's class instead of PyTorch's."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fsdptoys.toys.ddp import DistributedDataParallel

from .ddp import DDP, DDPConfig, all_reduce_in_dtype
from .strategy import ParallelContext


@dataclass
class ToyDDPConfig(DDPConfig):
    """The full model on every rank, all-reduced from scratch."""

    name: ClassVar[str] = "toy_ddp"

    def build(self, context: ParallelContext) -> "ToyDDP":
        """Construct the strategy."""
        return ToyDDP(self, context)


class ToyDDP(DDP):
    """The toy's DistributedDataParallel."""

    kind: ClassVar[type[DistributedDataParallel]] = DistributedDataParallel

    def _wrap(self, model: nn.Module) -> Any:
        device = self.context.device
        wrapped = self.kind(
            model,
            device_ids=[device.torch_device.index] if device.is_accelerator else None,
            forward_sync_buffers=False,
            bucket_cap_mb=self.config.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        if self.config.reduce_dtype.torch != torch.float32:
            wrapped.register_comm_hook(self.config.reduce_dtype.torch, all_reduce_in_dtype)
        return wrapped
