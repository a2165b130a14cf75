"""The toy's context parallelism as a strategy: the toy DDP over parts of sequences
(``mesh.cp_size``).

DDP's sum over all ranks adds up the gradients of other sequences and of other parts of the same one
alike, so only the model's context is new: the cut, and attention by the toy's functions.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.models import Context
from fsdptoys.models.context import FULL_SEQUENCES, RowAttention
from fsdptoys.models.ops import Ops
from fsdptoys.toys.cp import RingAttention, own_positions, ulysses_attention

from .context import ContextForm
from .toy_ddp import ToyDDP, ToyDDPConfig


class ToyContext(Context):
    """A part of each sequence, by the toy's functions."""

    def __init__(self, group: dist.ProcessGroup, form: ContextForm) -> None:
        self.ranks = group.size()
        self._group = group
        self._is_ring = form is ContextForm.ring

    def cut(self, full: Tensor, dim: int) -> Tensor:
        """This rank's positions."""
        own = own_positions(
            full.shape[dim], self.ranks, self._group.rank(), self._is_ring
        )
        return full.index_select(dim, own.to(full.device))

    def mask(self, segments_BT: Tensor, ops: Ops, dtype: torch.dtype) -> Any:
        """The kernel's own mask; a ring takes none."""
        assert not self._is_ring
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
        """Attend over the full sequence; a ring without chunks and masks."""
        if self._is_ring:
            out: Tensor = RingAttention.apply(q_BHtK, k_BGtK, v_BGtK, self._group, True)
            return out
        some_heads = partial(
            FULL_SEQUENCES.attend, ops=ops, chunk_len=chunk_len, mask=mask
        )
        return ulysses_attention(q_BHtK, k_BGtK, v_BGtK, self._group, some_heads)

    def attend_rows(
        self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtV: Tensor, attend: RowAttention
    ) -> Tensor:
        """Attend with this rank's heads; a ring does not."""
        if self._is_ring:
            return super().attend_rows(q_BHtK, k_BGtK, v_BGtV, attend)
        heads = q_BHtK.shape[1] // self.ranks
        first = self._group.rank() * heads

        def some_heads(q_BhTK: Tensor, k_BhTK: Tensor, v_BhTV: Tensor) -> Tensor:
            return attend(q_BhTK, k_BhTK, v_BhTV, slice(first, first + heads), 0)

        return ulysses_attention(q_BHtK, k_BGtK, v_BGtV, self._group, some_heads)


class ToyCP(ToyDDP):
    """The toy's DDP over parts of sequences."""

    config: "ToyCPConfig"

    def build_context(self, compiles: bool) -> Context:
        """Return the toy's functions."""
        assert self.context_group is not None
        return ToyContext(self.context_group, self.config.context)


@dataclass
class ToyCPConfig(ToyDDPConfig):
    """The full model on every rank, and a part of each sequence, from scratch."""

    name: ClassVar[str] = "toy_cp"
    strategy = ToyCP
    capabilities = replace(
        ToyDDPConfig.capabilities,
        context_forms=(ContextForm.ulysses, ContextForm.ring),
        compiled_context=False,
        ring_kernels=False,
    )
