"""Model of PyTorch's caching allocator: the device memory that a sequence of requests reserves.

It keeps, splits and merges memory that it once took from the device. How much more it holds
("reserved") than tensors have ("allocated") depends on the order of all requests; hence a
simulation. Small and large requests of each stream have separate pools. ``native``: a pool takes
segments of fixed sizes. ``expandable``: it is one range of addresses to which pages are mapped as
it grows. At the limit it waits for the device and gives back all it can: native segments that are
entirely free, and entire pages of free blocks. An NPU's allocator is a port with two rules of its
own.

``record_stream`` is not modeled: the caller frees a block when it may be used again. Segment
addresses rise in order, which a driver does not guarantee.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management,
https://zdevito.github.io/2022/08/04/cuda-caching-allocator.html, and the behavior of
``c10/cuda/CUDACachingAllocator`` from torch 2.1 on; for NPUs
``torch_npu/csrc/core/npu/NPUCachingAllocator.cpp`` of https://github.com/Ascend/pytorch.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator

from fsdptoys.config.plan_config import AllocatorKind

MIB = 2**20
MIN_BLOCK_BYTES = 512  # Every block is a multiple
SMALL_BYTES = MIB  # Largest request of a small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # Native segments, and pages of expandable ones, in small pools
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
ADDRESSES = 2**32 * LARGE_SEGMENT_BYTES
"""Addresses of one segment: more than any device has, and a multiple of both page sizes."""


class OutOfMemory(Exception):  # noqa: N818 (PyTorch's own words)
    """A request does not fit under the limit, even after all cached memory was given back."""

    def __init__(
        self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int
    ) -> None:
        self.requested_bytes, self.allocated_bytes = requested_bytes, allocated_bytes
        self.reserved_bytes, self.limit_bytes = reserved_bytes, limit_bytes
        held = f"{allocated_bytes} are allocated and {reserved_bytes} reserved of {limit_bytes}"
        super().__init__(f"a request for {requested_bytes} bytes does not fit: {held}")


class Block:
    """A range of addresses in a segment: in use, free, or unmapped."""

    __slots__ = ("address", "in_use", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: "Pool", address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.in_use = False
        self.previous: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks of one stream, small or large."""

    __slots__ = ("allocated", "free", "highest", "is_small", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream, self.is_small = stream, is_small
        self.free: list[tuple[int, int, Block]] = []  # (size, address, block), sorted
        self.unmapped: list[tuple[int, Block]] = []  # (address, block), sorted
        # Bytes of blocks in use: now, and the most since ``take_most_used``
        self.allocated = self.highest = 0

    @property
    def segment_bytes(self) -> int:
        """Size of the smallest native segment, and of a page."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def put(self, block: Block) -> None:
        """Make a block available."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        """Make a block unavailable; its size and address must be unchanged."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator(ABC):
    """Common part of both kinds: pools, best fit, splitting and merging.

    Args:
        memory_limit_bytes: limit of reserved memory; None for no limit.
        wait_for_device: called before cached memory is given back, when PyTorch waits for the
            device; may free blocks.
        device_type: ``npu`` selects the NPU's rules.
    """

    leaves_bytes = MIN_BLOCK_BYTES  # Smallest rest of a large block that is split off
    npu_alignment_bytes = 1

    def __init__(
        self,
        memory_limit_bytes: int | None = None,
        wait_for_device: Callable[[], None] = lambda: None,
        device_type: str = "cuda",
    ) -> None:
        self.memory_limit_bytes, self.wait_for_device = memory_limit_bytes, wait_for_device
        self._padding_bytes = NPU_PADDING_BYTES if device_type == "npu" else 0
        self._alignment_bytes = self.npu_alignment_bytes if device_type == "npu" else 1
        self.allocated_bytes = 0  # Bytes of blocks in use, rounded: ``memory_allocated()``
        self.reserved_bytes = 0  # Bytes taken from the device: ``memory_reserved()``
        self.peak_reserved_bytes = 0
        self.releases = 0  # How often cached memory was given back for lack of memory
        self._pools: dict[int, tuple[Pool, Pool]] = {}
        # Of each stream with a request
        self.reserved_by_stream: defaultdict[int, int] = defaultdict(int)
        self._next_address = ADDRESSES

    def allocate(self, bytes: int, stream: int) -> Block:
        """Return a block for a request of at least one byte, or raise an ``OutOfMemory``."""
        assert bytes > 0, "PyTorch asks for no empty blocks"
        size = -(-(bytes + self._padding_bytes) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = Pool(stream, is_small=False), Pool(stream, is_small=True)
            self.reserved_by_stream[stream] += 0
        pool = pools[size <= SMALL_BYTES]
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            self.release_cached()
            block = self._grow(pool, size)
        if block is None:
            assert self.memory_limit_bytes is not None
            raise OutOfMemory(
                bytes, self.allocated_bytes, self.reserved_bytes, self.memory_limit_bytes
            )
        if (
            size >= ROUND_LARGE_BYTES
            and (gap := -block.address % self._alignment_bytes)
            and gap + size <= block.size
        ):
            before, block = block, self._cut(block, gap)
            pool.put(before)
        if block.size - size >= (MIN_BLOCK_BYTES if pool.is_small else self.leaves_bytes):
            pool.put(self._cut(block, size))
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
        block.pool.put(self._merge(block))

    def release_cached(self) -> None:
        """Give cached memory back to the device: ``empty_cache()``."""
        self.wait_for_device()
        self.releases += 1
        for pool in self.pools():
            for _, _, block in list(pool.free):
                self._release(block)

    def take_most_used(self, stream: int) -> int:
        """Most bytes of blocks in use in the pools of a stream, since the last call."""
        most = sum(pool.highest for pool in self._pools[stream])
        for pool in self._pools[stream]:
            pool.highest = pool.allocated
        return most

    def pools(self) -> Iterator[Pool]:
        """All pools: large ones first, as PyTorch empties them."""
        for is_small in (False, True):
            yield from (pools[is_small] for pools in self._pools.values())

    @abstractmethod
    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Take the free block for a request, if there is one."""

    @abstractmethod
    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Take memory from the device for a block of at least that size; None if the limit forbids
        it."""

    @abstractmethod
    def _release(self, block: Block) -> None:
        """Give a free block's memory back to the device as far as possible."""

    def _reserve(self, pool: Pool, bytes: int) -> bool:
        """Count memory from the device; False if it exceeds the limit."""
        reserved = self.reserved_bytes + bytes
        if self.memory_limit_bytes is not None and bytes > 0 and reserved > self.memory_limit_bytes:
            return False
        self.reserved_bytes = reserved
        self.reserved_by_stream[pool.stream] += bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def _new_addresses(self) -> int:
        self._next_address += ADDRESSES
        return self._next_address - ADDRESSES

    @staticmethod
    def _cut(block: Block, size: int) -> Block:
        """Shorten a block and return the rest, which is in no pool yet."""
        rest = Block(block.pool, block.address + size, block.size - size, block.mapped)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        return rest

    @staticmethod
    def _merge(block: Block) -> Block:
        """Join a block taken from its pool with free neighbors, mapped or unmapped like it."""
        before, after = block.previous, block.next
        if before is not None and not before.in_use and before.mapped is block.mapped:
            block.pool.take(before)
            block.address, block.size = before.address, block.size + before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and not after.in_use and after.mapped is block.mapped:
            block.pool.take(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        return block


class NativeAllocator(Allocator):
    """Segments of fixed size: PyTorch's default."""

    leaves_bytes = SMALL_BYTES + MIN_BLOCK_BYTES

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        index = bisect_left(free, (size,))
        return free.pop(index)[2] if index < len(free) else None

    def _grow(self, pool: Pool, size: int) -> Block | None:
        segment_bytes = pool.segment_bytes
        if not pool.is_small and size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        return (
            Block(pool, self._new_addresses(), segment_bytes)
            if self._reserve(pool, segment_bytes)
            else None
        )

    def _release(self, block: Block) -> None:
        if block.previous is None and block.next is None:
            block.pool.take(block)
            self._reserve(block.pool, -block.size)


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
        room = _room(free[index][2])
        while index + 1 < len(free) and (next_room := _room(free[index + 1][2])) < room:
            index, room = index + 1, next_room
        return free.pop(index)[2]

    def _grow(self, pool: Pool, size: int) -> Block | None:
        block = self._find_addresses(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            # The next block is unmapped: a free block would have been merged.
            hole = block.next
            assert hole is not None and not hole.mapped
            if not self._map(hole, min(size - block.size, hole.size)):
                return None
            block = hole
        pool.take(block)
        return block

    def _find_addresses(self, pool: Pool, size: int) -> Block:
        """The first free block, mapped or not, from which that many addresses are free."""
        for _, hole in pool.unmapped:
            before = hole.previous
            start = before if before is not None and not before.in_use else hole
            found = 0
            block: Block | None = start
            while found < size and block is not None and not block.in_use:
                found += block.size
                block = block.next
            if found >= size:
                return start
        segment = Block(pool, self._new_addresses(), ADDRESSES, mapped=False)
        pool.put(segment)
        return segment

    def _map(self, hole: Block, size: int) -> bool:
        """Map pages for that many bytes at the beginning of a hole, merge it with free neighbors,
        and pool it."""
        pool = hole.pool
        size = -(-size // pool.segment_bytes) * pool.segment_bytes
        if not self._reserve(pool, size):
            return False
        pool.take(hole)
        if size < hole.size:
            pool.put(self._cut(hole, size))
        hole.mapped = True
        pool.put(self._merge(hole))
        return True

    def _release(self, block: Block) -> None:
        pool, page = block.pool, block.pool.segment_bytes
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.take(block)
        if start > block.address:
            before, block = block, self._cut(block, start - block.address)
            pool.put(before)
        if end < block.address + block.size:
            pool.put(self._cut(block, end - block.address))
        self._reserve(pool, -block.size)
        block.mapped = False
        pool.put(self._merge(block))


def _room(block: Block) -> int:
    """Size of a free block, including unmapped addresses after it."""
    after = block.next
    return block.size if after is None or after.mapped else block.size + after.size


def build_allocator(
    kind: AllocatorKind, limit_bytes: int | None = None, device_type: str = "cuda"
) -> Allocator:
    """Construct an allocator; see ``Allocator`` for the arguments."""
    made = ExpandableAllocator if kind is AllocatorKind.expandable else NativeAllocator
    return made(limit_bytes, device_type=device_type)
