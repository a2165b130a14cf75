"""This rank's part of a unit's parameters, in one flat tensor that an all-gather sends as it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .collectives import all_gather
from .layout import Piece, lay_out
from .tensor_parallel import Outer


@dataclass
class Gathering:
    """An all-gather on its way."""

    flat_RS: Tensor
    pieces: list[Piece]
    shard: Tensor
    """What is sent; kept until it is."""
    work: dist.Work | None
    """None where there is nobody to wait for."""

    def wait(self) -> None:
        """Let what follows see the result."""
        if self.work is not None:
            self.work.wait()


@dataclass
class FlatShard:
    """A flat tensor and who has the rest of it.

    Args:
        mesh: one axis, over which parameters are sharded; or two, over whose first the shards are replicated.
        shapes: of the whole parameters.
        dims: along which each is cut.
        outers: the other mesh of each, of which ``shapes`` are parts then.
    """

    mesh: DeviceMesh
    shapes: Sequence[tuple[int, ...]]
    dims: Sequence[int]
    outers: Sequence[Outer | None]
    data: Tensor | None = None
    """[S]; None while this rank keeps no such shard."""
    pieces: list[Piece] = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.pieces, self.numel = lay_out(self.shapes, self.dims, self.ranks)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard; None where there are no others."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    def view(self, index: int) -> Tensor:
        """This rank's chunk of a parameter, in the memory of the flat tensor."""
        assert self.data is not None
        return self.pieces[index].local_view(self.data, self.rank)

    def dtensor(self, index: int, local: Tensor) -> DTensor:
        """Show a chunk of a parameter, or of its gradient, as a part of the whole."""
        placements: list[Placement] = [Replicate()] * (self.mesh.ndim - 1) + [Shard(self.dims[index])]
        outer = self.outers[index]
        if outer is not None:
            return outer.show_shard(local, self.mesh, placements)
        whole = torch.empty(self.shapes[index], device="meta")
        with torch.no_grad():  # or the conversion would be part of what autograd sees
            return DTensor.from_local(
                local, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """This rank's chunk of a whole parameter, as a view of it."""
        piece = self.pieces[index]
        size = piece.local_shape(self.rank)[piece.dim]
        first = min(self.rank * piece.chunk, piece.shape[piece.dim])
        return whole.narrow(piece.dim, first, size)

    def gather(self, dtype: torch.dtype) -> Gathering:
        """Begin to fetch the shards of all ranks, in a number format that may be smaller than the shard's own."""
        assert self.data is not None
        shard = self.data.to(dtype)
        if self.ranks == 1:
            return Gathering(shard.view(1, -1), self.pieces, shard, None)
        flat = torch.empty(self.ranks * self.numel, dtype=dtype, device=shard.device)
        return Gathering(flat.view(self.ranks, -1), self.pieces, shard, all_gather(flat, shard, self.group))
