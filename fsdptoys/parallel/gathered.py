"""Attention over gathered keys and values, with sequences shared as heads and tails.

Where a flash kernel takes the tensors, attention is added up over blocks of keys
(``models/block_attention.py``): no mask is written, and the backward gathers keys and values once
more instead of keeping them. Otherwise, and for masks of documents, ``attend_rows`` computes each
piece with the run's own kernel and a mask, and gathered keys and values stay until the backward.

Shapes: B batch, T tokens of a full sequence, t = T/N of this rank's part, c = T/2N of a piece, H
query heads, G key/value heads, K width of a head.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models import Context
from fsdptoys.models.attention_rows import attend_rows
from fsdptoys.models.block_attention import (
    Block,
    BlockKernel,
    GradientsOfBlocks,
    RowsOfBlocks,
    blocks_between,
    flash_blocks,
)
from fsdptoys.models.context import RowAttention
from fsdptoys.models.kernels import dense_rows
from fsdptoys.models.ops import Ops

from .collectives import all_gather, reduce_scatter


class HeadTail(Context):
    """Rank r of N keeps pieces r and 2N-1-r of 2N, which together see as many keys on every
    rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = group.size()
        self._rank = group.rank()
        self._group = group

    def starts(self, seq_len: int, rank: int | None = None) -> tuple[int, int]:
        """Positions of the first tokens of a rank's two pieces; None for this rank."""
        rank, size = self._rank if rank is None else rank, seq_len // (2 * self.ranks)
        return rank * size, (2 * self.ranks - 1 - rank) * size

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """A head and a tail."""
        size = full.shape[dim] // (2 * self.ranks)
        return torch.cat(
            [full.narrow(dim, start, size) for start in self.starts(full.shape[dim])],
            dim,
        )


class Gathered(HeadTail):
    """Each rank attends with its own queries over gathered keys and values."""

    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """The rows of both pieces."""
        size = segments_BT.shape[1] // (2 * self.ranks)
        return [
            dense_rows(segments_BT, start, start + size, dtype)
            for start in self.starts(segments_BT.shape[1])
        ]

    def attend(
        self,
        q_BHtK: Tensor,
        k_BGtK: Tensor,
        v_BGtK: Tensor,
        ops: Ops,
        chunk_len: int | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Gather keys and values, and attend with each piece of the queries."""
        part = torch.stack((k_BGtK, v_BGtK))
        t = q_BHtK.shape[2]
        starts = self.starts(t * self.ranks)
        flash = flash_blocks(ops, q_BHtK) if mask is None else None
        if flash is not None:
            blocks = blocks_between(starts, [0], t // 2, t * self.ranks, chunk_len)
            attended: Tensor = _GatheredBlocks.apply(
                q_BHtK, part, flash, blocks, self._group
            )
            return attended
        k_BGTK, v_BGTK = _GatherSequence.apply(part, self._group)
        pieces = [
            attend_rows(q_BHcK, k_BGTK, v_BGTK, start, ops, chunk_len, rows)
            for q_BHcK, start, rows in zip(
                q_BHtK.chunk(2, 2), starts, mask or (None, None), strict=True
            )
        ]
        return torch.cat(pieces, dim=2)

    def attend_rows(
        self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtV: Tensor, attend: RowAttention
    ) -> Tensor:
        """Gather keys and values, and attend with each piece of the queries."""
        part = torch.cat((k_BGtK, v_BGtV), dim=-1)
        widths = [k_BGtK.shape[-1], v_BGtV.shape[-1]]
        k_BGTK, v_BGTV = _GatherSequence.apply(part, self._group).split(widths, -1)
        size = q_BHtK.shape[2] // 2
        heads = slice(0, q_BHtK.shape[1])
        pieces = []
        for q_BHcK, start in zip(
            q_BHtK.chunk(2, 2), self.starts(2 * size * self.ranks), strict=True
        ):
            keys = slice(0, start + size)
            pieces.append(
                attend(q_BHcK, k_BGTK[:, :, keys], v_BGTV[:, :, keys], heads, start)
            )
        return torch.cat(pieces, dim=2)


class _GatheredBlocks(torch.autograd.Function):
    """Attention over blocks of gathered keys and values, which the backward gathers again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHtK: Tensor,
        part: Tensor,
        kernel: BlockKernel,
        blocks: list[Block],
        group: dist.ProcessGroup,
    ) -> Tensor:
        k_BGTK, v_BGTK = gather_sequence(part, group)
        rows = RowsOfBlocks(kernel, q_BHtK)
        for block in blocks:
            rows.add(block, k_BGTK, v_BGTK)
        out_BHtK, lse_BHt = rows.result()
        ctx.save_for_backward(q_BHtK, part, out_BHtK, lse_BHt)
        ctx.kernel = kernel
        ctx.blocks = blocks
        ctx.group = group
        return out_BHtK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q_BHtK, part, out_BHtK, lse_BHt = ctx.saved_tensors
        full = gather_sequence(part, ctx.group)
        gradients = GradientsOfBlocks(ctx.kernel, grad, q_BHtK, out_BHtK, lse_BHt)
        grads = torch.zeros(full.shape, dtype=lse_BHt.dtype, device=full.device)
        for block in ctx.blocks:
            gradients.add(block, *full, *grads)
        grad_part = scatter_sequence(grads, ctx.group).to(part.dtype)
        return gradients.grad_q.to(q_BHtK.dtype), grad_part, None, None, None


class _GatherSequence(torch.autograd.Function):
    """All-gather tensors (…, t, K) of heads and tails into (…, T, K) in order of positions.

    The gradients of all ranks' rows are summed in float32, also where keys and values have 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_sequence(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        return scatter_sequence(grad.to(wide), ctx.group).to(grad.dtype), None


def gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather heads and tails (…, t, K) into the full sequence (…, T, K)."""
    ranks = group.size()
    # gloo takes an output that is concatenated along the first dim only.
    gathered = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    all_gather(gathered, part.contiguous(), group=group)
    heads, tails = gathered.unflatten(0, (ranks, -1)).unflatten(-2, (2, -1)).unbind(-3)
    return torch.cat((heads, tails.flip(0))).movedim(0, -3).flatten(-3, -2)


def scatter_sequence(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter full sequences (…, T, K) into this rank's head and tail (…, t, K): the
    transpose of a gather."""
    ranks = group.size()
    heads, tails = full.unflatten(-2, (2 * ranks, -1)).movedim(-3, 0).chunk(2)
    parts = torch.stack((heads, tails.flip(0)), dim=-3).flatten(-3, -2)
    part = parts.new_empty(parts.shape[1:])
    reduce_scatter(part, parts.flatten(0, 1).contiguous(), group=group)
    return part
