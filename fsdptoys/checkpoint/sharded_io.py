"""Saving and loading tensors of any layout, on any number of ranks, as a folder of safetensors
files.

torch.distributed.checkpoint plans the writes (each rank its shards, replicated tensors once) and
the chunk parts that each rank reads. The files (``dcp_io``) are plain safetensors with a JSON
index, because PyTorch's own writer pickles its metadata, which can run code on load.

Only the given group is used for communication, since a save may run in a thread during training. An
error on one rank is raised on all. Tensors on an accelerator are read on the calling thread's
current stream. Not covered: checksums, and detection of incomplete folders (see ``manifest``).

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.errors import ConfigError

from . import shard_format
from .safetensors_io import shape_text
from .shard_format import DTYPE_NAMES, INDEX_FILE, Chunk, ChunkForm, StoredTensor
from .storage import Storage

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None for one process

GatherFull = Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor | None]]]
"""Gathers tensors one by one: yields the name, and the full CPU tensor on rank 0, None
elsewhere."""


def save_tensors(
    storage: Storage, folder: str, tensors: dict[str, Tensor], group: Group
) -> list[str]:
    """Write tensors into an existing folder, each rank its shards; return the names of this rank's
    files. Collective.

    The folder has no other writers. ``tensors`` are DTensors, or plain tensors equal on all ranks
    that have the name (stages of a pipeline have others), and must not change until this returns.
    ``group`` is for CPU tensors, otherwise unused meanwhile; None for one process. OSError or
    ConfigError on all ranks: the error of the lowest failed rank.
    """
    import torch.distributed.checkpoint as dcp

    from .dcp_io import SafetensorsWriter

    _check_kinds(tensors)
    writer = SafetensorsWriter(storage, folder, dist.get_rank(group) if group is not None else 0)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=_is_alone(group),
        )
    return writer.files


def save_full_tensors(
    storage: Storage, folder: str, tensors: dict[str, Tensor], gather_full: GatherFull, group: Group
) -> list[str]:
    """Write full tensors, one by one, into an existing folder on rank 0. Collective.

    Arguments, result and errors as ``save_tensors``; ``gather_full`` is called on all ranks with
    some tensors at a time, and may use groups of its own.
    """
    _check_kinds(tensors)
    forms = {name: ChunkForm(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    collected = _in_file_order(tensors, gather_full)

    def write() -> list[str]:
        try:
            if group is not None and dist.get_rank(group) != 0:
                return []
            file = shard_format.file_name(0)
            shard_format.write_chunks(storage, f"{folder}/{file}", forms, collected)  # type: ignore[arg-type]
            stored = {}
            for name, form in forms.items():
                chunk = Chunk(file, name, (0,) * len(form.shape), form.shape)
                stored[name] = StoredTensor(DTYPE_NAMES[form.dtype], form.shape, (chunk,))
            shard_format.write_index(storage, folder, stored)
            return [file, INDEX_FILE]
        finally:
            # The other ranks wait in these collectives even if the write has failed.
            for _ in collected:
                pass

    return _on_all_ranks(group, write)


def load_tensors(storage: Storage, folder: str, tensors: dict[str, Tensor], group: Group) -> None:
    """Fill tensors in place from a folder that any number of ranks saved. Collective; ``group`` as
    in ``save_tensors``.

    ``tensors`` have the saved dtypes and shapes, and any layout; ranks may have others, and the
    folder may hold more. ConfigError on all ranks, before anything is filled, if a tensor is
    missing or differs in dtype or shape, or if the index or a header is damaged; OSError on all
    ranks if a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    from .dcp_io import SafetensorsReader

    _check_kinds(tensors)
    index = _on_all_ranks(group, lambda: _read_index_of(storage, folder, tensors))
    reader = SafetensorsReader(storage, folder, index)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            planner=planner,
            process_group=group,
            no_dist=_is_alone(group),
        )


def _read_index_of(
    storage: Storage, folder: str, tensors: dict[str, Tensor]
) -> dict[str, StoredTensor]:
    """Read the index of some tensors; ConfigError if one is missing or has another form."""
    where, index = f"{storage.where}/{folder}", shard_format.read_index(storage, folder)
    missing = sorted(tensors.keys() - index.keys())
    if missing:
        more = f" nor {len(missing) - 1} others" if missing[1:] else ""
        raise ConfigError(
            f"{where} holds no {missing[0]}{more}, which this run has; resume with the model and "
            "the optimizer that it was saved with"
        )
    for name, tensor in tensors.items():
        found, wanted = index[name], (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if (found.dtype, found.shape) != wanted:
            raise ConfigError(
                f"{where} holds {name} as {_text(found.dtype, found.shape)}, and this run has it "
                f"as {_text(*wanted)}; resume with the model and the optimizer that it was saved "
                "with"
            )
    return {name: index[name] for name in tensors}


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} of shape {shape_text(shape)}" if shape else f"a single number of {dtype}"


def _check_kinds(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor) and tensor.dtype in DTYPE_NAMES, (
            f"{name} is {type(tensor)}"
        )
        assert tensor.device.type != "meta" and tensor.layout == torch.strided, (
            f"{name} holds no plain numbers"
        )


def _in_file_order(
    tensors: dict[str, Tensor], gather_full: GatherFull
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield full tensors in the order of ``in_file_order``, provided ``gather_full`` keeps the
    order of its input."""
    for itemsize in sorted({tensor.dtype.itemsize for tensor in tensors.values()}, reverse=True):
        yield from gather_full(
            {
                name: tensors[name]
                for name in sorted(tensors)
                if tensors[name].dtype.itemsize == itemsize
            }
        )


def _is_alone(group: Group) -> bool:
    if group is None:
        # Running without a group is intended. The filter stays set: restoring filters is not
        # thread-safe.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
    return group is None


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first rank's error instead of PyTorch's CheckpointException, which is not an
    Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as bundle:
        raise _first([error for _, (error, _) in sorted(bundle.failures.items())]) from bundle


def _on_all_ranks(group: Group, step: Callable[[], T]) -> T:
    """Call ``step`` on every rank; if it fails on any, raise the first failed rank's error on
    all."""
    failure: BaseException | None = None
    try:
        result = step()
    except BaseException as error:
        failure = error
    failures = [failure]
    if group is not None:
        anywhere = torch.tensor(failure is not None, dtype=torch.int32)
        dist.all_reduce(anywhere, group=group)
        if anywhere.item():  # saves the all-gather of objects otherwise
            failures *= dist.get_world_size(group)
            dist.all_gather_object(failures, failure, group=group)
    failed = [error for error in failures if error is not None]
    if failed:
        raise _first(failed)
    return result


def _first(errors: list[BaseException]) -> BaseException:
    """Return the first error, but prefer an interruption such as KeyboardInterrupt."""
    return next((error for error in errors if not isinstance(error, Exception)), errors[0])
