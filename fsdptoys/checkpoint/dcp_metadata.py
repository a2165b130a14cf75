"""Read ``.metadata`` of a ``torch.distributed.checkpoint`` folder, which is a pickle, without
running anything that it names.

The classes that such a file names become ``_Record``, which keeps arguments and state and has no
code of torch. Any other name, and any opcode that these files do not need, ends the read. Python's
own unpickler is used because the one in C allocates what an opcode says, such as a table of four
billion entries. It reads about a million opcodes a second: seconds for thousands of shards. All
values are checked afterwards.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.0 to 2.13).
"""

import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.sealed_folder import is_file_name
from fsdptoys.utils.text import one_line, short_text

from .safetensors_io import AGAIN

METADATA_FILE = ".metadata"
LARGEST_METADATA_BYTES = 2**30
"""Limit for ``.metadata``; an 8B model with optimizer states on 64 ranks takes about 20 MiB."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Name → dtype, for dtypes that weights can be read from."""

MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
)
CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix"),
)
OTHERS = (
    *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("pathlib", name) for name in ("WindowsPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
)
"""Names outside of ``MODULES`` that become records too."""

OPCODES = frozenset(
    b"".join(
        (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT),
            *(pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.SHORT_BINBYTES),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
            *(pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
            *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.GLOBAL),
            *(pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
            *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT),
            *(pickle.BINGET, pickle.LONG_BINGET),
        )
    )
)


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first_byte: int
    length: int


@dataclass(frozen=True)
class DCPTensor:
    """A tensor of such a folder."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def read_dcp_metadata(folder: Path) -> dict[str, DCPTensor]:
    """Return the tensors of a folder by name; other items are left out.

    Raises:
        ConfigError: if the file is missing, is no such metadata, or asks for code.
    """
    path = folder / METADATA_FILE
    try:
        content = read_regular(path, LARGEST_METADATA_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is missing, which a folder of torch.distributed.checkpoint holds once it is "
            "complete; name such a folder, as step-1000"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({one_line(error)}); {AGAIN}"
        ) from error
    try:
        return _tensors(_Unpickler(io.BytesIO(content)).load())
    except _ForeignNameError as error:
        raise ConfigError(
            f"{path} {error}, which metadata of torch.distributed.checkpoint never does and could "
            "run code; it was not run; use another checkpoint"
        ) from error
    # A pickle without meaning can raise anything: its opcodes get operands of any type.
    except Exception as error:
        raise ConfigError(
            f"{path} is no metadata of torch.distributed.checkpoint ({one_line(error)}); {AGAIN}"
        ) from error


class _ForeignNameError(Exception):
    """The pickle asks for something else than its classes."""


class _Record:
    """An object of the pickle: what it was built from."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "_Record":
        record = object.__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


RECORDS: dict[str, type[_Record]] = {
    name: type(name, (_Record,), {}) for name in CLASSES
}


def _check_keys(keys: list[Any]) -> None:
    """Refuse other keys than names: hashing a nested tuple would exhaust the process's stack."""
    if not all(isinstance(key, (str, _Record)) for key in keys):
        raise ValueError("a key is no name")


def _set_item(unpickler: Any) -> None:
    _check_keys(unpickler.stack[-2:-1])
    pickle._Unpickler.dispatch[pickle.SETITEM[0]](unpickler)


def _set_items(unpickler: Any) -> None:
    _check_keys(unpickler.stack[::2])
    pickle._Unpickler.dispatch[pickle.SETITEMS[0]](unpickler)


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, with few opcodes and names."""

    dispatch: ClassVar[dict[int, Callable[[pickle.Unpickler], None]]] = {
        **{
            opcode: function
            for opcode, function in pickle._Unpickler.dispatch.items()
            if opcode in OPCODES
        },
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the record of a class, or the name of a dtype."""
        if module in MODULES and name in RECORDS:
            return RECORDS[name]
        if (module, name) == ("torch", "Size"):
            return _size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) in OTHERS:
            return _Record
        raise _ForeignNameError(f"asks for {short_text(module)}.{short_text(name)}")


def _size(values: Any = ()) -> tuple[Any, ...]:
    if not isinstance(values, (tuple, list)):
        raise ValueError("a size is no list of numbers")
    return tuple(values)


def _tensors(metadata: Any) -> dict[str, DCPTensor]:
    fields = _fields(metadata, "Metadata")
    items = fields.get("state_dict_metadata")
    places = fields.get("storage_data")
    if not isinstance(items, dict) or not isinstance(places, dict):
        raise ValueError("it lists no tensors")
    stored: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for index, info in places.items():
        key = _fields(index, "MetadataIndex")
        if isinstance(key.get("offset"), tuple):
            stored[_text(key.get("fqn")), _integers(key["offset"])] = _fields(
                info, "_StorageInfo"
            )
    tensors = {}
    for name, item in items.items():
        if isinstance(item, RECORDS["TensorStorageMetadata"]):
            tensors[_text(name)] = _tensor(_text(name), item.state, stored)
    return tensors


def _tensor(
    name: str,
    fields: Any,
    stored: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]],
) -> DCPTensor:
    if not isinstance(fields, dict) or not isinstance(fields.get("chunks"), list):
        raise ValueError(f"{short_text(name)} has no chunks")
    properties = fields.get("properties")
    if not isinstance(properties, RECORDS["TensorProperties"]):
        raise ValueError(f"{short_text(name)} has no dtype")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else None
    shape = _integers(fields.get("size"))
    chunks = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets = _integers(box.get("offsets"))
        sizes = _integers(box.get("sizes"))
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > most
            for offset, size, most in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a chunk of {short_text(name)} is not within the tensor")
        info = stored.get((name, offsets))
        if info is None:
            raise ValueError(f"a chunk of {short_text(name)} is in no file")
        if info.get("transform_descriptors"):
            raise ValueError(f"{short_text(name)} is compressed")
        if not is_file_name(info.get("relative_path")):
            raise ValueError(
                f"{short_text(name)} is in {short_text(info.get('relative_path'))}, which is not "
                "the name of a file in that folder"
            )
        first_byte, length = _integers((info.get("offset"), info.get("length")))
        file = info["relative_path"]
        chunks.append(StoredChunk(offsets, sizes, file, first_byte, length))
    tensor = DCPTensor(_text(dtype), shape, tuple(chunks))
    _check_tiling(name, tensor)
    return tensor


def _check_tiling(name: str, tensor: DCPTensor) -> None:
    """Check that chunks cover each element once."""
    chunks = sorted(tensor.chunks, key=lambda chunk: chunk.offsets)
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    count = sum(math.prod(chunk.sizes) for chunk in chunks)
    overlap = any(
        all(
            max(offset, other_offset) < min(offset + size, other_offset + other_size)
            for offset, size, other_offset, other_size in zip(
                chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True
            )
        )
        for index, chunk in enumerate(chunks)
        for other in _reachable(chunk, chunks[index + 1 :])
    )
    if overlap or count != math.prod(tensor.shape):
        raise ValueError(f"the chunks of {short_text(name)} do not cover it once")


def _reachable(chunk: StoredChunk, later: list[StoredChunk]) -> list[StoredChunk]:
    """Those of the sorted chunks that begin before this one ends in the first dim."""
    if not chunk.sizes:
        return later
    end = chunk.offsets[0] + chunk.sizes[0]
    reachable = []
    for other in later:
        if other.offsets[0] >= end:
            break
        reachable.append(other)
    return reachable


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, RECORDS[name]) or not isinstance(record.state, dict):
        raise ValueError(f"a {name} is missing")
    return record.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short_text(value)} is no name")
    return value


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(
        type(value) is int and 0 <= value < 2**63 for value in values
    ):
        raise ValueError(f"{short_text(values)} are no sizes")
    return values
