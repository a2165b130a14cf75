"""Buckets of other kinds for DDP: communication hooks in place of the all-reduce, and sparse gradients."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .core import Bucket
from .unused_parameters import PartialReducer

CommHook = Callable[[Any, Any], Any]


class SparseBucket(Bucket):
    """One sparse gradient, sent by itself as by PyTorch; its buffer is the gradient itself."""

    def __init__(self, numbers: list[int], params: list[nn.Parameter]) -> None:
        self.numbers, self.params, self.views = numbers, params, []
        self.pending, self.result = 0, None

    def fill(self, slot: int, divisor: float, as_views: bool) -> None:
        """Copy the gradient."""
        (param,) = self.params
        grad = param.grad
        self.buffer = torch.zeros_like(param).to_sparse(1) if grad is None else grad.detach().clone()
        self.buffer.div_(divisor)

    def hand_out(self, slot: int, as_views: bool) -> None:
        """Set the gradient."""
        self.params[slot].grad = self.buffer


class GradBucket:
    """The argument of a communication hook, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket, self._index, self._is_last = bucket, index, is_last

    def index(self) -> int:
        """Return the bucket's index in the order of communication."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients, flat and undivided."""
        return self._bucket.buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the gradients."""
        set_buffer(self._bucket, buffer)

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer."""
        return self._bucket.views or [self._bucket.buffer]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of the gradients."""
        return list(self._bucket.params)


class HookedReducer(PartialReducer):
    """A reducer whose buckets a communication hook may send."""

    comm_hook: tuple[CommHook, Any] | None = None

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Send all buckets through ``hook``, which divides gradients itself; check its annotations."""
        if not callable(hook):
            self.fail(TypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        if signature.parameters["bucket"].annotation not in (inspect.Parameter.empty, dist.GradBucket):
            self.fail(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[Tensor]):
            self.fail(ValueError, "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
        if self.comm_hook is not None:
            self.fail(RuntimeError, "register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.comm_hook = (hook, state)

    def mark_ready(self, number: int) -> None:
        """Leave the division to the hook."""
        if self.comm_hook is not None:
            self.divisor = 1
        super().mark_ready(number)

    def all_reduce(self, index: int) -> None:
        """Call the hook if there is one."""
        if self.comm_hook is None:
            return super().all_reduce(index)
        hook, state = self.comm_hook
        bucket = self.buckets[index]
        bucket.result = hook(state, GradBucket(bucket, index, index == len(self.buckets) - 1))
        if not isinstance(bucket.result, torch.futures.Future.__bases__):  # futures of collectives are of the base
            kind = type(bucket.result)
            self.fail(RuntimeError, f"callback must return a torch.futures.Future object, but got {kind}")

    def wait(self, bucket: Bucket) -> None:
        """Copy the hook's result into the buffer."""
        if self.comm_hook is None:
            return super().wait(bucket)
        result, bucket.result = bucket.result.wait(), None
        set_buffer(bucket, result[0] if isinstance(result, list | tuple) else result)


def set_buffer(bucket: Bucket, buffer: Tensor) -> None:
    """Replace the gradients of a bucket."""
    if isinstance(bucket, SparseBucket):
        bucket.buffer = buffer
    elif buffer.data_ptr() != bucket.buffer.data_ptr():
        bucket.buffer.copy_(buffer)


def sparse_weights(module: nn.Module) -> set[Tensor]:
    """Return the parameters of a module whose gradients are sparse."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return {layer.weight for layer in layers if layer.sparse}
