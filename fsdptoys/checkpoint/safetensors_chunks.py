"""Safetensors files of chunks: streamed writes and reads by rows, through any Storage.

A checkpoint may be in an object store, so its files are written sequentially, header first, and read by seeking. At
most one additional tensor at a time is in host memory. Chunks are sorted by descending element size, which aligns each
to its dtype. Bytes are little-endian, on little-endian hosts only.

Source: https://huggingface.co/docs/safetensors/index
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line

from .safetensors_io import DTYPES, LONGEST_HEADER_BYTES, parse_header
from .storage import Storage

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
PIECE_BYTES = 16 * 2**20  # size of one write or read; object stores buffer that much


@dataclass(frozen=True)
class ChunkForm:
    """Dtype and shape of a chunk."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in a file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(forms: Mapping[str, ChunkForm]) -> list[str]:
    """Return the keys in the order that ``write_chunks`` expects."""
    return sorted(forms, key=lambda key: (-forms[key].dtype.itemsize, key))


def write_chunks(
    storage: Storage, path: str, forms: Mapping[str, ChunkForm], chunks: Iterable[tuple[str, Tensor]]
) -> None:
    """Write one safetensors file; ``chunks`` come in the order of ``in_file_order``, on any device."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, keys = 0, in_file_order(forms)
    for key in keys:
        assert key != "__metadata__", "a name that the format keeps for itself"
        start, end = end, end + forms[key].nbytes
        dtype = DTYPE_NAMES[forms[key].dtype]
        header[key] = {"dtype": dtype, "shape": list(forms[key].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= LONGEST_HEADER_BYTES
    with storage.writing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = 0
        for key, (given, chunk) in zip(keys, chunks, strict=True):
            assert given == key and ChunkForm(chunk.dtype, tuple(chunk.shape)) == forms[key], f"{given} for {key}"
            # The copy in host memory is freed before the next chunk is copied.
            written += sum(file.write(piece) for piece in _pieces(chunk.detach().cpu().contiguous()))
        assert written == end


@dataclass(frozen=True)
class ChunkPlace:
    """Position of a chunk in its file."""

    where: str  # the file, for messages
    form: ChunkForm
    start: int  # offset of its first byte in the file


def read_places(storage: Storage, path: str, forms: Mapping[str, ChunkForm]) -> dict[str, ChunkPlace]:
    """Read the positions of the expected chunks from a file's header; a ConfigError names file and damage."""
    where = f"{storage.where}/{path}"
    try:
        size = storage.size(path)
        with storage.reading(path) as file:
            header, data = parse_header(file, size)
        starts = {key: _start(header, key, form, size - data) for key, form in forms.items()}
        return {key: ChunkPlace(where, form, data + starts[key]) for key, form in forms.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{where} is missing, though the checkpoint's index lists it; {OLDER}") from error
    except ValueError as error:
        raise ConfigError(f"{where} is damaged: {error}; {OLDER}") from error


def read_rows(file: BinaryIO, place: ChunkPlace, first: int, into: Tensor) -> None:
    """Fill a tensor with consecutive full rows of a chunk, from row ``first`` on; ConfigError if the file ends early.

    ``into`` is a contiguous CPU tensor of the chunk's dtype, [rows, the chunk's other dims]; a 0-dim chunk has one row.
    """
    row_bytes = math.prod(place.form.shape[1:]) * place.form.dtype.itemsize
    file.seek(place.start + first * row_bytes)
    for piece in _pieces(into):
        done = 0
        while done < len(piece):
            count = file.readinto(piece[done:])  # type: ignore[attr-defined]
            if not count:
                raise ConfigError(f"{place.where} ends early, and is damaged; {OLDER}")
            done += count


def _pieces(tensor: Tensor) -> Iterator[Any]:
    """Yield views of a contiguous CPU tensor's bytes."""
    content = tensor.detach().view(-1).view(torch.uint8).numpy()
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def _start(header: dict[str, Any], key: str, form: ChunkForm, data_bytes: int) -> int:
    """Return the offset of a chunk's first byte after the header."""
    entry = header.get(key)
    if not isinstance(entry, dict):
        raise ValueError(f"its header does not list {one_line(key)}")
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise ValueError(f"its header describes {one_line(key)} wrongly, as {entry!r:.200}")
    start, stop = offsets
    shown = one_line(key)
    if entry.get("dtype") != DTYPE_NAMES[form.dtype] or entry.get("shape") != list(form.shape):
        raise ValueError(
            f"its header says that {shown} is {entry.get('dtype')!r:.20} of shape {entry.get('shape')!r:.60}, and the "
            f"checkpoint's index says {DTYPE_NAMES[form.dtype]} of {list(form.shape)}"
        )
    if start < 0 or stop - start != form.nbytes or stop > data_bytes:
        raise ValueError(f"its header places {shown} at bytes {start} to {stop} of {data_bytes}, where it does not fit")
    return int(start)
