"""The header of a safetensors file.

A file (https://huggingface.co/docs/safetensors/index) is eight bytes with the header's length, a
JSON header, then the tensors' bytes without gaps. A few kilobytes thus list a file's tensors and
show whether it is complete. The safetensors library makes the same checks, but its messages name
neither the file nor a fix.
"""

import math
from dataclasses import dataclass
from typing import Any, BinaryIO

from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.text import one_line

from .storage import read_bytes

LONGEST_HEADER_BYTES = 100_000_000  # the safetensors library's limit

BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Dtype name in a header → bytes per element; sub-byte dtypes are absent."""


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file
    stop: int


def parse_header(file: BinaryIO, size: int) -> dict[str, HeaderEntry]:
    """Read the header of an open file of ``size`` bytes.

    The text of a ValueError is the predicate of a sentence about the damaged file.
    """
    length = int.from_bytes(read_bytes(file, 8), "little")
    damage = "is no safetensors file or is damaged: "
    if size < 8 or length > min(size - 8, LONGEST_HEADER_BYTES):
        raise ValueError(f"{damage}its header does not fit into its {size} bytes")
    text = read_bytes(file, length)
    if len(text) < length:
        raise ValueError(f"{damage}it ends early")
    try:
        header = parse_json(text, unique_keys=True)
    except ForeignError as error:
        raise ValueError(f"{damage}its header cannot be read ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{damage}its header is not an object")
    header.pop("__metadata__", None)
    entries = {
        name: _parse_entry(name, entry, 8 + length) for name, entry in header.items()
    }
    end = 8 + length
    for start, stop in sorted((entry.start, entry.stop) for entry in entries.values()):
        if start != end:
            raise ValueError(
                "is damaged: its header places tensors that overlap or leave gaps"
            )
        end = stop
    if size != end:
        raise ValueError(
            f"is damaged: it holds {size} bytes, and its header asks for {end}"
        )
    return entries


def _parse_entry(name: str, entry: Any, first: int) -> HeaderEntry:
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        (start, stop) = entry["data_offsets"]
        is_form = isinstance(dtype, str) and all(
            type(size) is int and size >= 0 for size in (*shape, start, stop)
        )
        if (
            not is_form
            or stop < start
            or (dtype in BYTES and stop - start != math.prod(shape) * BYTES[dtype])
        ):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"is damaged: its header describes {one_line(name)} wrongly, as {entry!r:.200}"
        ) from error
    return HeaderEntry(dtype, shape, first + start, first + stop)
