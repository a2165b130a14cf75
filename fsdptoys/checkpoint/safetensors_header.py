"""Headers of safetensors files, read without their tensors.

The format (https://huggingface.co/docs/safetensors/index): eight bytes with the header's length, a JSON header, then
the tensors' bytes without gaps. A few kilobytes thus list a file's tensors and show whether it is complete. The
safetensors library makes the same checks, but its messages name neither the file nor a fix.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line

from .storage import read_bytes

AGAIN = "download or write the folder again"

LONGEST_HEADER_BYTES = 100_000_000  # the safetensors library's limit

BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Dtype name in a header → bytes per element; sub-byte dtypes are absent."""


@dataclass(frozen=True)
class StoredTensor:
    """A header's entry of one tensor."""

    file: str  # name of its file
    dtype: str  # the format's name: ``F32``, ``BF16``
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the list of a file's tensors and check the file's length; a ConfigError names file and problem."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            header, data_start = parse_header(cast(BinaryIO, file), size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); {AGAIN}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no safetensors file or is damaged: {error}; {AGAIN}") from error
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor, span = _read_entry(path, name, entry)
        tensors[name] = tensor
        spans.append(span)
    spans.sort()
    ends = [0, *(stop for _, stop in spans)]
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)):
        raise ConfigError(f"{path} is damaged: its header places tensors that overlap or leave gaps; {AGAIN}")
    expected = data_start + ends[-1]
    if size != expected:
        raise ConfigError(f"{path} is damaged: it holds {size} bytes, and its header asks for {expected}; {AGAIN}")
    return tensors


def parse_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of an open file of ``size`` bytes, and the offset of the tensors; ValueError if damaged."""
    length = int.from_bytes(read_bytes(file, 8), "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER_BYTES):
        raise ValueError(f"its header does not fit into its {size} bytes")
    text = read_bytes(file, length)
    if len(text) < length:
        raise ValueError("it ends early")
    try:
        header = parse_json(text, unique_keys=True)
    except ForeignError as error:
        raise ValueError(f"its header cannot be read ({error})") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return header, 8 + length


def _read_entry(path: Path, name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not isinstance(dtype, str) or any(type(value) is not int or value < 0 for value in (*shape, start, stop)):
            raise ValueError
        if stop < start or (dtype in BYTES and stop - start != math.prod(shape) * BYTES[dtype]):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged: its header describes {one_line(name)} wrongly, as {entry!r:.200}; {AGAIN}"
        ) from error
    return StoredTensor(path.name, dtype, shape), (start, stop)
