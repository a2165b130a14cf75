"""Local tensors of DTensors and of torchao's float8 wrappers."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Return whether a tensor is a DTensor."""
    # takes a second to import; loaded if a DTensor exists
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor, sharing memory with ``tensor``."""
    with torch.no_grad():  # else the local tensor would be a view in the autograd graph
        local = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
        if is_wrapped(local):
            local = local._tensor.detach()  # type: ignore[attr-defined]
        return local


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's local tensors, sharing memory with ``tensors``; parameters stay
    parameters. Takes less host time."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = module.DTensor if module is not None else ()
    with torch.no_grad():
        locals_: list[Tensor] = [
            tensor.to_local() if isinstance(tensor, kind) else tensor
            for tensor in tensors
        ]
        return [
            local_tensor(tensor) if is_wrapped(tensor) else tensor for tensor in locals_
        ]


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is torchao's wrapper, which FSDP2 all-gathers in float8."""
    return type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor"


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor or DTensor without torchao's wrapper, sharing its memory."""
    tensor = tensor.detach()
    if not is_dtensor(tensor) or not is_wrapped(tensor.to_local()):
        return tensor
    return type(tensor).from_local(
        local_tensor(tensor),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def full_tensor(tensor: "DTensor") -> Tensor:
    """Return the full tensor, gathered along one mesh axis after the other. A collective.

    DTensor's own ``full_tensor`` warns of several all-gathers where two axes shard one dim.
    """
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):
        if not placements[axis].is_replicate():
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def sharded_like(param: Tensor, local: Tensor) -> Tensor:
    """``local``; for a DTensor ``param``, a DTensor of ``local`` with its placements.

    ``DTensor.from_local`` would move it to the mesh's device.
    """
    if not is_dtensor(param):
        return local
    sharded = torch.empty_like(unwrapped(param), dtype=local.dtype, device=local.device)
    assert is_dtensor(sharded)
    sharded.to_local().set_(local)  # type: ignore[call-overload]
    assert (
        sharded.to_local().data_ptr() == local.data_ptr()
        and sharded.to_local().device == local.device
    )
    return sharded


def sharded_rows(param: Tensor, rows: Tensor) -> Tensor:
    """``rows``, or for a DTensor ``param``, a DTensor with its placements and this rank's rows of
    another length."""
    if not is_dtensor(param):
        return rows
    shape = torch.Size([*param.shape[:-1], rows.shape[-1]])
    return type(param).from_local(
        rows,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def local_bounds(param: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the start and stop index of this rank's shard in each dim of the full tensor, which
    must be one block of it.

    DTensors may have placements ``Shard`` (as by ``torch.chunk``), ``Replicate``, or the strided
    ones of FSDP2 where another axis shards the same dim.
    """
    bounds = [(0, size) for size in param.shape]
    if is_dtensor(param):
        from torch.distributed.tensor import Replicate, Shard

        if not all(
            type(placement) in (Shard, Replicate) for placement in param.placements
        ):
            return _strided_bounds(param)
        coordinate = param.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                start, stop = bounds[placement.dim]
                chunk = -(-(stop - start) // param.device_mesh.size(axis))
                low = min(start + chunk * coordinate[axis], stop)
                bounds[placement.dim] = (low, min(low + chunk, stop))
    return tuple(bounds)


def _strided_bounds(param: "DTensor") -> tuple[tuple[int, int], ...]:
    """``local_bounds`` by DTensor's own arithmetic: private, tried with torch 2.7.1, 2.11, 2.13 and
    2.15."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, starts = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return tuple(
        (start, start + length) for start, length in zip(starts, lengths, strict=True)
    )
