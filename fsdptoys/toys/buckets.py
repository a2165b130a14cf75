"""Buckets: many small tensors sent as one.

A collective has a fixed cost besides that of its bytes, so gradients are copied into flat buffers
of some MiB, and each buffer is sent as soon as it is full:

    gradients, in the order of the backward   g9  g8  g7 | g6  g5 | g4  g3  g2  g1
    buckets, in the order of all-reduces       bucket 0   bucket 1      bucket 2

Small buckets leave early but pay the fixed cost more often; large ones are efficient but wait for
their last gradient.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BROADCAST_BYTES = 250 * 2**20


def assign_buckets(tensors: Sequence[Tensor], limit: int) -> list[list[int]]:
    """Assign tensors to buckets of one dtype and device each, in order.

    Args:
        tensors: numbered from 0.
        limit: bytes that fill a bucket.

    Returns:
        Tensor numbers of each bucket, in the order in which buckets are complete.
    """
    full: list[list[int]] = []
    filling: defaultdict[Any, list[int]] = defaultdict(list)
    filled_bytes: defaultdict[Any, int] = defaultdict(int)
    for number, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        filling[kind].append(number)
        filled_bytes[kind] += tensor.nbytes
        if filled_bytes[kind] >= limit:
            full.append(filling.pop(kind))
            filled_bytes[kind] = 0
    return sorted([*full, *filling.values()], key=max)


def views_like(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut a flat buffer into views of the tensors' shapes, with their strides if these leave no
    gaps."""
    views = []
    offset = 0
    for tensor in tensors:
        part = buffer[offset : offset + tensor.numel()]
        if _is_dense(tensor):
            views.append(part.as_strided(tensor.shape, tensor.stride()))
        else:
            views.append(part.view(tensor.shape))
        offset += tensor.numel()
    return views


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrite tensors with those of group rank ``source``, in buckets."""
    for numbers in assign_buckets(tensors, BROADCAST_BYTES):
        # Through .data, so that autograd sees no change of tensors that it saved.
        parts = [tensors[number].data for number in numbers]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.broadcast(flat, group=group, group_src=source)
        for part, received in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(received.view(part.shape))
