"""Initial values that do not depend on the layout, made a block of rows at a time.

Each parameter, seen as a matrix of its last dim, is split into blocks of consecutive rows, by its
shape alone. The values of a block come from a generator seeded by (seed, parameter name, block), so
every rank makes only the blocks that overlap its shard, and the same seed gives the same model on 1
or 1,000 ranks. Threads draw the blocks of a parameter in parallel, as PyTorch releases the GIL
meanwhile. Beyond its shard, a rank's peak of host memory is one block for each thread.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from torch import Tensor, nn

from fsdptoys.models import DecoderModel
from fsdptoys.utils.dtensor import is_dtensor, local_bounds
from fsdptoys.utils.seeds import seed_of

BLOCK_ELEMENTS = 2**22
"""Largest block, unless one row is larger: 16 MiB of float32."""

InitRows = Callable[[str, Tensor, torch.Generator], None]
"""``init_rows(name, rows, generator)`` fills consecutive rows of the named parameter, seen as a
matrix, in place."""

ParamInit = Callable[[Tensor, str], None]
"""``param_init(param, name)`` writes initial values into a materialized parameter, or into this
rank's shard of it."""


def seeded(
    init_rows: InitRows,
    seed: int,
    threads: int = 1,
    zero_rows: Mapping[str, Sequence[int]] | None = None,
) -> ParamInit:
    """Draw initial values from the run's seed; see :func:`initialize`.

    Args:
        init_rows: fills rows.
        seed: of the run's initial values.
        threads: draw values.
        zero_rows: name of a parameter → rows of it that are zero.
    """
    zeros = zero_rows or {}
    return lambda param, name: initialize(
        param, name, init_rows, seed, threads, zeros.get(name, ())
    )


@torch.no_grad()
def initialize(
    param: Tensor,
    name: str,
    init_rows: InitRows,
    seed: int,
    threads: int = 1,
    zero_rows: Sequence[int] = (),
) -> None:
    """Write initial values into a materialized parameter, or into this rank's shard of it.

    Args:
        param: a plain tensor, or a DTensor that ``utils.dtensor.local_bounds`` supports.
        name: the model's own name of the parameter, which with ``seed`` seeds its generator.
        init_rows: called in ``threads`` threads at once.
        seed: of the run's initial values.
        threads: draw values.
        zero_rows: rows that are zero.
    """
    local = (param.to_local() if is_dtensor(param) else param).detach()
    if local.numel() == 0:
        return
    bounds = local_bounds(param)
    columns = param.shape[-1] if param.ndim > 1 else 1
    first_column, last_column = bounds[-1] if param.ndim > 1 else (0, 1)
    local_rows = local.view(-1, last_column - first_column)
    rows_per_block = max(1, BLOCK_ELEMENTS // columns)
    row_count = param.numel() // columns
    # By block: rows of it, and their place in the shard
    parts: dict[int, list[tuple[slice, Tensor]]] = {}
    filled = 0
    for first, last in _row_intervals(tuple(param.shape), bounds):
        for block in range(first // rows_per_block, (last - 1) // rows_per_block + 1):
            start = block * rows_per_block
            rows = slice(max(first - start, 0), min(last - start, rows_per_block))
            count = rows.stop - rows.start
            parts.setdefault(block, []).append(
                (rows, local_rows[filled : filled + count])
            )
            filled += count

    # One block for each thread: new memory for each would cost page faults
    scratch = threading.local()

    @torch.no_grad()  # threads have modes of their own
    def draw(block: int) -> None:
        count = min(rows_per_block, row_count - block * rows_per_block)
        generator = torch.Generator().manual_seed(seed_of(seed, name, block))
        if not hasattr(scratch, "block"):
            scratch.block = torch.empty(
                min(rows_per_block, row_count), columns, dtype=torch.float32
            )
        drawn = scratch.block[:count]
        init_rows(name, drawn, generator)
        first = block * rows_per_block
        for row in zero_rows:
            if first <= row < first + count:
                drawn[row - first] = 0
        for rows, target in parts[block]:
            target.copy_(drawn[rows, first_column:last_column])

    if threads == 1 or len(parts) == 1:
        for block in parts:
            draw(block)
        return
    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        deque(pool.map(draw, parts), maxlen=0)  # raises a thread's error


def _row_intervals(
    shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int]]:
    """Intervals of this rank's rows of the matrix, in the order of its shard."""
    *outer, (first, last) = bounds[:-1] if len(shape) > 1 else bounds
    for index in product(*(range(low, high) for low, high in outer)):
        offset = sum(
            i * math.prod(shape[dim + 1 : len(outer) + 1])
            for dim, i in enumerate(index)
        )
        yield offset + first, offset + last


def materialize(
    model: DecoderModel, device: torch.device, param_init: ParamInit
) -> None:
    """Allocate every parameter on ``device`` and fill it with initial values.

    Shared parameters stay shared. Sharded parameters (DTensors) get memory for their shard only.
    """
    shared = shared_parameters(model)
    model.to_empty(device=device)
    for alias, name in shared.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(name))
    for name, param in model.named_parameters():
        param_init(param, name)


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """Second and later names of each shared parameter → its first name."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[param]
        for name, param in model.named_parameters(remove_duplicate=False)
        if first.setdefault(param, name) != name
    }


def init_buffers(
    model: DecoderModel,
    device: torch.device,
    buffer_dtype: torch.dtype,
    param_dtype: torch.dtype = torch.float32,
) -> None:
    """Compute the model's buffers on ``device`` and cast floating-point ones; see
    ``DecoderModel.cast_buffers``."""
    model.init_buffers(device)
    model.cast_buffers(buffer_dtype, param_dtype)
