"""``tensors.json``: the tensors of a checkpoint and the files of their chunks, the shards of the saving ranks.

The index is plain JSON, read strictly: a hostile index cannot name a file outside its folder, omit a part of a tensor,
or run code. It takes about 130 bytes per chunk, so 1000 tensors on 1000 ranks take 130 MB; the limit is 256 MiB.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_json

from .safetensors_chunks import CHUNK_DTYPES, OLDER, ChunkForm
from .storage import Storage

INDEX_FILE = "tensors.json"
FORMAT = 1
LARGEST_INDEX_BYTES = 256 * 2**20
FILE_NAME = re.compile(r"tensors-[0-9]{5,}\.safetensors")


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"tensors-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and its file."""

    file: str
    key: str  # its name in the file
    offsets: tuple[int, ...]  # its first index along each dim of the tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: str  # the safetensors name: ``F32``, ``BF16``
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]  # cover the tensor without overlap

    def form(self, chunk: Chunk) -> ChunkForm:
        """Return the dtype and shape of one of its chunks."""
        return ChunkForm(CHUNK_DTYPES[self.dtype], chunk.sizes)


def chunk_key(name: str, form: ChunkForm, offsets: Iterable[int], shape: Iterable[int]) -> str:
    """Return a chunk's name in its file: the tensor's name, plus offsets for a part, as in ``weight@128,0``."""
    return name if form.shape == tuple(shape) else f"{name}@{','.join(map(str, offsets))}"


def write_index(storage: Storage, folder: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the index of a checkpoint; ConfigError if it exceeds the size limit."""
    # The fields in their order; ``dataclasses.asdict`` would copy each.
    tree = {name: vars(each) | {"chunks": list(map(vars, each.chunks))} for name, each in sorted(tensors.items())}
    text = json.dumps({"format": FORMAT, "tensors": tree}, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > LARGEST_INDEX_BYTES:
        raise ConfigError(
            f"the index of {storage.where}/{folder} would take {len(text)} bytes, and at most {LARGEST_INDEX_BYTES} "
            "are read again; set checkpoint.form=full"
        )
    with storage.writing(f"{folder}/{INDEX_FILE}") as file:
        file.write(text)


def read_index(storage: Storage, folder: str) -> dict[str, StoredTensor]:
    """Read the index of a checkpoint; ConfigError if it is missing or deviates from the format of ``write_index``."""
    path = f"{folder}/{INDEX_FILE}"
    where = f"{storage.where}/{path}"
    try:
        if storage.size(path) > LARGEST_INDEX_BYTES:
            raise ValueError(f"it is longer than {LARGEST_INDEX_BYTES} bytes")
        with storage.reading(path) as file:
            tree = parse_json(file.read(), unique_keys=True)
        if not isinstance(tree, dict) or set(tree) != {"format", "tensors"} or not isinstance(tree["tensors"], dict):
            raise ValueError("it is not an index of tensors")
        if tree["format"] != FORMAT or type(tree["format"]) is not int:
            raise ValueError(f"it is of format {tree['format']!r:.20}, and {FORMAT} is read here")
        return {name: _read_tensor(name, entry) for name, entry in tree["tensors"].items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{where} is missing; {OLDER}") from error
    except ValueError as error:
        raise ConfigError(f"{where} is damaged: {error}; {OLDER}") from error


def _read_tensor(name: str, entry: Any) -> StoredTensor:
    _require(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "chunks"}, name, entry)
    dtype, shape, chunks = entry["dtype"], entry["shape"], entry["chunks"]
    _require(isinstance(dtype, str) and dtype in CHUNK_DTYPES and _is_sizes(shape), name, entry)
    _require(isinstance(chunks, list), name, entry)
    tensor = StoredTensor(dtype, tuple(shape), tuple(_read_chunk(name, chunk, len(shape)) for chunk in chunks))
    if not _tile([(chunk.offsets, chunk.sizes) for chunk in tensor.chunks], tensor.shape):
        raise ValueError(f"the chunks of {name!r:.100} do not make up a tensor of shape {list(tensor.shape)!r:.60}")
    return tensor


def _read_chunk(name: str, entry: Any, dims: int) -> Chunk:
    _require(isinstance(entry, dict) and set(entry) == {"file", "key", "offsets", "sizes"}, name, entry)
    file, key, offsets, sizes = entry["file"], entry["key"], entry["offsets"], entry["sizes"]
    _require(_is_sizes(offsets) and _is_sizes(sizes) and len(offsets) == len(sizes) == dims, name, entry)
    _require(isinstance(key, str), name, entry)
    if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
        raise ValueError(f"it says that {name!r:.100} is in {file!r:.100}, which is not the name of such a file")
    return Chunk(file, key, tuple(offsets), tuple(sizes))


def _require(holds: bool, name: str, entry: Any) -> None:
    if not holds:
        raise ValueError(f"it describes {name!r:.100} wrongly, as {entry!r:.200}")


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _tile(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Return whether boxes cover a shape without overlap.

    Ranks shard a tensor dim by dim. So the boxes form consecutive intervals along the first dim, and the boxes of each
    interval cover the other dims. Comparing all pairs would take hours with a thousand ranks.
    """
    if not shape:
        return len(boxes) == 1
    intervals: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for offsets, sizes in boxes:
        intervals.setdefault((offsets[0], sizes[0]), []).append((offsets[1:], sizes[1:]))
    end = 0
    for offset, size in sorted(intervals):
        if offset != end:
            return False
        end += size
    return end == shape[0] and bool(intervals) and all(_tile(inner, shape[1:]) for inner in intervals.values())
