"""Storage backend of torch.distributed.checkpoint that writes and reads safetensors files.

``SafetensorsWriter`` and ``SafetensorsReader`` replace PyTorch's FileSystemWriter and
FileSystemReader. They need planners that do not flatten, because state dicts hold only tensors by
name.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import dataclasses
import math
import os
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdptoys.device import is_accelerator

from . import shard_format
from .pinned_copy import PinnedBuffers
from .shard_format import (
    CHUNK_DTYPES,
    DTYPE_NAMES,
    INDEX_FILE,
    Chunk,
    ChunkForm,
    ChunkPlace,
    StoredTensor,
)
from .storage import Storage

T = TypeVar("T")


class _UnplannedIO:
    """Parts of DCP's interface without effect here: each object serves one save or load of a given
    folder."""

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    set_up_storage_writer = set_up_storage_reader = reset

    def prepare_global_plan(self, plan: Any) -> Any:
        return plan

    prepare_local_plan = prepare_global_plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class SafetensorsWriter(_UnplannedIO, dcp.StorageWriter):
    """Writes this rank's part of a plan into one safetensors file, and the index on rank 0."""

    def __init__(self, storage: Storage, folder: str, rank: int) -> None:
        self.files: list[str] = []  # names of the written files
        self._storage, self._folder, self._rank = storage, folder, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file unless its plan is empty."""
        items = {_key(item): item for item in plan.items}
        assert len(items) == len(plan.items), "two chunks of one name"
        file = shard_format.file_name(self._rank)
        if items:
            forms = {key: _form(item) for key, item in items.items()}
            # Resolved lazily: each tensor may be copied from an accelerator.
            chunks = (
                (key, planner.resolve_data(items[key])) for key in shard_format.in_file_order(forms)
            )
            shard_format.write_chunks(self._storage, f"{self._folder}/{file}", forms, chunks)  # type: ignore[arg-type]
            self.files.append(file)
        results = [
            WriteResult(item.index, _form(item).nbytes, (file, key)) for key, item in items.items()
        ]
        return _completed(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        by_tensor: dict[str, list[Chunk]] = {}
        for index, (file, key) in places.items():
            tensor = metadata.state_dict_metadata[index.fqn]
            assert isinstance(tensor, TensorStorageMetadata) and index.index is not None
            chunk = tensor.chunks[index.index]
            by_tensor.setdefault(index.fqn, []).append(
                Chunk(file, key, tuple(chunk.offsets), tuple(chunk.sizes))
            )
        stored = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = tuple(sorted(by_tensor[name], key=lambda chunk: chunk.offsets))
            stored[name] = StoredTensor(
                DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), chunks
            )
        shard_format.write_index(self._storage, self._folder, stored)
        self.files.append(INDEX_FILE)


class SafetensorsReader(_UnplannedIO, dcp.StorageReader):
    """Reads a plan's parts from the files of ``SafetensorsWriter``; ``index`` has all requested
    tensors."""

    def __init__(self, storage: Storage, folder: str, index: dict[str, StoredTensor]) -> None:
        self._storage, self._folder, self._index = storage, folder, index
        self._chunks = {
            (name, chunk.offsets): chunk
            for name, tensor in index.items()
            for chunk in tensor.chunks
        }
        self._places: dict[tuple[str, str], ChunkPlace] = {}  # by file and key

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the index in the form PyTorch's planner expects."""
        metadata: dict[str, Any] = {}
        for name, tensor in self._index.items():
            places = [
                (torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
            ]
            chunks = [dcp_metadata.ChunkStorageMetadata(*place) for place in places]
            properties = dcp_metadata.TensorProperties(dtype=CHUNK_DTYPES[tensor.dtype])
            metadata[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Locate the chunks, so that all ranks learn of a damaged header (a ConfigError) before any
        tensor is read."""
        items = [item for item in plan.items if math.prod(item.lengths)]
        wanted: dict[str, dict[str, ChunkForm]] = {}
        for item in items:
            chunk = self._chunk(item.storage_index)
            dtype = CHUNK_DTYPES[self._index[item.storage_index.fqn].dtype]
            wanted.setdefault(chunk.file, {})[chunk.key] = ChunkForm(dtype, chunk.sizes)
        for file, forms in wanted.items():
            places = shard_format.read_places(self._storage, f"{self._folder}/{file}", forms)
            self._places |= {(file, key): place for key, place in places.items()}
        return dataclasses.replace(plan, items=items)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the required rows file by file, in file order."""
        by_file: dict[str, list[tuple[ChunkPlace, Any]]] = {}
        buffers: dict[torch.device, PinnedBuffers] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            by_file.setdefault(chunk.file, []).append((self._places[chunk.file, chunk.key], item))
        for file, items in by_file.items():
            with self._storage.reading(f"{self._folder}/{file}") as opened:
                for place, item in sorted(items, key=lambda pair: pair[0].start):
                    into = planner.resolve_tensor(item).detach()
                    if is_accelerator(into.device) and into.device not in buffers:
                        buffers[into.device] = PinnedBuffers(into.device)
                    _read_part(
                        opened, place, tuple(item.storage_offsets), into, buffers.get(into.device)
                    )
                    planner.commit_tensor(item, into)
        for each in buffers.values():
            each.finish()
        return _completed(None)

    def _chunk(self, index: Any) -> Chunk:
        return self._chunks[index.fqn, tuple(index.offset)]


def _read_part(
    file: Any,
    place: ChunkPlace,
    offsets: tuple[int, ...],
    into: Tensor,
    buffers: PinnedBuffers | None,
) -> None:
    """Fill a tensor with the part of a chunk starting at ``offsets``."""
    shape = place.form.shape
    first = offsets[0] if shape else 0
    if into.shape[1:] == shape[1:] and into.is_contiguous():
        shard_format.read_rows(file, place, first, into, buffers)
        return
    rows = torch.empty((into.shape[0], *shape[1:]) if shape else (), dtype=place.form.dtype)
    shard_format.read_rows(file, place, first, rows)
    for dim, (offset, length) in enumerate(zip(offsets[1:], into.shape[1:], strict=True), start=1):
        rows = rows.narrow(dim, offset, length)
    into.copy_(rows)


def _completed(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _data(item: WriteItem) -> Any:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data


def _form(item: WriteItem) -> ChunkForm:
    data = _data(item)
    return ChunkForm(data.properties.dtype, tuple(data.chunk.sizes))


def _key(item: WriteItem) -> str:
    """A chunk's name in its file: the tensor's name, plus offsets for a part, as in
    ``weight@128,0``."""
    data, name = _data(item), item.index.fqn
    return (
        name
        if data.chunk.sizes == data.size
        else f"{name}@{','.join(map(str, data.chunk.offsets))}"
    )
