"""Resharding to fewer ranks after the forward: a smaller all-gather in the backward, for more memory in between."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .internals import as_dtensor
from .layout import Piece, lay_out
from .replacement import ReplaceableUnit


class ShrinkingUnit(ReplaceableUnit):
    """A unit that may be sharded over fewer ranks between forward and backward.

    Attributes:
        smaller_mesh: its last axis has those ranks; None to reshard fully.
    """

    smaller_mesh: DeviceMesh | None = None
    _smaller_S: Tensor | None = None
    """The shard between forward and backward."""

    def gather_source(self) -> tuple[Tensor, list[Piece], dist.ProcessGroup]:
        """Return the shard over fewer ranks, if there is one."""
        if self.smaller_mesh is None or self._smaller_S is None:
            return super().gather_source()
        group = self.smaller_mesh.get_group(1)
        return self._smaller_S, lay_out(self.shapes, self.dims, group.size())[0], group

    @torch.no_grad()
    def shrink(self) -> None:
        """Reshard whole parameters to fewer ranks."""
        if self.smaller_mesh is None or not self.is_whole:
            return
        assert self.block is not None
        group = self.smaller_mesh.get_group(1)
        pieces, numel = lay_out(self.shapes, self.dims, group.size())
        self._smaller_S = self.block.new_zeros(numel)
        for param, piece in zip(self.params, pieces, strict=True):
            assert param.memory is not None
            local = piece.local_view(self._smaller_S, group.rank()).copy_(piece.local_part(param.memory, group.rank()))
            shown = as_dtensor(local, self.smaller_mesh, [Replicate(), Shard(piece.dim)], piece.shape)
            param.register(nn.Parameter(shown, param.sharded.requires_grad))
        self.block.untyped_storage().resize_(0)
        self.is_whole = False

    def adopt(self) -> None:
        """Take over replaced parameters while fully sharded."""
        if self._smaller_S is None:
            super().adopt()

    def stop_shrinking(self) -> None:
        """Reshard fully from now on."""
        if self._smaller_S is not None:
            self.reshard()
        self.smaller_mesh = None

    def wait(self) -> None:
        """Drop the shard over fewer ranks once the parameters are whole."""
        super().wait()
        if self.is_whole:
            self._smaller_S = None

    def reshard(self) -> None:
        """Drop the shard over fewer ranks."""
        super().reshard()
        if self._smaller_S is not None:
            for param in self.params:
                param.register(param.sharded)
            self._smaller_S = None
