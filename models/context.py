"""Sequences that several ranks share (context parallelism), as a model sees them.

A forward gets full rows of tokens and labels. A ``Context`` keeps this rank's part of each row,
after labels were shifted and positions of documents counted on full rows. All layers but attention
work on single tokens; attention asks the context, which exchanges queries, keys or values with
other ranks. Without context parallelism, and with a cache, a rank has full sequences.

Shapes: B batch, T tokens of a full sequence, t of this rank's part, H query heads, G key/value
heads, K width of a head, V width of its values where it differs.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import Ops, leave_uncompiled


class RowAttention(Protocol):
    """Attention of some heads and rows, by a function that knows their positions."""

    def __call__(
        self,
        q_BhPK: Tensor,
        k_BgSK: Tensor,
        v_BgSV: Tensor,
        heads: slice,
        start: int,
    ) -> Tensor:
        """Return (B, h, P, V).

        Args:
            q_BhPK: queries of the rows ``start`` to ``start + P``.
            k_BgSK: keys of the first ``start + P`` tokens; g divides h.
            v_BgSV: values of the same tokens; their width may differ.
            heads: which of all query heads these are.
            start: position of the first query.
        """


class Context(ABC):
    """The part of each sequence that this rank computes."""

    ranks: int
    """Ranks that share a sequence: t = T / ranks."""

    @abstractmethod
    def cut(self, full: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor with T elements along ``dim``, in the order of positions."""

    @abstractmethod
    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """Mask with which ``attend`` keeps segments apart.

        Args:
            segments_BT: of the full sequences; a token sees earlier tokens of equal segment number.
            ops: of the attentions.
            dtype: of queries and keys.
        """

    @abstractmethod
    def attend(
        self,
        q_BHtK: Tensor,
        k_BGtK: Tensor,
        v_BGtK: Tensor,
        ops: Ops,
        chunk_len: int | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Causal attention of this rank's queries over the full sequence; returns their shape.

        Args:
            q_BHtK: queries of this rank's part.
            k_BGtK: keys of the same part.
            v_BGtK: values of the same part.
            ops: of the attention.
            chunk_len: length of the chunks within which tokens attend; None for the full sequence.
            mask: result of ``mask``, which has the chunks in it; None for one document.
        """

    def attend_rows(
        self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtV: Tensor, attend: RowAttention
    ) -> Tensor:
        """Attention by a function of rows over the full sequence; returns (B, H, t, V).

        Models with windows, sinks or masks of their own use it. Not every context has it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention of rows")


class FullSequences(Context):
    """One rank computes each sequence."""

    ranks = 1

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """The tensor itself."""
        return full

    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """The kernel's own mask."""
        return ops.document_attention.mask(segments_BT, dtype)

    def attend(
        self,
        q_BHtK: Tensor,
        k_BGtK: Tensor,
        v_BGtK: Tensor,
        ops: Ops,
        chunk_len: int | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Attention without communication."""
        if mask is not None:
            return ops.document_attention.attend(q_BHtK, k_BGtK, v_BGtK, mask)
        B, _, T, _ = q_BHtK.shape
        if chunk_len is None or chunk_len >= T:
            return ops.attention(q_BHtK, k_BGtK, v_BGtK)
        out = ops.attention(
            *(_fold_chunks(x, chunk_len) for x in (q_BHtK, k_BGtK, v_BGtK))
        )
        return out.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)[:, :, :T]

    def attend_rows(
        self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtV: Tensor, attend: RowAttention
    ) -> Tensor:
        """All rows of all heads."""
        return attend(q_BHtK, k_BGtK, v_BGtV, slice(0, q_BHtK.shape[1]), 0)


FULL_SEQUENCES = FullSequences()


class Wrapped(Context):
    """Another context. A subclass changes its attention."""

    def __init__(self, inner: Context) -> None:
        self.ranks = inner.ranks
        self.inner = inner

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """The inner context's part."""
        return self.inner.cut(full, dim)

    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """The inner context's mask."""
        return self.inner.mask(segments_BT, ops, dtype)

    def attend(self, *args: Any) -> Tensor:
        """The inner context's attention."""
        return self.inner.attend(*args)

    def attend_rows(self, *args: Any) -> Tensor:
        """The inner context's attention of rows."""
        return self.inner.attend_rows(*args)


class Uncompiled(Wrapped):
    """A context that the compiler does not see into."""

    @leave_uncompiled
    def attend(self, *args: Any) -> Tensor:
        """The inner context's attention."""
        return self.inner.attend(*args)

    @leave_uncompiled
    def attend_rows(self, *args: Any) -> Tensor:
        """The inner context's attention of rows."""
        return self.inner.attend_rows(*args)


def _fold_chunks(x_BHTK: Tensor, chunk_len: int) -> Tensor:
    """Make each chunk a sequence of its own: (B·chunks, H, C, K); no token attends to the zeros at
    the end."""
    padded = F.pad(x_BHTK, (0, 0, 0, -x_BHTK.shape[2] % chunk_len))
    return padded.unflatten(2, (-1, chunk_len)).transpose(1, 2).flatten(0, 1)
