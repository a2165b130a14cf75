"""Write a ``torch.distributed.checkpoint`` folder, one tensor at a time, in one process.

torch plans the folder from tensors on the meta device. Its planner then asks for each tensor as it
is written, so that memory holds one.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.utils.sealed_folder import new_folder

from .checksums import CHECKSUMS_FILE


def write_dcp(
    out_dir: Path,
    tensors: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    load: Callable[[str], Tensor],
) -> None:
    """Write a folder atomically, which ``torch.distributed.checkpoint.load`` reads.

    Args:
        out_dir: must not exist.
        tensors: name → shape.
        dtype: of all.
        load: returns a tensor by its name.

    Raises:
        ConfigError: if ``out_dir`` is taken or cannot be written.
    """
    # Importing it takes about a second.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        """Loads what is written next."""

        def lookup_object(self, index: Any) -> Any:
            return load(index.fqn)

    planned = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in tensors.items()
    }
    with new_folder(out_dir, CHECKSUMS_FILE) as folder, warnings.catch_warnings():
        # that there is one process
        warnings.filterwarnings("ignore", "torch.distributed is")
        writer = dcp.FileSystemWriter(folder)
        dcp.save(planned, storage_writer=writer, planner=Planner())
