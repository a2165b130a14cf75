"""Parameters that tensor parallelism has sharded over another mesh: FSDP shards their local tensors.

whole weight ── tensor parallel ──▶ DTensor over "tp" ── FSDP, of its local tensor ──▶ DTensor over "dp" and "tp"
                                    as modules see it                                  as optimizers see it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .core import FSDPUnit
from .internals import as_dtensor, join_meshes, local_tensor, own_tensor, strided_shard


@dataclass(frozen=True)
class Outer:
    """The other mesh of a parameter."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Of the whole weight."""
    stride: tuple[int, ...]


class TensorParallelUnit(FSDPUnit):
    """A unit whose parameters may be DTensors over another mesh.

    Attributes:
        outers: the other mesh of each parameter, or None.
    """

    outers: Sequence[Outer | None]

    def local_value(self, param: nn.Parameter) -> Tensor:
        """Return the local tensor of a DTensor."""
        return own_tensor(param)

    def show_shard(self, index: int, local: Tensor) -> DTensor:
        """Add the other mesh, and FSDP's axis of replicas."""
        dim, outer = self.dims[index], self.outers[index]
        replicas: list[Placement] = [Replicate()] * (self.mesh.ndim - 1)
        if outer is None:
            return as_dtensor(local, self.mesh, [*replicas, Shard(dim)], self.shapes[index])
        axes = [axis for axis, placement in enumerate(outer.placements) if placement.is_shard(dim)]
        parts = math.prod(outer.mesh.size(axis) for axis in axes)
        # Where both meshes cut one dim, neighboring rows are not on neighboring ranks of FSDP's mesh.
        inner = strided_shard(dim, parts) if parts > 1 else Shard(dim)
        both = [*replicas, inner, *outer.placements]
        return as_dtensor(local, join_meshes(self.mesh, outer.mesh), both, outer.shape, outer.stride)

    def allocate(self, dtype: torch.dtype) -> None:
        """Make new whole parameters DTensors over the other mesh."""
        before = self.block
        super().allocate(dtype)
        if self.block is before:
            return
        with torch.inference_mode(False):
            for param, outer in zip(self.params, self.outers, strict=True):
                if outer is not None and param.memory is not None:
                    whole = as_dtensor(param.memory.data, outer.mesh, outer.placements, outer.shape, outer.stride)
                    param.whole = nn.Parameter(whole, param.sharded.requires_grad)

    @torch.no_grad()
    def take_gradients(self) -> dict[int, Tensor]:
        """Take this rank's part of gradients, which may be sharded otherwise than the weight, or partial."""
        taken = super().take_gradients()
        for index, grad in taken.items():
            outer = self.outers[index]
            if outer is not None and isinstance(grad, DTensor):
                taken[index] = local_tensor(grad.redistribute(placements=outer.placements))
        return taken


def outer_of(name: str, param: nn.Parameter, mesh: DeviceMesh) -> Outer | None:
    """Return the other mesh of a parameter, if there is one.

    Raises:
        ValueError: if it has other devices.
        NotImplementedError: if its axes have no names, or names of FSDP's axes.
    """
    if not isinstance(param, DTensor):
        return None
    other = param.device_mesh
    if other.device_type != mesh.device_type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{other.device_type} for DTensor and {mesh.device_type} for FSDP"
        )
    names, other_names = mesh.mesh_dim_names, other.mesh_dim_names
    if not names or not other_names or set(names) & set(other_names):
        raise NotImplementedError(
            f"parameter {name!r} is a DTensor over {other}: fully_shard wants a mesh of other axes, with names, from "
            f"the same DeviceMesh, but got {mesh}"
        )
    return Outer(other, tuple(param.placements), param.shape, tuple(param.stride()))
