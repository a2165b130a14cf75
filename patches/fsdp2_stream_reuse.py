"""FSDP2: all roots of a process share their streams.

Target: ``FSDPCommContext.lazy_init`` of ``torch.distributed.fsdp._fully_shard._fsdp_param_group``,
called by each root before its first forward.

Why: each root makes four streams, and the caching allocator keeps a pool per stream. With two roots
(a trained model and a frozen one, or a second run in the same process) memory freed by one root is
unavailable to the other. Each root keeps its own context, with its prefetch order and buffers, so
forwards and backwards of two roots may be interleaved, unlike with PyTorch's public
``share_comm_ctx`` (2.10 and later), which shares the order too, and must be called for all roots
together before their first forward. The price: collectives of two roots queue up behind each other.

Upstream: https://github.com/pytorch/pytorch/issues/154657,
https://github.com/pytorch/pytorch/pull/165024

Versions: written against 2.7 to 2.15, which have the same four streams; run with 2.7.1 and
2.13.0, on CPUs.
"""

import functools
from typing import Any

import torch

from .patch import Patch, Undo, replace
from .streams import share_streams

STREAMS = (
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "reduce_scatter_stream",
    "all_reduce_stream",
)


def _install() -> Undo:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    original = FSDPCommContext.lazy_init

    @functools.wraps(original)
    def lazy_init(self: Any, device: torch.device) -> None:
        original(self, device)
        share_streams(self, STREAMS, device)

    return replace(FSDPCommContext, "lazy_init", lazy_init)


PATCH = Patch(
    name="fsdp2_stream_reuse",
    strategy="fsdp2",
    lowest=(2, 7),
    below=(2, 16),
    effect="the FSDP2 roots of a process share their streams",
    beyond="not applied because torch {torch} is newer than the versions it was written against",
    install=_install,
    between_roots=True,
)
