"""Tensors of a ``torch.distributed.checkpoint`` folder, read one at a time without a process group.

A chunk of a file is what ``torch.save`` wrote, a zip that holds one tensor. It is read with
``weights_only=True``, and only if the zip is stored uncompressed and no larger than its tensor. So
a hostile folder makes a read allocate no more than its own files hold.

Not covered: compressed chunks, files at a URL, and the optimizer states of another program.
"""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line

from .checksums import verify_checksums
from .dcp_metadata import DTYPES, StoredChunk, read_dcp_metadata
from .safetensors_io import AGAIN, shape_text

ZIP_BYTES = 2**16
"""Bytes of a chunk besides the tensor's: names, an index and padding."""


class DCPFolder:
    """A folder with ``.metadata`` and ``.distcp`` files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise ConfigError(
                f"{path} is not a folder, and one of torch.distributed.checkpoint is expected; "
                "name one, as step-1000"
            )
        self.tensors = read_dcp_metadata(self.path)
        verify_checksums(self.path, only_sizes=True)

    def require(self, name: str, shape: tuple[int, ...], owner: str) -> None:
        """Check that a tensor has the shape that ``owner`` needs, a dtype of weights, and files."""
        if name not in self.tensors:
            raise ConfigError(
                f"{self.path} holds no {name}, which {owner} needs in the shape "
                f"{shape_text(shape)}; {AGAIN}, or name another model"
            )
        tensor = self.tensors[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"{self.path} holds {name} in the shape {shape_text(tensor.shape)}, and {owner} "
                f"needs {shape_text(shape)}; name another model"
            )
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{self.path} holds {name} as {one_line(tensor.dtype)}, and weights are read from "
                f"{', '.join(DTYPES)} alone; convert it to one of these"
            )
        for chunk in tensor.chunks:
            self._check_place(name, chunk, DTYPES[tensor.dtype])

    def _check_place(self, name: str, chunk: StoredChunk, dtype: torch.dtype) -> None:
        file = self.path / chunk.file
        try:
            size = file.stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{file} is missing, which holds {name} as .metadata says; {AGAIN}"
            ) from error
        if chunk.first_byte + chunk.length > size:
            raise ConfigError(
                f"{file} holds {size} bytes, and {name} ends at byte "
                f"{chunk.first_byte + chunk.length} as .metadata says; {AGAIN}"
            )
        needed = math.prod(chunk.sizes) * dtype.itemsize
        if not needed <= chunk.length <= needed + ZIP_BYTES:
            raise ConfigError(
                f"{file} has {chunk.length} bytes for a chunk of {name}, which takes {needed}; "
                f"{AGAIN}"
            )

    def load(self, name: str) -> Tensor:
        """Return a whole tensor in its dtype; ``require`` must have accepted it.

        Raises:
            ConfigError: if a chunk is damaged, or holds a value that is not finite.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for chunk in stored.chunks:
            box = tuple(
                slice(first, first + size)
                for first, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            whole[box] = self._load_chunk(name, chunk, whole.dtype)
        if whole.numel() and not all(end.isfinite() for end in whole.aminmax()):
            raise ConfigError(
                f"{self.path} holds {name} with values that are not finite; use another checkpoint"
            )
        return whole

    def _load_chunk(self, name: str, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        file = self.path / chunk.file
        try:
            with open_regular(file) as opened:
                opened.seek(chunk.first_byte)
                content = opened.read(chunk.length)
            tensor = _read_tensor(content)
            if tensor.dtype != dtype or tuple(tensor.shape) != chunk.sizes:
                raise ValueError("it has another dtype or shape")
        # torch's reader raises many kinds for damaged bytes, and for objects that it refuses
        except Exception as error:
            raise ConfigError(
                f"{file} holds a chunk of {name} that cannot be read ({one_line(error)[:200]}); "
                f"{AGAIN}"
            ) from error
        return tensor


def _read_tensor(content: bytes) -> Tensor:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed")
    if sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("it says that it is larger than its file")
    tensor: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        raise ValueError("it is no plain tensor")
    return tensor
