"""CPU offload: parameters, gradients and optimizer states live in host memory, which also updates them.

FSDP itself moves parameters up and gradients down. What updates them is one of two:

- ``native``: the optimizer runs after the backward, while the device waits;
- ``overlapped`` (FSDP2): ``step`` hands bucket after bucket to worker threads, in the order in which the next forward
  needs them, and the forward of a unit waits for its own buckets only. Clipping stays exact, so no update begins before
  the norm is known: what is hidden hides behind the forward. The norm is summed on the host, by the same threads and in
  the same order as without; the gradients are scaled where they are used. Where the model computes in bfloat16, its
  parameters travel as a bfloat16 mirror, which the threads write anew after each update (``parallel.mirror``).

In both, torchrun's ``OMP_NUM_THREADS=1`` would leave the optimizer one thread, so the number is set here: for
``native`` around the step alone, for ``overlapped`` in the workers alone. Source: ZeRO-Offload (arXiv:2101.06840).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdptoys.device import Device, available_cores

from .bucketed_optimizer import BucketedOptimizer
from .state_buckets import Bucket, Unit, cut_buckets

BUCKET_BYTES = 64 * 2**20
"""States a worker updates at a time: small enough that the first unit is soon ready."""
WORKERS = 2
"""Workers share the threads between them: while one is between two kernels, the other keeps the memory busy."""


def threads_per_rank(local_ranks: int) -> int:
    """Cores that this process may use, divided by the ranks of this machine; at least 1."""
    return max(1, available_cores() // local_ranks)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let PyTorch use so many threads on the CPU for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Updates buckets in threads of this process; PyTorch lets go of the interpreter while it computes.

    Args:
        threads: of PyTorch, for all workers together.
        on_updated: called in the worker, with the parameters of each bucket that was updated.
        device: of this rank, which an optimizer's step asks about although its parameters are elsewhere.
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
        # Every thread has a number of its own, but one takes the number that was set last, anywhere, when it first
        # needs its own: let all workers do so now, and set this thread's again.
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
        """Hand over what is to be updated, in this order."""
        assert not self._pending
        self._pending.extend((bucket.unit, self._pool.submit(self._update, bucket)) for bucket in buckets)

    def finish(self, last_unit: int | None) -> None:
        """Wait for the buckets of the units up to ``last_unit``, or all; raise what a worker raised."""
        while self._pending and (last_unit is None or self._pending[0][0] <= last_unit):
            future = self._pending.popleft()[1]
            try:
                future.result()
            except BaseException:
                for _, later in self._pending:
                    later.cancel()
                self._pending.clear()
                raise

    def updated(self, last_unit: int) -> None:
        """Nothing on the device is to be waited for."""

    def settle(self) -> None:
        """States are where they stay."""

    def map(self, function: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Iterable[Tensor]:
        """As the builtin ``map``, over the workers."""
        return self._pool.map(function, parts)

    def _update(self, bucket: Bucket) -> None:
        bucket.update(bucket.slab)
        if self._on_updated is not None:
            self._on_updated(bucket.params)


def overlap_cpu_offload(
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    *,
    model: nn.Module,
    threads: int,
    units_ahead: int = 0,
    on_updated: Callable[[list[nn.Parameter]], None] | None = None,
    device: Device | None = None,
) -> BucketedOptimizer:
    """Let worker threads do what an optimizer over host memory does, and return what to call instead of it.

    Args:
        optimizer: AdamW or SGD, over all parameters, before its first step.
        units: every parameter once, by the module whose forward needs it first, in the order of the forward.
        model: what contains all units.
        threads: of PyTorch, for all workers together.
        units_ahead: units after its own that a unit's forward begins to gather.
        on_updated: called in a worker with parameters that were updated.
        device: of this rank.
    """
    assert not optimizer.state
    buckets = cut_buckets(optimizer, units, BUCKET_BYTES, torch.float32)
    for bucket in buckets:
        bucket.slab = torch.zeros(bucket.elements)
    executor = Workers(threads, on_updated, device)
    return BucketedOptimizer(optimizer, units, buckets, executor, model=model, units_ahead=units_ahead)
