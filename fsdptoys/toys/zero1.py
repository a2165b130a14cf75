"""ZeRO-1 from scratch: DDP, but each rank keeps optimizer states for, and updates, 1/N of the elements only.

                 rank 0                          rank 1
    backward     all gradients  ←─ all-reduce ─→ all gradients           as DDP
    step         update slice 0                  update slice 1          states: 1/N
    publish      slices 0 and 1 ←─ all-gather ─→ slices 0 and 1          all parameters, again the same

DDP's ranks all compute the same update, each with its own copy of the states: for AdamW 8 bytes an element, twice the
parameters. Here each does its share of that work and keeps its share of those bytes, and the results are exchanged.

On each rank, for P of parameters and S of states: P parameters, P gradients, S/N states (to padding; see
:mod:`.slices`). Sent a step: 2·P·(N−1)/N to all-reduce and P·(N−1)/N to all-gather, half as much again as DDP. A
reduce-scatter would do in place of the all-reduce: that is ZeRO-2.

Left out: optimizers that look at a whole parameter at once; all-gathering while the next forward begins.
Source: arXiv:1910.02054 (P_os)
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .ddp import BUCKET_CAP_MB, MIB, DistributedDataParallel
from .flat_slices import Slices


class Zero1(DistributedDataParallel):
    """A module under DDP whose optimizer is built over ``pieces()`` and attached with ``attach``.

    Args:
        module: as for DDP.
        process_group: likewise.
        bucket_cap_mb: of DDP's buckets, and of those that are sliced.
        settings: further ones of DDP.
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
        slices = Slices(module, group, int(bucket_cap_mb * MIB))
        super().__init__(module, process_group=process_group, bucket_cap_mb=bucket_cap_mb, **settings)
        self.slices = slices

    def pieces(self) -> Iterator[nn.Parameter]:
        """What this rank updates, for an optimizer."""
        return self.slices.pieces()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Surround an optimizer's step: before it gradients come to the pieces, after it updates go to all ranks."""
        optimizer.register_step_pre_hook(lambda *_: self.collect())
        optimizer.register_step_post_hook(lambda *_: self.finish_step())

    def collect(self) -> None:
        """Let the pieces' gradients be views of the parameters'."""
        for bucket in self.slices.buckets:
            for slot, (param, piece) in enumerate(zip(bucket.params, bucket.pieces, strict=True)):
                low, high = bucket.span(slot, self.slices.rank)
                piece.grad = None if param.grad is None else param.grad.view(-1)[low:high]

    def finish_step(self) -> None:
        """Exchange the updates and drop all gradients."""
        self.slices.publish()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set the gradients of parameters and pieces to None; an optimizer's ``zero_grad`` sees the pieces alone."""
        for bucket in self.slices.buckets:
            for param in (*bucket.params, *bucket.pieces):
                param.grad = None
