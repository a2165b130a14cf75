"""Tensors of any layout to and from a folder of safetensors files, by any number of ranks.

torch.distributed.checkpoint plans who writes what: each rank its shards, replicated tensors once and spread over the
ranks. It plans, too, which parts of which chunks a rank needs that holds other shards than those that were saved. What
goes to disk (``plans``) is plain safetensors with an index in JSON (``chunks``, ``index``). PyTorch's own writer
pickles its metadata, which can run code when it is loaded. So these are no files for ``FileSystemReader``; any reader
of safetensors opens them.

Communication goes over the given group alone, since a save may run in a thread beside the training; and whatever fails
on one rank is raised on all. Tensors on an accelerator are read in the calling thread's current stream.

Not here: when a folder counts as complete, and checksums. A folder that was not written to its end must be refused by
whoever knows.

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

from .safetensors_chunks import DTYPE_NAMES, ChunkForm, write_chunks
from .storage import Storage
from .tensor_index import INDEX_FILE, Chunk, StoredTensor, file_name, read_index, write_index

T = TypeVar("T")

Whole = Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor | None]]]
"""Collects tensors from all ranks one by one: name and whole tensor on the CPU, the latter on rank 0 alone."""


def save_tensors(
    storage: Storage, folder: str, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> list[str]:
    """Write tensors into an existing folder, every rank what it holds. Collective.

    Args:
        storage: where to.
        folder: in it; nothing else may write there.
        tensors: by name, the same names on all ranks: DTensors, or plain tensors that are the same on all ranks. None
            may change until this returns.
        group: of CPU tensors, which nothing else uses meanwhile; None for one process.

    Returns:
        Names of the files that this rank wrote.

    Raises:
        OSError, ConfigError: the first rank's own, on all ranks.
    """
    import torch.distributed.checkpoint as dcp

    from .dcp_io import SafetensorsWriter

    _check_kinds(tensors)
    writer = SafetensorsWriter(storage, folder, dist.get_rank(group) if group is not None else 0)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        dcp.save(
            dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=_one_process(group)
        )
    return writer.files


def save_whole_tensors(
    storage: Storage, folder: str, tensors: dict[str, Tensor], whole: Whole, group: dist.ProcessGroup | None
) -> list[str]:
    """Write tensors into an existing folder as rank 0 alone, whole ones, one after the other. Collective.

    Args:
        storage: where to.
        folder: in it; nothing else may write there.
        tensors: as in ``save_tensors``.
        whole: called with some of them at a time, on all ranks; its own communication is its own matter.
        group: as in ``save_tensors``.

    Returns:
        Names of the files that this rank wrote.

    Raises:
        OSError, ConfigError: rank 0's own, on all ranks.
    """
    _check_kinds(tensors)
    forms = {name: ChunkForm(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    collected = _in_file_order(tensors, whole)

    def write() -> list[str]:
        file = file_name(0)
        write_chunks(storage, f"{folder}/{file}", forms, collected)  # type: ignore[arg-type]
        stored = {}
        for name, form in forms.items():
            chunk = Chunk(file, name, (0,) * len(form.shape), form.shape)
            stored[name] = StoredTensor(DTYPE_NAMES[form.dtype], form.shape, (chunk,))
        write_index(storage, folder, stored)
        return [file, INDEX_FILE]

    def take_part() -> list[str]:
        try:
            return write() if group is None or dist.get_rank(group) == 0 else []
        finally:
            # The other ranks are waiting in here for one another, whatever became of the file.
            for _ in collected:
                pass

    return _on_all_ranks(group, take_part)


def load_tensors(storage: Storage, folder: str, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors from a folder that ``save_tensors`` wrote, on any number of ranks. Collective.

    Args:
        storage: where from.
        folder: in it.
        tensors: by name, the same names on all ranks, of the saved dtypes and shapes, and of any layout; filled in
            place. The folder may hold more.
        group: as in ``save_tensors``.

    Raises:
        ConfigError: before anything is filled, if a tensor is missing or is of another dtype or shape, or index or
            headers are damaged; the first rank's own, on all ranks.
        OSError: as the place refuses; likewise.
    """
    import torch.distributed.checkpoint as dcp

    from .dcp_io import SafetensorsReader

    _check_kinds(tensors)

    def open_index() -> dict[str, StoredTensor]:
        index = read_index(storage, folder)
        _check_wanted(f"{storage.where}/{folder}", index, tensors)
        return {name: index[name] for name in tensors}

    reader = SafetensorsReader(storage, folder, _on_all_ranks(group, open_index))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        dcp.load(
            dict(tensors), storage_reader=reader, planner=planner, process_group=group, no_dist=_one_process(group)
        )


def _check_wanted(where: str, index: dict[str, StoredTensor], tensors: dict[str, Tensor]) -> None:
    missing = sorted(tensors.keys() - index.keys())
    if missing:
        more = f" nor {len(missing) - 1} others" if missing[1:] else ""
        raise ConfigError(
            f"{where} holds no {missing[0]}{more}, which this run has; resume with the model and the optimizer that it "
            "was saved with"
        )
    for name, tensor in tensors.items():
        found, wanted = index[name], (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if (found.dtype, found.shape) != wanted:
            raise ConfigError(
                f"{where} holds {name} as {_text(found.dtype, found.shape)}, and this run has it as {_text(*wanted)}; "
                "resume with the model and the optimizer that it was saved with"
            )


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} of shape {'×'.join(map(str, shape))}" if shape else f"a single number of {dtype}"


def _check_kinds(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor) and tensor.dtype in DTYPE_NAMES, f"{name} is {type(tensor)}"
        assert tensor.device.type != "meta" and tensor.layout == torch.strided, f"{name} holds no plain numbers"


def _in_file_order(tensors: dict[str, Tensor], whole: Whole) -> Iterator[tuple[str, Tensor | None]]:
    """Whole tensors in the order of ``in_file_order``, if ``whole`` goes by their names."""
    for itemsize in sorted({tensor.dtype.itemsize for tensor in tensors.values()}, reverse=True):
        yield from whole({name: tensors[name] for name in sorted(tensors) if tensors[name].dtype.itemsize == itemsize})


def _one_process(group: dist.ProcessGroup | None) -> bool:
    if group is None:
        # It is meant. The filter stays: to set it aside again is not safe beside other threads.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return group is None


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first rank's own error instead of PyTorch's bundle of all, which is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as bundle:
        raise _first([error for _, (error, _) in sorted(bundle.failures.items())]) from bundle


def _on_all_ranks(group: dist.ProcessGroup | None, step: Callable[[], T]) -> T:
    """Take a step on every rank; if it fails on any, raise the first rank's error on all."""
    failure: BaseException | None = None
    try:
        result = step()
    except BaseException as error:
        failure = error
    failures = [failure]
    if group is not None:
        anywhere = torch.tensor(failure is not None, dtype=torch.int32)
        dist.all_reduce(anywhere, group=group)
        if anywhere.item():  # else no rank needs to hear from every other
            failures *= dist.get_world_size(group)
            dist.all_gather_object(failures, failure, group=group)
    failed = [error for error in failures if error is not None]
    if failed:
        raise _first(failed)
    return result


def _first(errors: list[BaseException]) -> BaseException:
    """Of several ranks' errors the first, but an interruption before all."""
    return next((error for error in errors if not isinstance(error, Exception)), errors[0])
