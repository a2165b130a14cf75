"""Process groups along the axes of a mesh (``mesh``), and PyTorch's ``DeviceMesh`` of them."""

from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.device import Device

from .mesh import (
    EXCHANGING_AXES,
    EXPERT_AXIS,
    EXPERT_SHARD_AXIS,
    PIPE_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
    Axes,
)


def dense_mesh(axes: Axes, device: Device, timeout: timedelta | None) -> DeviceMesh:
    """Lay out the ranks of a stage as all parameters but those of experts see them: ``([replicate,]
    shard[, tp])``."""
    features = {TENSOR_AXIS: axes.tp} if axes.tp > 1 else {}
    return named_mesh(
        axes.copies | {SHARD_AXIS: axes.shard} | features, device, timeout, axes.pp
    )


def sparse_mesh(axes: Axes, device: Device, timeout: timedelta | None) -> DeviceMesh:
    """Lay out the ranks of a stage as parameters of experts see them: ``([replicate,] efsdp,
    ep)``."""
    sizes = axes.copies | {EXPERT_SHARD_AXIS: axes.efsdp, EXPERT_AXIS: axes.ep}
    return named_mesh(sizes, device, timeout, axes.pp)


def tensor_axis_first(mesh: DeviceMesh, axes: Axes, device: Device) -> DeviceMesh:
    """Exchange the last two axes of a dense mesh, which keep their groups.

    A parameter is split over tp, then each part over shard. Here that is the order of the axes, so
    that both may shard one dim with plain placements.
    """
    ranks = (
        own_stage(axes.pp)
        .reshape(*axes.copies.values(), axes.shard, axes.tp)
        .swapaxes(-1, -2)
    )
    assert mesh.mesh_dim_names is not None
    names = (*mesh.mesh_dim_names[:-2], TENSOR_AXIS, SHARD_AXIS)
    groups = [mesh.get_group(name) for name in names]
    return DeviceMesh.from_group(
        groups, device.type, torch.from_numpy(ranks.copy()), mesh_dim_names=names
    )


def named_mesh(
    sizes: dict[str, int], device: Device, timeout: timedelta | None, stages: int = 1
) -> DeviceMesh:
    """A mesh of named axes over the ranks of this rank's stage, the last varying fastest. A
    collective."""
    ranks = np.arange(dist.get_world_size()).reshape(stages, *sizes.values())
    groups = [
        axis_group(ranks, axis, name, timeout) for axis, name in enumerate(sizes, 1)
    ]
    if len(groups) == 1:
        return DeviceMesh.from_group(
            groups[0], device.type, mesh_dim_names=tuple(sizes)
        )
    own = torch.from_numpy(own_stage(stages).reshape(*sizes.values()).copy())
    return DeviceMesh.from_group(groups, device.type, own, mesh_dim_names=tuple(sizes))


def own_stage(stages: int) -> npt.NDArray[np.int64]:
    """The ranks that have the same layers as this one."""
    size = dist.get_world_size() // stages
    return np.arange(size) + dist.get_rank() // size * size


def build_pipe_groups(
    axes: Axes, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups along the stages, and of its own stage. A collective over all ranks."""
    ranks = np.arange(dist.get_world_size()).reshape(axes.pp, -1)
    return axis_group(ranks, 0, PIPE_AXIS, timeout), axis_group(
        ranks, 1, "stage", timeout
    )


def regular_group(
    size: int, name: str, timeout: timedelta | None, stride: int = 1
) -> dist.ProcessGroup:
    """This rank's group of ranks, consecutive or at a stride. A collective over all ranks."""
    return axis_group(
        np.arange(dist.get_world_size()).reshape(-1, size, stride), 1, name, timeout
    )


def axis_group(
    ranks: npt.NDArray[np.int64], axis: int, name: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    """This rank's group along an axis of a mesh of all ranks. A collective over all ranks.

    An axis of all ranks uses the default group, except for exchanges within layers, which would
    wait for the gathers that this group has queued.
    """
    world = dist.group.WORLD
    assert world is not None
    # Not tensors, whose values a planner's fake mode would not know.
    rows = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
    members = rows[(rows == dist.get_rank()).any(1)][0].tolist()
    if len(members) == dist.get_world_size() and name not in EXCHANGING_AXES:
        return world
    description = f"mesh_{name}"
    if world.bound_device_id is not None:
        # All ranks take part in one split, which makes all groups of an axis.
        split = dist.split_group(
            split_ranks=rows.tolist(), timeout=timeout, group_desc=description
        )
        assert split is not None
        return split
    # Only a group's own ranks take part, so the cost does not grow with the world.
    group: dist.ProcessGroup = dist.new_group(
        members, timeout=timeout, use_local_synchronization=True, group_desc=description
    )
    return group
