"""Ulysses: heads for sequence and back (arXiv:2309.14509).

An all-to-all of queries, keys and values gives each of N ranks full sequences of H/N heads; a
second one returns the results. Backwards are the same exchanges. One message has queries, keys and
values, so that a layer exchanges twice in the forward and twice in the backward, in an order that
no rank can change.

Where N does not divide the G key/value heads, these are copied until it does; gradients of copies
add up in the backward. N and G divide the H query heads, so their least common multiple does too,
and each rank's query heads find their own key heads.

Shapes: B batch, T tokens of a full sequence, t = T/N of this rank's part, H query heads, G
key/value heads, h heads of a rank, K width of a head.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptoys.models import Context
from fsdptoys.models.context import FULL_SEQUENCES, RowAttention
from fsdptoys.models.ops import Ops


class Ulysses(Context):
    """Each rank keeps one piece of a sequence, and attends over full sequences of some heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = group.size()
        self._rank = group.rank()
        self._group = group

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """One of N pieces, in order of rank."""
        size = full.shape[dim] // self.ranks
        return full.narrow(dim, self._rank * size, size)

    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """The kernel's own mask, of full sequences."""
        return FULL_SEQUENCES.mask(segments_BT, ops, dtype)

    def attend(
        self,
        q_BHtK: Tensor,
        k_BGtK: Tensor,
        v_BGtK: Tensor,
        ops: Ops,
        chunk_len: int | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Exchange heads for sequence, attend, and exchange back."""
        k_BGtK, v_BGtK = self._copy_heads(k_BGtK, v_BGtK)
        q_BhTK, k_BhTK, v_BhTK = self._gather_sequence(q_BHtK, k_BGtK, v_BGtK)
        out_BhTK = FULL_SEQUENCES.attend(q_BhTK, k_BhTK, v_BhTK, ops, chunk_len, mask)
        return self._gather_heads(out_BhTK)

    def attend_rows(
        self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtV: Tensor, attend: RowAttention
    ) -> Tensor:
        """Exchange heads for sequence, attend with this rank's heads, and exchange back."""
        k_BGtK, v_BGtV = self._copy_heads(k_BGtK, v_BGtV)
        width = v_BGtV.shape[-1]
        # One message has one width
        widest = max(q_BHtK.shape[-1], width)
        padded = (F.pad(x, (0, widest - x.shape[-1])) for x in (q_BHtK, k_BGtK, v_BGtV))
        q_BhTW, k_BhTW, v_BhTW = self._gather_sequence(*padded)
        heads = q_BhTW.shape[1]
        first = self._rank * heads
        out_BhTV = attend(
            q_BhTW[..., : q_BHtK.shape[-1]],
            k_BhTW[..., : q_BHtK.shape[-1]],
            v_BhTW[..., :width],
            slice(first, first + heads),
            0,
        )
        return self._gather_heads(out_BhTV)

    def _copy_heads(self, *xs_BGtK: Tensor) -> tuple[Tensor, ...]:
        """Copies of key/value heads, so that the ranks divide them."""
        G = xs_BGtK[0].shape[1]
        copies = math.lcm(G, self.ranks) // G
        if copies == 1:
            return xs_BGtK
        return tuple(x.repeat_interleave(copies, dim=1) for x in xs_BGtK)

    def _gather_sequence(self, *xs_BHtK: Tensor) -> tuple[Tensor, ...]:
        """Full sequences of this rank's share of each tensor's heads, as views with tokens
        outermost.

        In this order the pieces of one sequence arrive in place; only several sequences are copied
        once more.
        """
        # Each rank's heads of all tensors side by side.
        parts_BtNhK = [
            x.transpose(1, 2).unflatten(2, (self.ranks, -1)) for x in xs_BHtK
        ]
        sent_NBthK = torch.cat(parts_BtNhK, dim=3).movedim(2, 0).contiguous()
        got_NBthK = _Exchange.apply(sent_NBthK, self._group)
        joined_BhTK = got_NBthK.transpose(0, 1).flatten(1, 2).transpose(1, 2)
        return joined_BhTK.split([x.shape[3] for x in parts_BtNhK], dim=1)

    def _gather_heads(self, out_BhTK: Tensor) -> Tensor:
        """This rank's piece of all heads."""
        sent_NBthK = (
            out_BhTK.transpose(1, 2)
            .unflatten(1, (self.ranks, -1))
            .movedim(1, 0)
            .contiguous()
        )
        got_NBthK = _Exchange.apply(sent_NBthK, self._group)
        return got_NBthK.movedim(0, 2).flatten(2, 3).transpose(1, 2)


class _Exchange(torch.autograd.Function):
    """All-to-all of a tensor (N, …), one slice to each rank; its own inverse, and so its own
    backward."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad.contiguous(), ctx.group), None


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
