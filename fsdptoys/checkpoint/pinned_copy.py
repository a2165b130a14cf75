"""Copies between an accelerator and files through two pinned buffers in turn.

From pageable memory a driver copies at a fraction of the bus's rate and blocks the host. Through
two pinned buffers one copy runs while the host writes or reads the other buffer. They take 128 MiB
of host memory, which PyTorch's allocator keeps for the next save. Copies are on the calling
thread's current stream, behind the work that made the tensors.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fsdptoys.device import Event, Streams, is_accelerator

BUFFER_BYTES = 64 * 2**20


class PinnedBuffers:
    """Two pinned buffers for copies from or to one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._streams = Streams(device)
        self._buffers = [
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(2)
        ]
        self._copied: list[Event] = [None, None]  # end of each buffer's last copy

    def take(self, nbytes: int) -> Tensor:
        """Return the buffer that was used longer ago, cut to a size, once its last copy is done."""
        self._buffers.reverse()
        self._copied.reverse()
        if self._copied[0] is not None:
            self._copied[0].synchronize()
        return self._buffers[0][:nbytes]

    def copy(self, target: Tensor, source: Tensor) -> Event:
        """Begin a copy from or to the buffer taken last; return the event of its end."""
        target.copy_(source, non_blocking=True)
        self._copied[0] = self._streams.event()
        self._copied[0].record(self._streams.current())
        return self._copied[0]

    def finish(self) -> None:
        """Wait for both buffers' copies."""
        for event in self._copied:
            if event is not None:
                event.synchronize()


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat."""
    return tensor.detach().view(-1).view(torch.uint8)


def host_bytes(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of tensors in order, in host memory; each part is valid until the next is
    requested.

    A tensor on an accelerator comes in parts of ``BUFFER_BYTES``; the next part's copy has begun by
    then.
    """
    buffers: PinnedBuffers | None = None
    begun: deque[tuple[Tensor, Event]] = deque()

    def next_begun() -> Tensor:
        part, copied = begun.popleft()
        copied.synchronize()
        return part

    for tensor in tensors:
        content = byte_view(tensor.contiguous())
        if not is_accelerator(content.device):
            while begun:
                yield next_begun()
            yield content
            continue
        buffers = buffers or PinnedBuffers(content.device)
        for part in content.split(BUFFER_BYTES):
            buffer = buffers.take(len(part))
            begun.append((buffer, buffers.copy(buffer, part)))
            if len(begun) == 2:
                yield next_begun()
    while begun:
        yield next_begun()
