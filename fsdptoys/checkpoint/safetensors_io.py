"""Reading and writing folders of safetensors files: one file, or several with an index.

Both layouts are Hugging Face's: ``STEM.safetensors``, or ``STEM-00001-of-00003.safetensors`` etc.
with ``STEM.safetensors.index.json``. Reads memory-map the files and touch only the pages of the
requested part; writes hold the tensors of one output file in memory, twice before safetensors 0.8.
Nothing is unpickled.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models.huggingface import Bounds
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import open_regular, read_regular
from fsdptoys.utils.sealed_folder import is_file_name
from fsdptoys.utils.text import one_line

from .safetensors_header import parse_header

AGAIN = "download or write the folder again"

BLOCK_ELEMENTS = 2**22  # elements read at a time: 16 MiB of float32
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Name in a header → dtype, for dtypes that weights can be read from."""

MAX_FILE_BYTES = 2 * 2**30  # largest output file, unless one tensor is larger

LARGEST_JSON_BYTES = 64 * 2**20
"""Limit for an index or ``config.json``; the index of a model with 200,000 tensors takes about 20
MiB."""


ReadRegion = Callable[[str, Bounds], Tensor]
"""Returns the part of a named tensor within a region, read-only, in its stored dtype, on the
CPU."""


@dataclass(frozen=True)
class StoredTensor:
    """A header's entry of one tensor."""

    file: str  # name of its file
    dtype: str  # the format's name: ``F32``, ``BF16``
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def slices(bounds: Bounds, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """Convert bounds to an index into a tensor that begins at ``origin``."""
    starts = origin or (0,) * len(bounds)
    return tuple(
        slice(first - start, last - start)
        for (first, last), start in zip(bounds, starts, strict=True)
    )


def blocks(shape: tuple[int, ...]) -> Iterator[Bounds]:
    """Split a tensor along its first dim into parts of ``BLOCK_ELEMENTS`` or fewer."""
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield ((first, min(first + step, shape[0])), *((0, size) for size in shape[1:]))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a ConfigError names the file."""
    try:
        # Published configurations contain Infinity, in keys that no family here reads.
        tree = parse_json(read_regular(path, LARGEST_JSON_BYTES), non_finite=True)
        if not isinstance(tree, dict):
            raise ValueError("it is not an object")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}); {AGAIN}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); {AGAIN}"
        ) from error
    return tree


class TensorFolder:
    """The tensors of a folder, listed from the headers of its files.

    Names of the files start with ``stem``.
    ConfigError if files are missing or damaged, or disagree with the index.
    """

    def __init__(self, path: Path, stem: str) -> None:
        self.path = path
        single = path / f"{stem}.safetensors"
        index = path / f"{stem}.safetensors.index.json"
        if single.exists() and index.exists():
            raise ConfigError(
                f"{path} holds both {single.name} and {index.name}; remove the outdated one"
            )
        if not single.exists() and not index.exists():
            pickles = sorted(
                file.name
                for pattern in ("*.bin", "*.pt", "*.pth")
                for file in path.glob(pattern)
            )
            if pickles:
                raise ConfigError(
                    f"{path} holds weights as {pickles[0]} alone, which can run code when it is "
                    "opened and is not read here; convert it to safetensors"
                )
            raise ConfigError(
                f"{path} holds neither {single.name} nor {index.name}; {AGAIN}"
            )
        places = _read_index(index) if index.exists() else {}
        self.files = sorted(set(places.values())) or [single.name]
        self.stored: dict[str, StoredTensor] = {}
        for file in self.files:
            if not (path / file).exists():
                raise ConfigError(
                    f"{path / one_line(file)} is missing, though {index.name} lists it; {AGAIN}"
                )
            for name, tensor in read_header(path / file).items():
                if name in self.stored:
                    raise ConfigError(
                        f"{path} holds {one_line(name)} twice, in {self.stored[name].file} and "
                        f"{file}; {AGAIN}"
                    )
                self.stored[name] = tensor
        for name, file in places.items():
            if name not in self.stored or self.stored[name].file != file:
                raise ConfigError(
                    f"{index} says that {one_line(file)} holds {one_line(name)}, which it does "
                    f"not; {AGAIN}"
                )

    def require(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        owner: str,
        fix: str | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        """Check that the tensors that ``owner`` needs exist, with the expected shapes and supported
        dtypes; with ``fix``, an imperative, that there are no others but those ignored."""
        for name, shape in shapes.items():
            if name not in self.stored:
                raise ConfigError(
                    f"{self.path} holds no {name}, which {owner} needs in the shape "
                    f"{shape_text(shape)}; {AGAIN}"
                )
            tensor = self.stored[name]
            holder = f"{self.path / tensor.file} holds {name}"
            if tensor.shape != shape:
                raise ConfigError(
                    f"{holder} in the shape {shape_text(tensor.shape)}, and {owner} needs "
                    f"{shape_text(shape)}; {AGAIN}"
                )
            if tensor.dtype not in DTYPES:
                raise ConfigError(
                    f"{holder} as {one_line(tensor.dtype)}, and weights are read from "
                    f"{', '.join(DTYPES)} alone; convert it to one of these"
                )
        for name, tensor in self.stored.items():
            if fix is not None and name not in shapes and name not in ignored:
                raise ConfigError(
                    f"{self.path / tensor.file} holds {one_line(name)}, for which {owner} has no "
                    f"place; {fix}"
                )

    def dtypes(self) -> list[str]:
        """Return the names of all tensors' dtypes, such as ``float32``."""
        return sorted(
            {
                dtype_name(DTYPES[tensor.dtype])
                for tensor in self.stored.values()
                if tensor.dtype in DTYPES
            }
        )

    def read_all(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Read tensors in blocks, to find those that cannot be read or are not finite."""
        for name, shape in shapes.items():
            for block in blocks(shape):
                with self.reading() as read:
                    read(name, block)

    @contextmanager
    def reading(self) -> Iterator[ReadRegion]:
        """Yield a reader; files are opened on first use and closed at the end of the block.

        Pages read count as this process's memory until then, so keep blocks small. A ConfigError
        names an unreadable file, or a tensor with a NaN or an infinity in what is read.
        """
        with ExitStack() as stack:
            opened: dict[str, Any] = {}

            def read(name: str, region: Bounds) -> Tensor:
                file = self.path / self.stored[name].file
                try:
                    if file.name not in opened:
                        opened[file.name] = stack.enter_context(
                            safe_open(file, framework="pt")
                        )
                    part: Tensor = opened[file.name].get_slice(name)[slices(region)]
                except (SafetensorError, OSError) as error:
                    raise ConfigError(
                        f"{file} cannot be read ({error}); {AGAIN}"
                    ) from error
                # Minimum and maximum of a NaN are NaN; a mask of the finite elements would take
                # memory.
                if part.numel() and not all(end.isfinite() for end in part.aminmax()):
                    raise ConfigError(
                        f"{file} holds {name} with values that are not finite; use other weights"
                    )
                return part

            yield read
            opened.clear()


@dataclass(frozen=True)
class Written:
    """Result of ``write_tensors``."""

    files: list[str]  # names of the safetensors files
    parameters: int
    tensor_bytes: int


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Iterable[tuple[str, Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Write tensors into one or more safetensors files of limited size, with an index for several.

    ``tensors`` are CPU tensors, which must not change until the iterator is exhausted. OSError if a
    file cannot be written.
    """
    parts: list[dict[str, Any]] = []
    waiting: dict[str, Tensor] = {}
    waiting_bytes = parameters = tensor_bytes = 0

    def write_part() -> None:
        # Final names contain the number of files, which is known only at the end.
        try:
            save_file(
                waiting, folder / f"{stem}.part{len(parts)}", metadata={"format": "pt"}
            )
        except SafetensorError as error:
            raise OSError(str(error)) from error
        parts.append(dict.fromkeys(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and waiting_bytes + tensor.nbytes > max_file_bytes:
            write_part()
            waiting_bytes = 0
        waiting[name] = tensor.contiguous()
        waiting_bytes += tensor.nbytes
        tensor_bytes += tensor.nbytes
        parameters += tensor.numel()
    write_part()
    count = len(parts)
    files = [
        f"{stem}-{part + 1:05d}-of-{count:05d}.safetensors" for part in range(count)
    ]
    if count == 1:
        files = [f"{stem}.safetensors"]
    for part, file in enumerate(files):
        (folder / f"{stem}.part{part}").rename(folder / file)
    if count > 1:
        places = {
            name: file
            for file, names in zip(files, parts, strict=True)
            for name in names
        }
        tree = {
            "metadata": {"total_parameters": parameters, "total_size": tensor_bytes},
            "weight_map": places,
        }
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps(tree, indent=2) + "\n", encoding="utf-8"
        )
    return Written(files, parameters, tensor_bytes)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the list of a file's tensors and check the file's length; a ConfigError names file and
    problem."""
    try:
        with open_regular(path) as file:
            entries = parse_header(cast(BinaryIO, file), path.stat().st_size)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}); {AGAIN}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} {error}; {AGAIN}") from error
    return {
        name: StoredTensor(path.name, entry.dtype, entry.shape)
        for name, entry in entries.items()
    }


def _read_index(index: Path) -> dict[str, str]:
    """Return tensor name → file name."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(
            f"{index} lacks weight_map, which maps tensors to files; {AGAIN}"
        )
    for name, file in places.items():
        if not is_file_name(file):
            raise ConfigError(
                f"{index} says that {one_line(name)} is in {file!r:.100}, which is not the name "
                f"of a file in that folder; {AGAIN}"
            )
    return places


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as in messages."""
    return "×".join(map(str, shape)) if shape else "a single number"
