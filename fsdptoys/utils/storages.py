"""Storages of tensors, each once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .dtensor import local_tensor


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return identity → storage of the tensors that have memory, fake memory included; of a
    DTensor, its local one."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = local_tensor(tensor)
        if not local.is_meta and (storage := local.untyped_storage()).nbytes():
            storages[storage._cdata] = storage
    return storages


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the tensors' storages."""
    return sum(storage.nbytes() for storage in storages_of(tensors).values())


def bytes_beside(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Sum the bytes of the tensors' storages, and of the tensors alone where a storage holds others
    too."""
    mixed = storages_of(others).keys()
    locals_ = [local_tensor(tensor) for tensor in tensors]
    alone = {
        key: storage.nbytes()
        for key, storage in storages_of(locals_).items()
        if key not in mixed
    }
    return sum(alone.values()) + sum(
        local.nbytes for local in locals_ if local.untyped_storage()._cdata in mixed
    )
