"""Initial values that do not depend on the layout, made without ever holding more than a block of rows.

Each parameter is cut into blocks of consecutive rows, by its shape alone. The values of a block come from a generator
seeded by (seed, parameter name, block), so every rank makes just the blocks that overlap its shard, and the same seed
gives the same model on 1 or 1,000 ranks. A rank's peak of host memory is its shard plus one block.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

BLOCK_ELEMENTS = 2**22
"""Largest block, unless one row is larger: 16 MiB of float32."""

InitRows = Callable[[str, Tensor, torch.Generator], None]
"""``init_rows(name, rows, generator)`` fills consecutive rows of the named parameter in place."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def initialise(param: Tensor, name: str, init_rows: InitRows, seed: int) -> None:
    """Fill a materialised parameter, or this rank's shard of it, with its initial values in place.

    Args:
        param: a plain tensor, or a DTensor whose placements shard evenly-chunked dims (``torch.chunk``) or replicate.
        name: the model's own name of the parameter.
        init_rows: fills consecutive rows of the named parameter.
        seed: the run's seed for initial values.
    """
    local = param.to_local() if isinstance(param, DTensor) else param
    bounds = _local_bounds(param)
    if local.numel() == 0:
        return
    first, last = bounds[0]
    rows_per_block = max(1, BLOCK_ELEMENTS // param.shape[1:].numel())
    for block in range(first // rows_per_block, (last - 1) // rows_per_block + 1):
        start = block * rows_per_block
        stop = min(start + rows_per_block, param.shape[0])
        rows = torch.empty(stop - start, *param.shape[1:], dtype=torch.float32)
        init_rows(name, rows, torch.Generator().manual_seed(seed_of(seed, name, block)))
        lower, upper = max(first, start), min(last, stop)
        part = (slice(lower - start, upper - start), *(slice(low, high) for low, high in bounds[1:]))
        local[lower - first : upper - first].copy_(rows[part])
        del rows  # before the next block is made, or there would be two


def _local_bounds(param: Tensor) -> list[tuple[int, int]]:
    """Bounds of this rank's part of each dim of the full tensor."""
    bounds = [(0, size) for size in param.shape]
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                start, stop = bounds[placement.dim]
                chunk = -(-(stop - start) // param.device_mesh.size(axis))
                low = min(start + chunk * coordinate[axis], stop)
                bounds[placement.dim] = (low, min(low + chunk, stop))
    return bounds
