"""Ring attention: blocks of keys and values pass from rank to rank (arXiv:2310.01889).

In step s rank r of N has the keys and values of rank r-s, while it sends them on and receives the
next. With sequences shared as heads and tails, a rank's own block is causal; of an earlier rank's
all queries see the head and none the tail; of a later rank's the tail's queries see both. So every
step computes as many scores, on every rank. Results are merged by their log-sum-exp in float32. In
the backward keys and values go round again; their gradients travel with them, added up in float32,
and are home after N steps.

Shapes: B batch, t tokens of this rank's part, H query heads, G key/value heads, K width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models.block_attention import (
    PLAIN,
    Block,
    BlockKernel,
    GradientsOfBlocks,
    RowsOfBlocks,
    blocks_between,
    flash_blocks,
)
from fsdptoys.models.ops import Ops

from .gathered import HeadTail


class Ring(HeadTail):
    """Each rank attends with its own queries over keys and values that pass by, without masks."""

    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """Not computed: settings with masks are refused before the launch."""
        raise NotImplementedError("ring attention has no masks")

    def attend(
        self,
        q_BHtK: Tensor,
        k_BGtK: Tensor,
        v_BGtK: Tensor,
        ops: Ops,
        chunk_len: int | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Pass keys and values round, and merge the results."""
        assert mask is None
        kernel = flash_blocks(ops, q_BHtK) or PLAIN
        steps = [
            self._blocks(step, q_BHtK.shape[2], chunk_len) for step in range(self.ranks)
        ]
        attended: Tensor = _Ring.apply(
            q_BHtK, torch.stack((k_BGtK, v_BGtK)), kernel, steps, self._group
        )
        return attended

    def _blocks(self, step: int, tokens: int, chunk_len: int | None) -> list[Block]:
        """Rows and keys that see each other in a step, among this rank's ``tokens`` and those that
        pass by."""
        everything = slice(0, tokens)
        half = tokens // 2
        passing = (self._rank - step) % self.ranks
        if chunk_len is not None:
            own, others = (
                self.starts(tokens * self.ranks, rank) for rank in (self._rank, passing)
            )
            return blocks_between(own, others, half, half, chunk_len)
        if step == 0:
            return [Block(everything, everything, True)]
        if passing < self._rank:
            return [Block(everything, slice(0, half), False)]
        return [Block(slice(half, tokens), everything, False)]


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries over the keys and values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHtK: Tensor,
        part: Tensor,
        kernel: BlockKernel,
        steps: list[list[Block]],
        group: dist.ProcessGroup,
    ) -> Tensor:
        rows = RowsOfBlocks(kernel, q_BHtK)
        passing = part
        for step, blocks in enumerate(steps):
            arrives = _pass_on(passing, group) if step + 1 < len(steps) else None
            for block in blocks:
                rows.add(block, *passing)
            passing = arrives() if arrives else passing
        out_BHtK, lse_BHt = rows.result()
        ctx.save_for_backward(q_BHtK, part, out_BHtK, lse_BHt)
        ctx.kernel = kernel
        ctx.steps = steps
        ctx.group = group
        return out_BHtK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q_BHtK, part, out_BHtK, lse_BHt = ctx.saved_tensors
        group = ctx.group
        passing = part
        gradients = GradientsOfBlocks(ctx.kernel, grad, q_BHtK, out_BHtK, lse_BHt)
        grads_arrive = None
        for step, blocks in enumerate(ctx.steps):
            arrives = _pass_on(passing, group) if step + 1 < len(ctx.steps) else None
            grads = torch.zeros(part.shape, dtype=lse_BHt.dtype, device=part.device)
            for block in blocks:
                gradients.add(block, *passing, *grads)
            # Those of ranks that had this block before.
            grads = grads if grads_arrive is None else grads.add_(grads_arrive())
            grads_arrive = _pass_on(grads, group)
            passing = arrives() if arrives else passing
        assert grads_arrive is not None
        return (
            gradients.grad_q.to(q_BHtK.dtype),
            grads_arrive().to(part.dtype),
            None,
            None,
            None,
        )


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank; returns a function that waits for that of the rank
    before."""
    ranks = group.size()
    rank = group.rank()
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    peers = [dist.get_global_rank(group, peer % ranks) for peer in (rank + 1, rank - 1)]
    operations = [
        dist.P2POp(dist.isend, sent, peers[0], group),
        dist.P2POp(dist.irecv, received, peers[1], group),
    ]
    works = dist.batch_isend_irecv(operations)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait
