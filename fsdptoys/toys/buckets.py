"""Buckets: many small tensors that travel as one.

A collective costs a fixed time besides that of its bytes, so gradients are copied side by side into flat buffers of
some MiB, and each buffer is sent as soon as it is full:

    gradients, as the backward makes them    g9  g8  g7 | g6  g5 | g4  g3  g2  g1
    buckets, as they are all-reduced           bucket 0   bucket 1      bucket 2

A small bucket is on its way early and costs latency; a large one is efficient and waits for its last gradient.

Left out: buckets whose tensors differ in number format or device, which no collective takes; such tensors get buckets
of their own.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BROADCAST_BYTES = 250 * 2**20
"""Largest buffer in which tensors are broadcast together."""


def assign_buckets(tensors: Sequence[Tensor], limits: Sequence[int], sparse: Sequence[bool] = ()) -> list[list[int]]:
    """Cut tensors into buckets, each of one number format and device, keeping their order within each.

    Args:
        tensors: by number.
        limits: bytes from which on the first bucket, the second, … of a kind is full; the last counts for all others.
        sparse: for each tensor, whether its gradient is sparse and so travels alone; none if empty.

    Returns:
        The numbers of the tensors in each bucket, in the order in which buckets are complete.
    """
    buckets: list[list[int]] = []
    filling: defaultdict[Any, list[int]] = defaultdict(list)
    filled_bytes: defaultdict[Any, int] = defaultdict(int)
    full: defaultdict[Any, int] = defaultdict(int)
    for number, tensor in enumerate(tensors):
        if sparse and sparse[number]:
            buckets.append([number])
            continue
        kind = (tensor.dtype, tensor.device)
        filling[kind].append(number)
        filled_bytes[kind] += tensor.numel() * tensor.element_size()
        if filled_bytes[kind] >= limits[min(full[kind], len(limits) - 1)]:
            buckets.append(filling.pop(kind))
            filled_bytes[kind] = 0
            full[kind] += 1
    return sorted([*buckets, *filling.values()], key=max)


class Bucket:
    """Some parameters' gradients, side by side in one buffer."""

    def __init__(self, numbers: list[int], params: list[nn.Parameter], is_sparse: bool = False) -> None:
        self.numbers = numbers
        self.params = params
        self.is_sparse = is_sparse
        self.result: Any = None
        """The future of the collective, or of a hook."""
        self.pending = 0
        if not is_sparse:
            self.buffer = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
            self.views = views_like(self.buffer, params)

    @property
    def nbytes(self) -> int:
        """Of its parameters."""
        return sum(param.nbytes for param in self.params)

    def fill(self, slot: int, divisor: float, as_views: bool) -> None:
        """Take a parameter's gradient over, divided by something; zeros where there is none.

        Args:
            slot: which of the bucket's parameters.
            divisor: of the gradient.
            as_views: let the gradient lie in the buffer from now on.
        """
        param = self.params[slot]
        grad = param.grad
        if self.is_sparse:
            self.buffer = torch.zeros_like(param).to_sparse(1) if grad is None else grad.detach().clone()
            self.buffer.div_(divisor)
        elif grad is None:
            self.views[slot].zero_()
        elif self.holds(slot, grad):
            self.views[slot].div_(divisor)
        else:
            # A product with 1/N and a division by N differ in the last bit where N is no power of two.
            torch.mul(grad.detach(), 1.0 / divisor, out=self.views[slot])
            if as_views:
                param.grad = self.views[slot]

    def hand_out(self, slot: int, as_views: bool) -> None:
        """Give a parameter what the buffer holds as its gradient."""
        param = self.params[slot]
        if self.is_sparse:
            param.grad = self.buffer
        elif as_views:
            if param.grad is None or not self.holds(slot, param.grad):
                param.grad = self.views[slot]
        elif param.grad is None:
            param.grad = self.views[slot].clone()
        else:
            param.grad.copy_(self.views[slot])

    def holds(self, slot: int, grad: Tensor) -> bool:
        """Whether a gradient lies in the buffer already."""
        return grad.data_ptr() == self.views[slot].data_ptr() and grad.stride() == self.views[slot].stride()


class GradBucket:
    """What a communication hook is given, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket, self._index, self._is_last = bucket, index, is_last

    def index(self) -> int:
        """Which of the buckets it is, in the order of their communication."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other comes after it."""
        return self._is_last

    def buffer(self) -> Tensor:
        """All gradients, flat; not divided by anything."""
        return self._bucket.buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace what the buffer holds."""
        if self._bucket.is_sparse:
            self._bucket.buffer = buffer
        else:
            self._bucket.buffer.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """The gradients, as views of the buffer."""
        return [self._bucket.buffer] if self._bucket.is_sparse else self._bucket.views

    def parameters(self) -> list[Tensor]:
        """Whose gradients they are."""
        return list(self._bucket.params)


def views_like(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut a flat buffer into views, each with the shape of a tensor, and its strides where those leave no gaps."""
    views, offset = [], 0
    for tensor in tensors:
        part = buffer[offset : offset + tensor.numel()]
        views.append(part.as_strided(tensor.shape, tensor.stride()) if _is_dense(tensor) else part.view(tensor.shape))
        offset += tensor.numel()
    return views


@torch.no_grad()
def broadcast_together(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrite tensors with those of one rank, as few broadcasts as their kinds allow.

    Written through ``.data``, so that autograd does not take it for a change of what it saved.

    Args:
        tensors: the same on all ranks, but for what they hold.
        source: rank in the group.
        group: who takes part.
    """
    for numbers in assign_buckets(tensors, [BROADCAST_BYTES]):
        parts = [tensors[number].data for number in numbers]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.broadcast(flat, group=group, group_src=source)
        for part, received in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(received.view(part.shape))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie without gaps or overlap, in whatever order of its dims."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
