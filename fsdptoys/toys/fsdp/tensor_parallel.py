"""Parameters that another mesh has cut already, as tensor parallelism does: what FSDP shards is a rank's part of them.

    whole weight ── tensor parallel ──▶ DTensor over "tp" ── FSDP, of its local tensor ──▶ DTensor over "dp" and "tp"
                                        what modules see                                   what optimizers see

A unit knows nothing but local tensors. What it shows of them, to modules and to optimizers, gets the other mesh here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from .internals import join_meshes, local_tensor, strided_shard


@dataclass(frozen=True)
class Outer:
    """The other mesh of a parameter, and how it cuts."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Of the whole weight."""
    stride: tuple[int, ...]

    def show_whole(self, local: Tensor) -> DTensor:
        """What modules see: a DTensor over the other mesh alone."""
        return _dtensor(local, self.mesh, self.placements, self)

    def show_shard(self, local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        """What optimizers see: a DTensor over both meshes.

        Args:
            local: this rank's part of its part.
            mesh: FSDP's.
            placements: over that.
        """
        dim = placements[-1].dim  # type: ignore[attr-defined]
        parts = 1
        for axis, placement in enumerate(self.placements):
            parts *= self.mesh.size(axis) if placement.is_shard(dim) else 1
        # Where both cut along one dim, neighbouring rows of the whole are not with neighbouring ranks of FSDP's mesh.
        inner = strided_shard(dim, parts) if parts > 1 else Shard(dim)
        return _dtensor(local, join_meshes(mesh, self.mesh), (*placements[:-1], inner, *self.placements), self)

    def take_gradient(self, grad: Tensor) -> Tensor:
        """This rank's part of a gradient, which may be cut otherwise than the weight, or be yet to be summed."""
        assert isinstance(grad, DTensor)
        return local_tensor(grad.redistribute(placements=self.placements))


def outer_of(name: str, param: nn.Parameter, mesh: DeviceMesh) -> Outer | None:
    """The other mesh of a parameter, if there is one.

    Raises:
        ValueError: if it is of other devices.
        NotImplementedError: if it has not axes of its own.
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


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], outer: Outer) -> DTensor:
    with torch.no_grad():  # or the conversion would be part of what autograd sees
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=outer.shape, stride=outer.stride)
