"""ZeRO-1: ``core`` on top of DDP."""

from typing import Any

import torch.distributed as dist
from torch import nn

from ..ddp import BUCKET_CAP_MB, DDP, MIB
from ..flat_slices import Slices
from .core import ShardedUpdate


class Zero1(ShardedUpdate, DDP):
    """A module under DDP. Build its optimizer over ``pieces()`` and attach it with ``attach``.

    Args:
        module, process_group: as for DDP.
        bucket_cap_mb: MiB of DDP's buckets and of the sliced ones.
        settings: further arguments of DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        **settings: Any,
    ) -> None:
        group: Any = process_group or dist.group.WORLD
        # First, since it changes strides, which DDP's buckets copy.
        slices = Slices(module, group, int(bucket_cap_mb * MIB))
        DDP.__init__(
            self, module, process_group=process_group, bucket_cap_mb=bucket_cap_mb, **settings
        )
        self.slices = slices
