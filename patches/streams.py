"""One stream per purpose and device, kept for the life of the process.

A caching allocator reuses memory that a stream freed for that stream only, so a new stream means a
new pool. Kept streams also serve later roots, for instance in the next run of the process.

On a CPU streams do nothing, but they are objects that can be counted.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_shared_streams: dict[tuple[torch.device, str, object], Any] = {}


def share_streams(owner: Any, attributes: Iterable[str], device: torch.device) -> None:
    """Replace an object's streams by the first streams with the same attribute names.

    Streams of another priority stay separate, since a high-priority collective must not wait in a
    queue of the default priority. (CPU streams have no priority, NPU streams do not report it.)

    Args:
        owner: has new, unused streams.
        attributes: their names.
        device: of the streams.
    """
    for attribute in attributes:
        stream = getattr(owner, attribute)
        key = (device, attribute, _priority_of(stream))
        setattr(owner, attribute, _shared_streams.setdefault(key, stream))


def has_other_roots(model: nn.Module) -> bool:
    """Whether a wrapped model has several FSDP roots, or an earlier root of the process has left
    streams.

    A root is an FSDP unit in no other one. Ask before the model's first forward.
    """
    from torch.distributed.fsdp import (  # half a second
        FSDPModule,
        FullyShardedDataParallel,
    )

    roots: list[str] = []
    for name, module in model.named_modules():  # outer modules come first
        is_inner = bool(roots) and (not roots[-1] or name.startswith(f"{roots[-1]}."))
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)) and not is_inner:
            roots.append(name)
    return bool(_shared_streams) or len(roots) > 1


def _priority_of(stream: Any) -> object:
    try:
        return getattr(stream, "priority", None)
    except RuntimeError:
        # Torch_npu's, "NPU dose not support Stream.get_priority() currently": 2.7.1 and 2.13.0
        return None
