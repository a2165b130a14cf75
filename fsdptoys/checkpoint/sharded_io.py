"""Saving and loading tensors of any layout, on any number of ranks, as a folder of safetensors
files.

Each rank offers its shards, as boxes within the full tensors. Rank 0 chooses one rank to write each
box, so replicated tensors are written once, spread over the ranks. To load, each rank reads the
parts of the saved boxes that overlap its own. ``torch.distributed.checkpoint`` plans likewise, but
pickles its metadata, and a pickle can run code when it is loaded.

Only the given group is used for communication, since a save may run in a thread during training.
Tensors on an accelerator are read on the calling thread's current stream. Not covered: checksums of
what is read, and detection of incomplete folders (see ``manifest``).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.device import is_accelerator
from fsdptoys.errors import ConfigError
from fsdptoys.utils.dtensor import local_bounds, local_tensor
from fsdptoys.utils.sealed_folder import FileSum

from . import shard_format
from .pinned_copy import PinnedBuffers
from .ranks import Ranks
from .safetensors_io import shape_text, slices
from .shard_format import (
    DTYPE_NAMES,
    INDEX_FILE,
    Chunk,
    ChunkForm,
    ChunkPlace,
    StoredTensor,
)
from .storage import Storage

GatherFull = Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor | None]]]
"""Gathers tensors one by one: yields the name, and the full CPU tensor on rank 0, None
elsewhere."""


def save_tensors(
    storage: Storage,
    folder: str,
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    gather_full: GatherFull | None = None,
) -> dict[str, FileSum]:
    """Write tensors into an existing folder; return the sums of this rank's files. Collective.

    The folder has no other writers. ``tensors`` are DTensors, or plain tensors equal on all ranks
    that have the name (stages of a pipeline have others), and must not change until this returns.
    ``group`` is for CPU tensors, otherwise unused meanwhile; None for one process. With
    ``gather_full`` rank 0 writes full tensors, one by one; it may use groups of its own. An OSError
    is raised on this rank only.
    """
    ranks = Ranks(group)
    file = shard_format.file_name(ranks.rank)
    offers: dict[str, StoredTensor] = {}
    if gather_full is None or ranks.rank == 0:
        for name, tensor in tensors.items():
            offers[name] = _offer(file, name, tensor, in_full=gather_full is not None)
    index, shares = _choose(ranks.gather(offers), ranks.size)
    share: list[str] = ranks.scatter(shares)
    names = _in_file_order(tensors, share)
    forms = {}
    for name in names:
        chunk = offers[name].chunks[0]
        forms[chunk.key] = ChunkForm(tensors[name].dtype, chunk.sizes)
    if gather_full is None:
        contents: Iterator[Tensor | None] = (
            local_tensor(tensors[name]) for name in names
        )
    else:
        contents = _gathered(tensors, gather_full)
    sums: dict[str, FileSum] = {}
    try:
        if forms:
            sums[file] = shard_format.write_chunks(
                storage, f"{folder}/{file}", forms, contents
            )
        if ranks.rank == 0:
            sums[INDEX_FILE] = shard_format.write_index(storage, folder, index)
    finally:
        # The other ranks wait in the collectives of ``gather_full`` even if a write has failed.
        for _ in contents:
            pass
    return sums


def _offer(file: str, name: str, tensor: Tensor, in_full: bool) -> StoredTensor:
    """Describe a tensor, with this rank's part as its only chunk; without a chunk for an empty part
    of a larger tensor."""
    shape = tuple(tensor.shape)
    bounds = tuple((0, size) for size in shape) if in_full else local_bounds(tensor)
    offsets = tuple(low for low, _ in bounds)
    sizes = tuple(high - low for low, high in bounds)
    key = name if sizes == shape else f"{name}@{','.join(map(str, offsets))}"
    is_offered = 0 not in sizes or 0 in shape
    chunks = (Chunk(file, key, offsets, sizes),) if is_offered else ()
    return StoredTensor(DTYPE_NAMES[tensor.dtype], shape, chunks)


def _choose(
    offers: list[dict[str, StoredTensor]], ranks: int
) -> tuple[dict[str, StoredTensor], list[list[str]]]:
    """Choose a rank to write each chunk: of those that have it, the one with the fewest bytes so
    far.

    Returns:
        The index, and for each rank the names of the tensors that it writes its chunk of.
    """
    tensors: dict[str, StoredTensor] = {}
    holders: dict[str, dict[Chunk, list[int]]] = {}
    for rank, offer in enumerate(offers):
        for name, tensor in offer.items():
            tensors.setdefault(name, tensor)
            for chunk in tensor.chunks:
                anywhere = replace(chunk, file="")
                holders.setdefault(name, {}).setdefault(anywhere, []).append(rank)
    written_bytes = [0] * ranks
    shares: list[list[str]] = [[] for _ in range(ranks)]
    index = {}
    for name, ranks_by_chunk in holders.items():
        chunks = []
        for chunk in sorted(ranks_by_chunk, key=lambda chunk: chunk.offsets):
            rank = min(ranks_by_chunk[chunk], key=lambda rank: written_bytes[rank])
            written_bytes[rank] += replace(tensors[name], shape=chunk.sizes).nbytes
            shares[rank].append(name)
            chunks.append(replace(chunk, file=shard_format.file_name(rank)))
        index[name] = replace(tensors[name], chunks=tuple(chunks))
    return index, shares


def _in_file_order(tensors: dict[str, Tensor], names: Iterable[str]) -> list[str]:
    """Sort names by descending element size, which aligns each chunk to its dtype."""
    return sorted(names, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _gathered(
    tensors: dict[str, Tensor], gather_full: GatherFull
) -> Iterator[Tensor | None]:
    """Yield full tensors in file order; ``gather_full`` may sort what it is given by name."""
    ordered = _in_file_order(tensors, tensors)
    for _, names in itertools.groupby(
        ordered, key=lambda name: tensors[name].dtype.itemsize
    ):
        for _, tensor in gather_full({name: tensors[name] for name in names}):
            yield tensor


class Part(NamedTuple):
    """A part of a tensor of this rank, to be read from a chunk."""

    key: str
    form: ChunkForm  # of the chunk
    offsets: tuple[int, ...]  # in the chunk
    into: Tensor


def load_tensors(
    storage: Storage,
    folder: str,
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Fill tensors in place from a folder that any number of ranks saved. Collective; ``group`` as
    in ``save_tensors``.

    ``tensors`` have the saved dtypes and shapes, and any layout; ranks may have others, and the
    folder may hold more. ConfigError on all ranks, before anything is filled, if a tensor is
    missing or differs in dtype or shape, or if the index or a header is damaged; OSError on all
    ranks if a file cannot be read.
    """
    ranks = Ranks(group)
    parts = ranks.on_all(lambda: _parts_by_file(storage, folder, tensors))
    places = ranks.on_all(lambda: _locate(storage, folder, parts))
    ranks.on_all(lambda: _read(storage, folder, parts, places))


def _parts_by_file(
    storage: Storage, folder: str, tensors: dict[str, Tensor]
) -> dict[str, list[Part]]:
    """Read the index; return what this rank reads from each file. ConfigError if a tensor is
    missing or has another form."""
    where = f"{storage.where}/{folder}"
    index = shard_format.read_index(storage, folder)
    missing = sorted(tensors.keys() - index.keys())
    if missing:
        more = f" nor {len(missing) - 1} others" if missing[1:] else ""
        raise ConfigError(
            f"{where} holds no {missing[0]}{more}, which this run has; resume with the model and "
            "the optimizer that it was saved with"
        )
    parts: dict[str, list[Part]] = {}
    for name, tensor in tensors.items():
        entry = index[name]
        form = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if (entry.dtype, entry.shape) != form:
            raise ConfigError(
                f"{where} holds {name} as {_text(entry.dtype, entry.shape)}, and this run has it "
                f"as {_text(*form)}; resume with the model and the optimizer that it was saved "
                "with"
            )
        bounds = local_bounds(tensor)
        local = local_tensor(tensor)
        starts = tuple(low for low, _ in bounds)
        for chunk in entry.chunks:
            overlap = tuple(
                (max(low, offset), min(high, offset + size))
                for (low, high), offset, size in zip(
                    bounds, chunk.offsets, chunk.sizes, strict=True
                )
            )
            if all(low < high for low, high in overlap):
                offsets = tuple(
                    low - offset
                    for (low, _), offset in zip(overlap, chunk.offsets, strict=True)
                )
                into = local[slices(overlap, origin=starts)]
                part = Part(
                    chunk.key, ChunkForm(tensor.dtype, chunk.sizes), offsets, into
                )
                parts.setdefault(chunk.file, []).append(part)
    return parts


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return (
        f"{dtype} of shape {shape_text(shape)}"
        if shape
        else f"a single number of {dtype}"
    )


def _locate(
    storage: Storage, folder: str, parts: dict[str, list[Part]]
) -> dict[str, dict[str, ChunkPlace]]:
    """Read the headers of the files of some parts; return file → key → place."""
    places = {}
    for file, of_file in parts.items():
        forms = {part.key: part.form for part in of_file}
        places[file] = shard_format.read_places(storage, f"{folder}/{file}", forms)
    return places


def _read(
    storage: Storage,
    folder: str,
    parts: dict[str, list[Part]],
    places: dict[str, dict[str, ChunkPlace]],
) -> None:
    """Read parts file by file, in file order."""
    buffers: PinnedBuffers | None = None
    for file, of_file in parts.items():
        with storage.reading(f"{folder}/{file}") as opened:
            for part in sorted(of_file, key=lambda part: places[file][part.key].start):
                on_device = is_accelerator(part.into.device)
                if on_device and buffers is None:
                    buffers = PinnedBuffers(part.into.device)
                place = places[file][part.key]
                _read_part(opened, place, part, buffers if on_device else None)
    if buffers is not None:
        buffers.finish()


def _read_part(
    file: BinaryIO, place: ChunkPlace, part: Part, buffers: PinnedBuffers | None
) -> None:
    into = part.into
    shape = part.form.shape
    first = part.offsets[0] if shape else 0
    if into.shape[1:] == shape[1:] and into.is_contiguous():
        shard_format.read_rows(file, place, first, into, buffers)
        return
    rows = torch.empty((into.shape[0], *shape[1:]), dtype=part.form.dtype)
    shard_format.read_rows(file, place, first, rows)
    for dim, (offset, length) in enumerate(zip(part.offsets, into.shape, strict=True)):
        if dim:
            rows = rows.narrow(dim, offset, length)
    into.copy_(rows)
