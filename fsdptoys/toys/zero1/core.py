"""The core of ZeRO-1: each rank keeps optimizer states for, and updates, 1/N of the elements.

                 rank 0                          rank 1
    backward     all gradients  ←─ all-reduce ─→ all gradients           as DDP
    step         update slice 0                  update slice 1          states: 1/N
    publish      slices 0 and 1 ←─ all-gather ─→ slices 0 and 1          all parameters, the same

Under DDP all ranks compute the same update, each with its own states: for AdamW 8 bytes an element,
twice the parameters. Here each rank does its share of the work, keeps its share of the states, and
sends the result. Nothing depends on how gradients are averaged; the package puts this class on top
of DDP.

Each rank keeps P parameters, P gradients and 1/N of the states. It sends 2·P·(N−1)/N to all-reduce
and P·(N−1)/N to all-gather, half as much again as DDP. ZeRO-2 replaces the all-reduce by a
reduce-scatter.

Left out: optimizers that need a whole parameter; overlap of the all-gather with the next forward.
Source: arXiv:1910.02054 (P_os)
"""

from collections.abc import Iterator

import torch
from torch import nn

from ..flat_slices import Slices


class ShardedUpdate:
    """The update of parameters whose gradients are the same on all ranks; build the optimizer over
    ``pieces()``.

    Attributes:
        slices: parameters cut over the ranks.
    """

    slices: Slices

    def pieces(self) -> Iterator[nn.Parameter]:
        """Yield the parameters for an optimizer of this rank."""
        return self.slices.pieces()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the exchange around each step of an optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.collect())
        optimizer.register_step_post_hook(lambda *_: self.finish_step())

    def collect(self) -> None:
        """Set the pieces' gradients to views of the parameters' gradients."""
        for bucket in self.slices.buckets:
            for slot, (param, piece) in enumerate(zip(bucket.params, bucket.pieces, strict=True)):
                low, high = bucket.span(slot, self.slices.rank)
                piece.grad = None if param.grad is None else param.grad.view(-1)[low:high]

    def finish_step(self) -> None:
        """Exchange the updates and drop all gradients."""
        self.slices.publish()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set the gradients of parameters and pieces to None; an optimizer's ``zero_grad`` sees
        only the pieces."""
        for bucket in self.slices.buckets:
            for param in (*bucket.params, *bucket.pieces):
                param.grad = None
