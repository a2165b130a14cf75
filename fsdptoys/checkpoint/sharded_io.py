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
from collections.abc import Callable, Container, Iterable, Iterator
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
    ChunkLocation,
    ShardFiles,
    StoredTensor,
)
from .storage import Storage

GatherFull = Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor | None]]]
"""Gathers tensors one by one: yields the name, and the full CPU tensor on rank 0, None
elsewhere."""


MOST_LEVELS = 64
"""Dots in the name of an optimizer's state; a damaged index may have thousands."""


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
    offers: dict[str, StoredTensor] = {}
    if gather_full is None or ranks.rank == 0:
        for name, tensor in tensors.items():
            offers[name] = _offer(name, tensor, in_full=gather_full is not None)
    index, shares = _choose(ranks.gather(offers), ranks.size)
    share: list[str] = ranks.scatter(shares)
    names = _in_file_order(ranks.rank, tensors, share)
    if gather_full is None:
        contents: Iterator[Tensor | None] = (
            local_tensor(tensors[name]) for name in names
        )
    else:
        contents = _gathered(tensors, gather_full)
    sums: dict[str, FileSum] = {}
    try:
        for file, of_file in itertools.groupby(
            names, lambda name: ShardFiles.file_of(ranks.rank, name)
        ):
            forms = {}
            for name in of_file:
                chunk = offers[name].chunks[0]
                forms[chunk.key] = ChunkForm(tensors[name].dtype, chunk.sizes)
            sums[file] = shard_format.write_chunks(
                storage,
                f"{folder}/{file}",
                forms,
                itertools.islice(contents, len(forms)),
            )
        if ranks.rank == 0:
            sums[INDEX_FILE] = shard_format.write_index(storage, folder, index)
    finally:
        # The other ranks wait in the collectives of ``gather_full`` even if a write has failed.
        for _ in contents:
            pass
    return sums


def _offer(name: str, tensor: Tensor, in_full: bool) -> StoredTensor:
    """Describe a tensor, with this rank's part as its only chunk, in no file yet; without a chunk
    for an empty part of a larger tensor."""
    shape = tuple(tensor.shape)
    bounds = tuple((0, size) for size in shape) if in_full else local_bounds(tensor)
    offsets = tuple(low for low, _ in bounds)
    sizes = tuple(high - low for low, high in bounds)
    key = name if sizes == shape else f"{name}@{','.join(map(str, offsets))}"
    is_offered = 0 not in sizes or 0 in shape
    chunks = (Chunk("", key, offsets, sizes),) if is_offered else ()
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
                holders.setdefault(name, {}).setdefault(chunk, []).append(rank)
    written_bytes = [0] * ranks
    shares: list[list[str]] = [[] for _ in range(ranks)]
    index = {}
    for name, ranks_by_chunk in holders.items():
        chunks = []
        for chunk in sorted(ranks_by_chunk, key=lambda chunk: chunk.offsets):
            rank = min(ranks_by_chunk[chunk], key=lambda rank: written_bytes[rank])
            written_bytes[rank] += replace(tensors[name], shape=chunk.sizes).nbytes
            shares[rank].append(name)
            chunks.append(replace(chunk, file=ShardFiles.file_of(rank, name)))
        index[name] = replace(tensors[name], chunks=tuple(chunks))
    return index, shares


def _in_file_order(
    rank: int, tensors: dict[str, Tensor], names: Iterable[str]
) -> list[str]:
    """Sort the names by which a rank writes: by file, and there by descending element size, which
    aligns each chunk to its dtype."""
    return sorted(
        names,
        key=lambda name: (
            ShardFiles.file_of(rank, name),
            -tensors[name].dtype.itemsize,
            name,
        ),
    )


def _gathered(
    tensors: dict[str, Tensor], gather_full: GatherFull
) -> Iterator[Tensor | None]:
    """Yield full tensors in rank 0's file order; ``gather_full`` may sort what it is given by
    name."""
    ordered = _in_file_order(0, tensors, tensors)
    for _, names in itertools.groupby(
        ordered,
        lambda name: (ShardFiles.file_of(0, name), tensors[name].dtype.itemsize),
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
    weights_only: bool = False,
) -> None:
    """Fill tensors in place from a folder that any number of ranks saved. Collective; ``group`` as
    in ``save_tensors``.

    ``tensors`` have the saved dtypes and shapes, and any layout; ranks may have others, and the
    folder may hold more. ConfigError on all ranks, before anything is filled, if a tensor is
    missing or differs in dtype or shape, if the index or a header is damaged, or if a parameter's
    optimizer states are left out without ``weights_only``; OSError on all ranks if a file cannot be
    read.
    """
    ranks = Ranks(group)
    parts = ranks.on_all(lambda: _parts_by_file(storage, folder, tensors, weights_only))
    located = ranks.on_all(lambda: _locate(storage, folder, parts))
    ranks.on_all(lambda: _read(storage, folder, located))


def _parts_by_file(
    storage: Storage, folder: str, tensors: dict[str, Tensor], weights_only: bool
) -> dict[str, list[Part]]:
    """Read the index; return what this rank reads from each file. ConfigError if a tensor is
    missing or has another form, or a state would be left out."""
    where = f"{storage.where}/{folder}"
    index = shard_format.read_index(storage, folder)
    missing = sorted(tensors.keys() - index.keys())
    if missing:
        more = f" nor {len(missing) - 1} others" if missing[1:] else ""
        raise ConfigError(
            f"{where} holds no {missing[0]}{more}, which this run has; resume with the model and "
            "the optimizer that it was saved with"
        )
    states = sorted(
        name for name in index.keys() - tensors.keys() if parameter_of(name, tensors)
    )
    if states and not weights_only:
        more = f" and {len(states) - 1} others" if states[1:] else ""
        raise ConfigError(
            f"{where} holds {states[0]}{more}, a state that this run's optimizer does not have; "
            "resume with the optimizer and the settings that it was saved with"
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


def parameter_of(name: str, names: Container[str]) -> str | None:
    """Return the parameter of an optimizer state; None for other tensors, and for parameters that
    are not among ``names``."""
    group, _, param = name.partition(".")
    for _ in range(MOST_LEVELS if group == "optim" else 0):
        param = param.rpartition(".")[0]
        if f"model.{param}" in names:
            return param
    return None


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return (
        f"{dtype} of shape {shape_text(shape)}"
        if shape
        else f"a single number of {dtype}"
    )


def _locate(
    storage: Storage, folder: str, parts: dict[str, list[Part]]
) -> dict[str, list[tuple[ChunkLocation, Part]]]:
    """Read the headers of the files of some parts; return the parts of each file in its order."""
    located = {}
    for file, of_file in parts.items():
        forms = {part.key: part.form for part in of_file}
        locations = shard_format.read_locations(storage, f"{folder}/{file}", forms)
        pairs = [(locations[part.key], part) for part in of_file]
        located[file] = sorted(pairs, key=lambda pair: pair[0].start)
    return located


def _read(
    storage: Storage, folder: str, located: dict[str, list[tuple[ChunkLocation, Part]]]
) -> None:
    buffers: PinnedBuffers | None = None
    for file, pairs in located.items():
        with storage.reading(f"{folder}/{file}") as opened:
            for location, part in pairs:
                on_device = is_accelerator(part.into.device)
                if on_device and buffers is None:
                    buffers = PinnedBuffers(part.into.device)
                _read_part(opened, location, part, buffers if on_device else None)
    if buffers is not None:
        buffers.finish()


def _read_part(
    file: BinaryIO, location: ChunkLocation, part: Part, buffers: PinnedBuffers | None
) -> None:
    into = part.into
    shape = part.form.shape
    first = part.offsets[0] if shape else 0
    if into.shape[1:] == shape[1:] and into.is_contiguous():
        shard_format.read_rows(file, location, first, into, buffers)
        return
    rows = torch.empty((into.shape[0], *shape[1:]), dtype=part.form.dtype)
    shard_format.read_rows(file, location, first, rows)
    for dim, (offset, length) in enumerate(zip(part.offsets, into.shape, strict=True)):
        if dim:
            rows = rows.narrow(dim, offset, length)
    into.copy_(rows)
