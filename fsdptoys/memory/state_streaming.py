"""Buckets of optimizer states that stream through device buffers: load, update, store.

A bucket takes a free buffer of a ring when it is loaded and returns it when it is stored. One
buffer makes the schedule serial; with more, the loads of the next buckets and the stores of the
last ones overlap with an update. The caller decides when updates happen: all within ``step``, or
unit by unit in the next forward.

Events order the streams, for a bucket b and its buffer:

- the load waits for the last store of b (host memory is complete) and the last store out of the
  buffer (it is free);
- the update, on the compute stream, waits for the load;
- the store waits for the update.

bfloat16 states are widened into one work buffer that only the compute stream touches, and rounded
stochastically on the way back.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdptoys.device import Event
from fsdptoys.utils.seeds import seed_of

from .bucketed_optimizer import Executor
from .state_buckets import Bucket
from .transfers import Transfers

BUFFERS = 3
"""One bucket to load, one to update, one to store."""
CHUNK_ELEMENTS = 2**22
"""Elements rounded at a time; each takes 12 bytes of scratch: 48 MiB."""


class Streaming(Executor):
    """Updates buckets in order; states on the host pass through device buffers.

    Args:
        buffers: buckets on the device at a time.
        defers: whether updates wait for ``finish``, unit by unit.
        dtype: dtype on the host.
        seeds: of stochastic rounding, with the numbers of step and bucket.
    """

    lead = 1
    """Units updated ahead of those that a forward gathers: an update issued on the compute stream
    behind a unit's forward would keep the next all-gather, which waits for it, from overlapping
    with that forward."""

    def __init__(
        self,
        transfers: Transfers,
        buckets: Sequence[Bucket],
        *,
        buffers: int,
        defers: bool,
        dtype: torch.dtype,
        seeds: tuple[int, int],
    ) -> None:
        self.defers = defers
        self._transfers = transfers
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self._seeds = seeds
        self._step = 0
        self._largest = max(
            (bucket.elements for bucket in buckets if bucket.on_host), default=0
        )
        self._buffers = min(buffers, sum(bucket.on_host for bucket in buckets))
        self._dtype = dtype
        self._free: deque[tuple[Tensor, Event]] = deque()
        self._work: Tensor | None = None
        self._generator = torch.Generator(transfers.device)
        self._waiting: deque[Bucket] = deque()
        self._not_loaded: deque[Bucket] = deque()
        self._loaded: dict[Bucket, tuple[Tensor, Event]] = {}
        self._updated: deque[tuple[int, Event]] = deque()

    def start(self, buckets: Sequence[Bucket], step: int) -> None:
        """Begin to load the buckets in this order; earlier ones must be finished."""
        assert not self._waiting
        self._step = step
        self._waiting.extend(buckets)
        self._not_loaded.extend(
            bucket for bucket in buckets if bucket.on_host and bucket.elements
        )
        self._updated.clear()
        if self._not_loaded and not self._free:
            buffers = [
                self._transfers.device_tensor(self._largest, self._dtype)
                for _ in range(self._buffers)
            ]
            # Earlier work on the compute stream may still use their memory.
            free_from = self._transfers.mark()
            self._free.extend((buffer, free_from) for buffer in buffers)
            if self._dtype != torch.float32:
                self._work = torch.empty(
                    self._largest, dtype=torch.float32, device=self._transfers.device
                )
        self._load_ahead()

    def finish(self, last_unit: int | None) -> None:
        """Update the buckets of the units up to ``last_unit``, or all, on the compute stream."""
        while self._waiting and (
            last_unit is None or self._waiting[0].unit <= last_unit
        ):
            bucket = self._waiting.popleft()
            if bucket.on_host and bucket.elements:
                self._update_streamed(bucket)
            else:
                bucket.update(bucket.slab)
                self._updated.append((bucket.unit, self._transfers.mark()))
        if not self.defers:
            # Free the memory for forward and backward.
            self._free.clear()
            self._work = None

    def updated(self, last_unit: int) -> Event:
        """The event after which the units up to ``last_unit`` are updated; None after the first
        call for them."""
        event = None
        while self._updated and self._updated[0][0] <= last_unit:
            event = self._updated.popleft()[1]
        return event

    def settle(self) -> None:
        """Wait until all states are in host memory."""
        for bucket in self._numbers:
            self._transfers.wait_on_host(bucket.stored)

    def _load_ahead(self) -> None:
        while self._free and self._not_loaded:
            bucket = self._not_loaded.popleft()
            buffer, free_from = self._free.popleft()
            loaded = self._transfers.load(
                buffer[: bucket.elements], bucket.slab, after=[bucket.stored, free_from]
            )
            self._loaded[bucket] = (buffer, loaded)

    def _update_streamed(self, bucket: Bucket) -> None:
        buffer, loaded = self._loaded.pop(bucket)
        self._transfers.wait(loaded)
        states = buffer[: bucket.elements]
        if self._work is None:
            bucket.update(states)
            updated = stored_from = self._transfers.mark()
        else:
            work = self._work[: bucket.elements]
            work.copy_(states)
            bucket.update(work)
            updated = self._transfers.mark()
            number = self._numbers[bucket]
            self._generator.manual_seed(seed_of(*self._seeds, self._step, number))
            round_stochastically(states, work, self._generator)
            stored_from = self._transfers.mark()
        bucket.stored = self._transfers.store(bucket.slab, states, after=[stored_from])
        self._free.append((buffer, bucket.stored))
        self._updated.append((bucket.unit, updated))
        self._load_ahead()


@torch.no_grad()
def round_stochastically(
    target: Tensor, source: Tensor, generator: torch.Generator
) -> None:
    """Round ``source``, flat float32, into ``target``, flat bfloat16 of the same length and device.

    A bfloat16 is the upper half of a float32: a uniform 16-bit number is added to the lower half,
    which is then cut off. A value is rounded up with a probability equal to its distance from the
    lower neighbor, so the mean is exact, and updates below half a unit in the last place are not
    lost (arXiv:2010.06192). Infinities and NaNs are kept.
    """
    for into, values in zip(
        target.split(CHUNK_ELEMENTS), source.split(CHUNK_ELEMENTS), strict=True
    ):
        bits = values.view(torch.int32)
        noise = torch.randint(
            0,
            2**16,
            bits.shape,
            dtype=torch.int32,
            device=bits.device,
            generator=generator,
        )
        rounded = noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32)
        into.copy_(torch.where(values.isfinite(), rounded, values))
