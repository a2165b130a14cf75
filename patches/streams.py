"""One stream for each purpose and device, kept as long as the process lives.

A caching allocator keeps what a stream has freed for that stream alone, so a new stream means a new pool. Streams that
are kept serve roots which are made later too, in the next run of this process for instance.

On a CPU streams do nothing, but they are objects that can be counted.
"""

from collections.abc import Iterable
from typing import Any

import torch

_kept: dict[tuple[torch.device, str, object], Any] = {}


def share_streams(owner: Any, attributes: Iterable[str], device: torch.device) -> None:
    """Replace an object's streams by the first that were seen under the same names.

    Streams of another priority stay apart, since a collective that has to come first must not wait in a queue of the
    usual priority. (Those of a CPU have none, and those of an NPU do not tell it.)

    Args:
        owner: has just made its streams, and has not used them.
        attributes: their names.
        device: where the streams run.
    """
    for attribute in attributes:
        stream = getattr(owner, attribute)
        key = (device, attribute, _priority_of(stream))
        setattr(owner, attribute, _kept.setdefault(key, stream))


def _priority_of(stream: Any) -> object:
    try:
        return getattr(stream, "priority", None)
    except RuntimeError:  # torch_npu's, "NPU dose not support Stream.get_priority() currently": 2.7.1 and 2.13.0
        return None
