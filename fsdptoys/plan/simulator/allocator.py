"""Model of PyTorch's caching allocator: the device memory that a sequence of requests reserves.

It keeps, splits and merges memory that it once took from the device. How much more it holds
("reserved") than tensors have ("allocated") depends on the order of all requests; hence a
simulation. Small and large requests of each stream have separate pools. ``native``: a pool takes
segments of fixed sizes. ``expandable``: it is one range of addresses to which pages are mapped as
it grows. An NPU's allocator is a port with two rules of its own.

Not covered: the limit of a device, at which PyTorch gives cached memory back. ``record_stream`` is
not modeled: the caller frees a block when it may be used again. Segment addresses rise in order,
which a driver does not guarantee.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management,
https://zdevito.github.io/2022/08/04/cuda-caching-allocator.html, and the behavior of
``c10/cuda/CUDACachingAllocator`` from torch 2.1 on; for NPUs
``torch_npu/csrc/core/npu/NPUCachingAllocator.cpp`` of https://github.com/Ascend/pytorch.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict

from fsdptoys.config.plan_config import AllocatorKind

MIB = 2**20
MIN_BLOCK_BYTES = 512  # Every block is a multiple
SMALL_BYTES = MIB  # Largest request of a small pool
# Native segments, and pages of expandable ones, in small pools
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Native segments for requests below ``MIN_LARGE_BYTES``, and pages of expandable ones, in large
pools."""
MIN_LARGE_BYTES = 10 * MIB
"""Requests of at least this size get a native segment of their own, rounded up to
``ROUND_LARGE_BYTES``."""
ROUND_LARGE_BYTES = 2 * MIB
NPU_PADDING_BYTES = 32  # Added to each request on an NPU
NPU_ALIGNMENT_BYTES = 16 * 2**10
"""Alignment of large blocks (from ``ROUND_LARGE_BYTES``) in expandable segments on an NPU."""


class Block:
    """A range of addresses in a segment, in use or free."""

    __slots__ = ("address", "in_use", "next", "pool", "previous", "size")

    def __init__(self, pool: "Pool", address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.in_use = False
        self.previous: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks of one stream, small or large."""

    __slots__ = ("allocated", "free", "highest", "is_small", "last", "stream")

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []  # (size, address, block), sorted
        self.last: Block | None = None  # At the end of an expandable segment
        # Bytes of blocks in use: now, and the most since ``take_most_used``
        self.allocated = 0
        self.highest = 0

    @property
    def segment_bytes(self) -> int:
        """Size of the smallest native segment, and of a page."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def add(self, block: Block) -> None:
        """Make a block available."""
        insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        """Make a block unavailable; its size and address must be unchanged."""
        del self.free[bisect_left(self.free, (block.size, block.address))]


class Allocator(ABC):
    """Common part of both kinds: pools, best fit, splitting and merging.

    Args:
        device_type: ``npu`` selects the NPU's rules.
    """

    leaves_bytes = MIN_BLOCK_BYTES  # Smallest rest of a large block that is split off
    npu_alignment_bytes = 1

    def __init__(self, device_type: str = "cuda") -> None:
        self._padding_bytes = NPU_PADDING_BYTES if device_type == "npu" else 0
        self._alignment_bytes = self.npu_alignment_bytes if device_type == "npu" else 1
        # Bytes of blocks in use, rounded: ``memory_allocated()``
        self.allocated_bytes = 0
        self.pools: dict[int, tuple[Pool, Pool]] = {}
        # Bytes taken from the device for each stream with a request: ``memory_reserved()``
        self.reserved_by_stream: defaultdict[int, int] = defaultdict(int)

    def allocate(self, bytes: int, stream: int) -> Block:
        """Return a block for a request of at least one byte."""
        assert bytes > 0, "PyTorch asks for no empty blocks"
        size = -(-(bytes + self._padding_bytes) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pools = self.pools.get(stream)
        if pools is None:
            pools = self.pools[stream] = (
                Pool(stream, is_small=False),
                Pool(stream, is_small=True),
            )
        pool = pools[size <= SMALL_BYTES]
        block = self._best_fit(pool, size) or self._grow(pool, size)
        gap = -block.address % self._alignment_bytes
        if gap and size >= ROUND_LARGE_BYTES and gap + size <= block.size:
            before = block
            block = self._cut(before, gap)
            pool.add(before)
        if block.size - size >= (
            MIN_BLOCK_BYTES if pool.is_small else self.leaves_bytes
        ):
            pool.add(self._cut(block, size))
        block.in_use = True
        self.allocated_bytes += block.size
        pool.allocated += block.size
        if pool.allocated > pool.highest:
            pool.highest = pool.allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back for later requests of its stream."""
        assert block.in_use, "freed twice"
        block.in_use = False
        self.allocated_bytes -= block.size
        block.pool.allocated -= block.size
        block.pool.add(self._merge(block))

    def take_most_used(self, stream: int) -> int:
        """Most bytes of blocks in use in the pools of a stream, since the last call."""
        most = sum(pool.highest for pool in self.pools[stream])
        for pool in self.pools[stream]:
            pool.highest = pool.allocated
        return most

    @abstractmethod
    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Take the free block for a request, if there is one."""

    @abstractmethod
    def _grow(self, pool: Pool, size: int) -> Block:
        """Take memory from the device for a block of at least that size."""

    @staticmethod
    def _cut(block: Block, size: int) -> Block:
        """Shorten a block and return the rest, which is in no pool yet."""
        rest = Block(block.pool, block.address + size, block.size - size)
        rest.previous = block
        rest.next = block.next
        if rest.next is None:
            block.pool.last = rest
        else:
            rest.next.previous = rest
        block.next = rest
        block.size = size
        return rest

    @staticmethod
    def _merge(block: Block) -> Block:
        """Join a block with its free neighbors, taken from their pool."""
        before = block.previous
        after = block.next
        if before is not None and not before.in_use:
            block.pool.take(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and not after.in_use:
            block.pool.take(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        if block.next is None:
            block.pool.last = block
        return block


class NativeAllocator(Allocator):
    """Segments of fixed size: PyTorch's default."""

    leaves_bytes = SMALL_BYTES + MIN_BLOCK_BYTES
    _next_address = 0

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        index = bisect_left(free, (size,))
        return free.pop(index)[2] if index < len(free) else None

    def _grow(self, pool: Pool, size: int) -> Block:
        segment_bytes = pool.segment_bytes
        if not pool.is_small and size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        self.reserved_by_stream[pool.stream] += segment_bytes
        segment = Block(pool, self._next_address, segment_bytes)
        self._next_address += segment_bytes
        return segment


class ExpandableAllocator(Allocator):
    """One growing segment per pool: ``expandable_segments:True``."""

    npu_alignment_bytes = NPU_ALIGNMENT_BYTES

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        # A block at the end counts with the size that it could reach, so another one that fits is
        # taken first.
        if free[index][2] is pool.last and index + 1 < len(free):
            index += 1
        return free.pop(index)[2]

    def _grow(self, pool: Pool, size: int) -> Block:
        block = pool.last
        if block is None:
            block = pool.last = Block(pool, 0, 0)
        elif block.in_use:
            block = self._cut(block, block.size)
        else:
            pool.take(block)
        pages = -(-(size - block.size) // pool.segment_bytes)
        self.reserved_by_stream[pool.stream] += pages * pool.segment_bytes
        block.size += pages * pool.segment_bytes
        return block


def build_allocator(kind: AllocatorKind, device_type: str = "cuda") -> Allocator:
    """Construct an allocator; see ``Allocator`` for the arguments."""
    if kind is AllocatorKind.expandable:
        return ExpandableAllocator(device_type)
    return NativeAllocator(device_type)
