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
