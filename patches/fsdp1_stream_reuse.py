"""FSDP1: all roots of a process share their streams.

Target: ``torch.distributed.fsdp._runtime_utils._init_streams``, called by each root before its
first forward.

Why: each root makes three streams, a hybrid one four, and the caching allocator keeps a pool per
stream. With two roots (a trained model and a frozen one, or a second run in the same process)
memory freed by one root is unavailable to the other. Roots share no other state, so their forwards
and backwards may be interleaved. The price: collectives of two roots queue up behind each other.

Roots without replicas reduce on the default stream, which is never shared: the all-reduces of a
later hybrid root would run on it and overlap with nothing.

Upstream: https://github.com/pytorch/pytorch/issues/154657 (a request for FSDP2; there is none for
FSDP1).

Versions: written against 2.7 to 2.15, which have the same function; run with 2.7.1 and 2.13.0, on
CPUs.
"""

import functools
from typing import Any

from .patch import Patch, Undo, replace
from .streams import share_streams

STREAMS = (
    "_unshard_stream",
    "_post_backward_stream",
    "_pre_unshard_stream",
    "_all_reduce_stream",
)


def _install() -> Undo:
    from torch.distributed.fsdp import _runtime_utils

    original = _runtime_utils._init_streams

    @functools.wraps(original)
    def init_streams(state: Any) -> None:
        original(state)
        own = [
            name
            for name in STREAMS
            if getattr(state, name) is not state._default_stream
        ]
        share_streams(state, own, state.compute_device)

    return replace(_runtime_utils, "_init_streams", init_streams)


PATCH = Patch(
    name="fsdp1_stream_reuse",
    strategy="fsdp1",
    lowest=(2, 7),
    below=(2, 16),
    effect="the FSDP1 roots of a process share their streams",
    beyond="not applied because torch {torch} is newer than the versions it was written against",
    install=_install,
    between_roots=True,
)
