"""The files of a checkpoint's tensors, through any Storage: safetensors files of chunks (the shards
of the saving ranks), and ``tensors.json``, which lists the tensors and the files of their chunks.

A checkpoint may be in an object store, so its files are written sequentially, header first, and
read by seeking. Tensors on an accelerator pass through two pinned buffers (``pinned_copy``). Bytes
are little-endian, on little-endian hosts only.

The index is plain JSON, read strictly: a hostile index cannot name a file outside its folder, omit
a part of a tensor, or run code. It takes about 130 bytes per chunk, so 1000 tensors on 1000 ranks
take 130 MB; the limit is 256 MiB.

Source: https://huggingface.co/docs/safetensors/index
"""

import ctypes
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.sealed_folder import FileSum
from fsdptoys.utils.text import one_line

from .pinned_copy import BUFFER_BYTES, PinnedBuffers, byte_view, host_bytes
from .safetensors_header import LONGEST_HEADER_BYTES, HeaderEntry, parse_header
from .safetensors_io import DTYPES
from .storage import Storage, write_file

CHUNK_DTYPES = {
    **DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name in a header → dtype, for all dtypes a checkpoint can hold."""

DTYPE_NAMES = {dtype: name for name, dtype in CHUNK_DTYPES.items()}

OLDER = "resume from another checkpoint"  # the fix in messages about damage
INDEX_FILE = "tensors.json"
FORMAT = 1
LARGEST_INDEX_BYTES = 256 * 2**20
MOST_DIMS = 64  # of a tensor, as in PyTorch
PIECE_BYTES = 16 * 2**20  # size of one write or read; object stores buffer that much


class ShardFiles:
    """Names of the files of a checkpoint's chunks.

    Another layout of files changes this class only: a rank writes a file for each name that it
    gets here.
    """

    PATTERN = re.compile(r"tensors-[0-9]{5,}\.safetensors")

    @staticmethod
    def file_of(rank: int, tensor: str) -> str:
        """Return the file to which a rank writes its chunk of a tensor."""
        return f"tensors-{rank:05d}.safetensors"

    @classmethod
    def has(cls, file: str) -> bool:
        """Return whether ``file_of`` may return this name."""
        return cls.PATTERN.fullmatch(file) is not None


@dataclass(frozen=True)
class ChunkForm:
    """Dtype and shape of a chunk."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in a file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_chunks(
    storage: Storage,
    path: str,
    forms: Mapping[str, ChunkForm],
    contents: Iterable[Tensor | None],
) -> FileSum:
    """Write one safetensors file; ``contents`` are the chunks of ``forms`` in order, on any
    device."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, form in forms.items():
        assert key != "__metadata__", "a name that the format keeps for itself"
        start, end = end, end + form.nbytes
        header[key] = {
            "dtype": DTYPE_NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= LONGEST_HEADER_BYTES

    def pieces() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for content in host_bytes(_checked(forms, contents)):
            yield from _pieces(content)

    return write_file(storage, path, pieces())


def _checked(
    forms: Mapping[str, ChunkForm], contents: Iterable[Tensor | None]
) -> Iterator[Tensor]:
    for form, content in zip(forms.values(), contents, strict=True):
        assert content is not None
        assert ChunkForm(content.dtype, tuple(content.shape)) == form, form
        yield content


@dataclass(frozen=True)
class ChunkLocation:
    """Position of a chunk in its file."""

    where: str  # the file, for messages
    form: ChunkForm
    start: int  # offset of its first byte in the file


def read_locations(
    storage: Storage, path: str, forms: Mapping[str, ChunkForm]
) -> dict[str, ChunkLocation]:
    """Read the positions of the expected chunks from a file's header; a ConfigError names file and
    damage."""
    where = f"{storage.where}/{path}"
    try:
        with storage.reading(path) as file:
            entries = parse_header(file, storage.size(path))
        return {
            key: ChunkLocation(where, form, _start(entries, key, form))
            for key, form in forms.items()
        }
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where} is missing, though the checkpoint's index lists it; {OLDER}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where} {error}; {OLDER}") from error


def read_rows(
    file: BinaryIO,
    location: ChunkLocation,
    first: int,
    into: Tensor,
    buffers: PinnedBuffers | None = None,
) -> None:
    """Fill a tensor with consecutive full rows of a chunk, from row ``first`` on; ConfigError if
    the file ends early.

    ``into`` is a contiguous tensor of the chunk's dtype, [rows, the chunk's other dims]; a 0-dim
    chunk has one row. It is on the CPU, or on the accelerator of ``buffers``. Their copies may be
    unfinished on return.
    """
    row_bytes = math.prod(location.form.shape[1:]) * location.form.dtype.itemsize
    file.seek(location.start + first * row_bytes)
    content = byte_view(into)
    if buffers is None:
        _read_bytes(file, location, content)
        return
    for part in content.split(BUFFER_BYTES):
        buffer = buffers.take(len(part))
        _read_bytes(file, location, buffer)
        buffers.copy(part, buffer)


def _read_bytes(file: BinaryIO, location: ChunkLocation, into: Tensor) -> None:
    for piece in _pieces(into):
        filled = 0
        while filled < len(piece):
            count = file.readinto(piece[filled:])  # type: ignore[attr-defined]
            if not count:
                raise ConfigError(
                    f"{location.where} ends early, and is damaged; {OLDER}"
                )
            filled += count


def _pieces(content_bytes: Tensor) -> Iterator[Any]:
    """Yield views of bytes in host memory, each of at most ``PIECE_BYTES``."""
    # Not as an array of NumPy, which would fix the size of the tensor's storage for ever.
    size = content_bytes.numel()
    content = (
        memoryview((ctypes.c_ubyte * size).from_address(content_bytes.data_ptr())).cast(
            "B"
        )
        if size
        else b""
    )
    for start in range(0, size, PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def _start(entries: Mapping[str, HeaderEntry], key: str, form: ChunkForm) -> int:
    """Return the offset of a chunk's first byte in its file."""
    entry = entries.get(key)
    name = one_line(key)
    if entry is None:
        raise ValueError(f"is damaged: its header does not list {name}")
    dtype = DTYPE_NAMES[form.dtype]
    if (entry.dtype, entry.shape) != (dtype, form.shape):
        raise ValueError(
            f"is damaged: its header says that {name} is {entry.dtype!r:.20} of shape "
            f"{list(entry.shape)!r:.60}, and the checkpoint's index says {dtype} of "
            f"{list(form.shape)}"
        )
    return entry.start


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

    @property
    def nbytes(self) -> int:
        """Size of the full tensor, in bytes."""
        return ChunkForm(CHUNK_DTYPES[self.dtype], self.shape).nbytes


def write_index(
    storage: Storage, folder: str, tensors: Mapping[str, StoredTensor]
) -> FileSum:
    """Write the index of a checkpoint; ConfigError if it exceeds the size limit."""
    # The fields in their order; ``dataclasses.asdict`` would copy each.
    tree = {
        name: vars(tensor) | {"chunks": list(map(vars, tensor.chunks))}
        for name, tensor in sorted(tensors.items())
    }
    text = json.dumps(
        {"format": FORMAT, "tensors": tree}, separators=(",", ":"), allow_nan=False
    ).encode()
    if len(text) > LARGEST_INDEX_BYTES:
        raise ConfigError(
            f"the index of {storage.where}/{folder} would take {len(text)} bytes, and at most "
            f"{LARGEST_INDEX_BYTES} are read again; set checkpoint.form=full"
        )
    return write_file(storage, f"{folder}/{INDEX_FILE}", [text])


def read_index(storage: Storage, folder: str) -> dict[str, StoredTensor]:
    """Read the index of a checkpoint; ConfigError if it is missing or deviates from the format of
    ``write_index``."""
    path = f"{folder}/{INDEX_FILE}"
    where = f"{storage.where}/{path}"
    try:
        if storage.size(path) > LARGEST_INDEX_BYTES:
            raise ValueError(f"it is longer than {LARGEST_INDEX_BYTES} bytes")
        with storage.reading(path) as file:
            tree = parse_json(file.read(), unique_keys=True)
        if (
            not isinstance(tree, dict)
            or set(tree) != {"format", "tensors"}
            or not isinstance(tree["tensors"], dict)
        ):
            raise ValueError("it is not an index of tensors")
        if tree["format"] != FORMAT or type(tree["format"]) is not int:
            raise ValueError(
                f"it is of format {tree['format']!r:.20}, and {FORMAT} is read here"
            )
        return {
            name: _read_tensor(name, entry) for name, entry in tree["tensors"].items()
        }
    except FileNotFoundError as error:
        raise ConfigError(f"{where} is missing; {OLDER}") from error
    except ValueError as error:
        raise ConfigError(f"{where} is damaged: {error}; {OLDER}") from error


def _read_tensor(name: str, entry: Any) -> StoredTensor:
    _require(
        isinstance(entry, dict) and set(entry) == {"dtype", "shape", "chunks"},
        name,
        entry,
    )
    dtype = entry["dtype"]
    shape = entry["shape"]
    chunks = entry["chunks"]
    _require(
        isinstance(dtype, str) and dtype in CHUNK_DTYPES and _is_sizes(shape),
        name,
        entry,
    )
    _require(isinstance(chunks, list), name, entry)
    tensor = StoredTensor(
        dtype,
        tuple(shape),
        tuple(_read_chunk(name, chunk, len(shape)) for chunk in chunks),
    )
    if not _tile(
        [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks], tensor.shape
    ):
        raise ValueError(
            f"the chunks of {name!r:.100} do not make up a tensor of shape "
            f"{list(tensor.shape)!r:.60}"
        )
    return tensor


def _read_chunk(name: str, entry: Any, dims: int) -> Chunk:
    _require(
        isinstance(entry, dict) and set(entry) == {"file", "key", "offsets", "sizes"},
        name,
        entry,
    )
    file = entry["file"]
    key = entry["key"]
    offsets = entry["offsets"]
    sizes = entry["sizes"]
    _require(
        _is_sizes(offsets) and _is_sizes(sizes) and len(offsets) == len(sizes) == dims,
        name,
        entry,
    )
    _require(isinstance(key, str), name, entry)
    if not isinstance(file, str) or not ShardFiles.has(file):
        raise ValueError(
            f"it says that {name!r:.100} is in {file!r:.100}, which is not the name of such a file"
        )
    return Chunk(file, key, tuple(offsets), tuple(sizes))


def _require(holds: bool, name: str, entry: Any) -> None:
    if not holds:
        raise ValueError(f"it describes {name!r:.100} wrongly, as {entry!r:.200}")


def _is_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MOST_DIMS
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _tile(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]
) -> bool:
    """Return whether boxes cover a shape without overlap.

    Ranks shard a tensor dim by dim. So the boxes form consecutive intervals along the first dim,
    and the boxes of each interval cover the other dims. Comparing all pairs would take hours with a
    thousand ranks.
    """
    if not shape:
        return len(boxes) == 1
    intervals: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for offsets, sizes in boxes:
        intervals.setdefault((offsets[0], sizes[0]), []).append(
            (offsets[1:], sizes[1:])
        )
    end = 0
    for offset, size in sorted(intervals):
        if offset != end:
            return False
        end += size
    return (
        end == shape[0]
        and bool(intervals)
        and all(_tile(inner, shape[1:]) for inner in intervals.values())
    )
