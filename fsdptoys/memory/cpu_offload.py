"""CPU offload: parameters, gradients and optimizer states live in host memory, which also updates
them.

FSDP itself uploads parameters and downloads gradients. One of two executors updates them:

- ``native``: the optimizer runs after the backward, while the device waits;
- ``overlapped`` (FSDP2): ``step`` submits buckets to worker threads in the order of the next
  forward; a unit waits for its own buckets only. No update begins before the norm is known,
  which the same threads sum on the host; gradients are scaled within the update. A bfloat16 model's
  parameters are uploaded from a bfloat16 mirror, which the threads refresh after each update
  (``parallel.cpu_offload_cast``).

torchrun's ``OMP_NUM_THREADS=1`` would leave the optimizer one thread, so both set the number:
``native`` around the step, ``overlapped`` in the workers.
Source: ZeRO-Offload (arXiv:2101.06840).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from fsdptoys.device import Device, available_cores, in_host_place

from .bucketed_optimizer import BucketedOptimizer, Executor
from .state_buckets import Bucket, UnitParams, make_buckets

BUCKET_BYTES = 64 * 2**20
"""States that a worker updates at a time: few enough for the first unit to be ready early."""
WORKERS = 2
"""Workers share the threads: while one is between two kernels, the other keeps the memory busy."""


def threads_per_rank(local_ranks: int) -> int:
    """Cores of this process divided by the ranks of this node; at least 1."""
    return max(1, available_cores() // local_ranks)


class Workers(Executor):
    """Updates buckets in threads of this process; PyTorch releases the GIL while it computes.

    Args:
        threads: PyTorch threads of all workers together.
        on_updated: called in the worker with the parameters of each updated bucket.
        device: of this rank; an optimizer's step queries the current device although its parameters
            are on the host.
    """

    defers = True
    lead = 0

    def __init__(
        self,
        threads: int,
        on_updated: Callable[[list[nn.Parameter]], None] | None = None,
        device: Device | None = None,
    ) -> None:
        self._on_updated = on_updated
        self._pending: deque[tuple[int, Future[None]]] = deque()
        workers = min(WORKERS, threads)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="optimizer")
        # Each thread has its own number, but initializes it with the last one set in any thread:
        # initialize all workers now, then restore this thread's.
        before = torch.get_num_threads()
        together = threading.Barrier(workers)

        def begin() -> None:
            if device is not None:
                device.make_current()
            torch.get_num_threads()
            torch.set_num_threads(threads // workers)
            together.wait()

        for future in [self._pool.submit(begin) for _ in range(workers)]:
            future.result()
        torch.set_num_threads(before)

    def start(self, buckets: Sequence[Bucket], step: int) -> None:
        """Submit buckets in this order."""
        assert not self._pending
        self._pending.extend(
            (bucket.unit, self._pool.submit(self._update, bucket)) for bucket in buckets
        )

    def finish(self, last_unit: int | None) -> None:
        """Wait for the buckets of the units up to ``last_unit``, or for all; raise a worker's
        error."""
        while self._pending and (last_unit is None or self._pending[0][0] <= last_unit):
            future = self._pending.popleft()[1]
            try:
                future.result()
            except BaseException:
                for _, later in self._pending:
                    later.cancel()
                self._pending.clear()
                raise

    def map(
        self, function: Callable[[Tensor], Tensor], parts: Iterable[Tensor]
    ) -> Iterable[Tensor]:
        """Like the builtin ``map``, on the workers."""
        return self._pool.map(function, parts)

    def _update(self, bucket: Bucket) -> None:
        bucket.update(bucket.slab)
        if self._on_updated is not None:
            self._on_updated(bucket.params)


def overlap_cpu_offload(
    optimizer: torch.optim.Optimizer,
    units: Sequence[UnitParams],
    *,
    model: nn.Module,
    threads: int,
    units_ahead: int = 0,
    on_updated: Callable[[list[nn.Parameter]], None] | None = None,
    device: Device | None = None,
) -> BucketedOptimizer:
    """Replace AdamW or SGD before its first step by an optimizer that updates host memory in worker
    threads."""
    assert not optimizer.state
    buckets = make_buckets(optimizer, units, BUCKET_BYTES, torch.float32)
    for bucket in buckets:
        bucket.slab = in_host_place(torch.zeros(bucket.elements))
    executor = Workers(threads, on_updated, device)
    return BucketedOptimizer(
        optimizer, units, buckets, executor, model=model, units_ahead=units_ahead
    )
