"""Storages of tensors, each once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .dtensor import local_tensor


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Identity → storage of the tensors that have memory, fake memory included; of a DTensor, its local one."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = local_tensor(tensor)
        if not local.is_meta and (storage := local.untyped_storage()).nbytes():
            found[storage._cdata] = storage
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the tensors' storages."""
    return sum(storage.nbytes() for storage in storages_of(tensors).values())


def bytes_beside(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Sum the bytes of the tensors' storages, and of the tensors alone where a storage holds others too."""
    mixed, kept = storages_of(others).keys(), [local_tensor(tensor) for tensor in tensors]
    alone = {key: storage.nbytes() for key, storage in storages_of(kept).items() if key not in mixed}
    return sum(alone.values()) + sum(each.nbytes for each in kept if each.untyped_storage()._cdata in mixed)
