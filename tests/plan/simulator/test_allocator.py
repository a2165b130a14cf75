"""The allocators' rules one by one, their invariants over random requests, and a second, slow
implementation.

Differences of torch_npu's allocator from CUDA's are by its source (``NPUCachingAllocator.cpp``).
"""

import itertools
import random

import pytest

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.allocator import (
    LARGE_SEGMENT_BYTES,
    MIB,
    SMALL_SEGMENT_BYTES,
    Allocator,
    Block,
    ExpandableAllocator,
    NativeAllocator,
    OutOfMemory,
    build_allocator,
)
from fsdptoys.plan.simulator.events import (
    Alloc,
    Free,
    Kernel,
    KernelKind,
    Mark,
    RecordStream,
    Trace,
)
from fsdptoys.plan.simulator.replay import replay
from tests.harness.traced_runs import imagined_hardware

KINDS = [NativeAllocator, ExpandableAllocator]
GIB = 2**30
EDGES = [1, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 19 * MIB - 512, 19 * MIB, 20 * MIB]
"""Bytes at which a rule changes."""


@pytest.mark.parametrize(
    ("requested", "native", "expandable"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (31 * MIB, 32 * MIB, 40 * MIB),
    ],
)
def test_first_request_reserves_the_documented_segment(
    requested: int, native: int, expandable: int
) -> None:
    """Oracle: the table of the guide to the allocator (zdevito.github.io), and pages of 2 and 20
    MiB."""
    assert _reserved(NativeAllocator(), requested) == native
    assert _reserved(ExpandableAllocator(), requested) == expandable


def test_one_mebibyte_counts_as_large_on_an_npu() -> None:
    """Oracle: the padded size exceeds the limit of small blocks, so a page of 20 MiB is mapped, not
    one of 2 MiB."""
    assert _reserved(build_allocator(AllocatorKind.expandable, device_type="npu"), MIB) == 20 * MIB


@pytest.mark.parametrize("kind", KINDS)
def test_pools_of_streams_and_sizes_are_separate(kind: type[Allocator]) -> None:
    """Oracle: the rule: free memory of one pool serves no request of another."""
    allocator = kind()
    for stream in (0, 1):
        for requested in (MIB, 20 * MIB):
            allocator.free(allocator.allocate(requested, stream))
    assert allocator.reserved_by_stream == {0: 22 * MIB, 1: 22 * MIB}
    assert allocator.reserved_bytes == 44 * MIB


def test_expandable_segment_grows_by_the_missing_pages() -> None:
    """Oracle: computed by hand: 90 MiB stay, 30 are free at the end of 120, so 100 more need 70:
    four pages."""
    allocator = ExpandableAllocator()
    allocator.allocate(90 * MIB, stream=0)
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    assert allocator.reserved_bytes == 120 * MIB
    block = allocator.allocate(100 * MIB, stream=0)
    assert allocator.reserved_bytes == 200 * MIB
    assert block.previous is not None and block.previous.size == 90 * MIB


def test_expandable_segment_end_is_used_last() -> None:
    """Oracle: the rule: 10 MiB fit the 15 at the end best, but the end can grow, so the hole of 40
    is used."""
    allocator = ExpandableAllocator()
    hole = allocator.allocate(40 * MIB, stream=0)
    allocator.allocate(5 * MIB, stream=0)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(hole)
    assert allocator.allocate(10 * MIB, stream=0).address == hole.address


def test_native_releases_free_segments_before_it_fails() -> None:
    """Oracle: computed by hand, under 100 MiB: a free segment of 60 makes room, half of one does
    not."""
    allocator = NativeAllocator(memory_limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB, stream=0))
    allocator.allocate(80 * MIB, stream=1)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes, allocator.releases) == (
        80 * MIB,
        80 * MIB,
        1,
    )
    with pytest.raises(
        OutOfMemory, match="83886080 are allocated and 83886080 reserved of 104857600"
    ) as caught:
        allocator.allocate(40 * MIB, stream=0)
    assert caught.value.requested_bytes == 40 * MIB


def test_expandable_unmaps_free_pages_and_remaps_them() -> None:
    """Oracle: by hand: 50 free MiB between live 10 and 20 contain two full pages; 70 more only fit
    at the end."""
    allocator = ExpandableAllocator(memory_limit_bytes=120 * MIB)
    first, hole, last = (allocator.allocate(size * MIB, stream=0) for size in (10, 50, 20))
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(hole)
    other = allocator.allocate(70 * MIB, stream=1)
    assert allocator.reserved_by_stream == {0: 40 * MIB, 1: 80 * MIB}
    allocator.free(other)
    again = allocator.allocate(50 * MIB, stream=0)
    assert again.address == hole.address  # the addresses of the hole, with the pages that it lost
    assert allocator.reserved_by_stream == {0: 80 * MIB, 1: 0}
    assert first.address < again.address < last.address


@pytest.mark.parametrize("limit", [None, 3 * GIB])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_over_random_requests(
    kind: type[Allocator], seed: int, limit: int | None
) -> None:
    """Oracle: invariants: no overlap, consistent sums, and no lost bytes after all blocks are
    freed."""
    generator = random.Random(seed)
    allocator = kind(limit)
    live: list[Block] = []
    for number in range(2000):
        if live and generator.random() < (0.45 if len(live) < 150 else 0.8):
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            try:
                live.append(
                    allocator.allocate(_some_size(generator), stream=generator.randrange(3))
                )
            except OutOfMemory:
                assert limit is not None
        if number % 50 == 0:
            _check(allocator, live)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    _check(allocator, [])
    for pool in allocator.pools():
        assert all(block.previous is None or not block.previous.mapped for _, _, block in pool.free)
        assert all(block.next is None or not block.next.mapped for _, _, block in pool.free)
    peak = allocator.peak_reserved_bytes
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
    assert allocator.peak_reserved_bytes == peak
    assert limit is None or peak <= limit


@pytest.mark.parametrize("seed", range(3))
def test_native_agrees_with_a_slow_reference_implementation(seed: int) -> None:
    """Oracle: ``_SlowNative``, which scans plain lists; addresses and totals must be equal."""
    generator = random.Random(seed)
    ours, slow = NativeAllocator(), _SlowNative()
    live: list[tuple[Block, tuple[int, int]]] = []
    numbers: dict[int, int] = {}
    for _ in range(1500):
        if live and generator.random() < 0.48:
            block, place = live.pop(generator.randrange(len(live)))
            ours.free(block)
            slow.free(place)
        else:
            size, stream = _some_size(generator), generator.randrange(2)
            block, place = ours.allocate(size, stream), slow.allocate(size, stream)
            base = _first(block).address
            assert numbers.setdefault(base, place[0]) == place[0]
            assert block.address - base == place[1]
            live.append((block, place))
        assert ours.reserved_bytes == sum(slow.sizes)


@pytest.mark.parametrize("seed", range(5))
def test_expandable_wastes_at_most_one_page_per_pool(seed: int) -> None:
    """Oracle: a stream that only grows has one address range without gaps: at most one page per
    pool is unused."""
    generator = random.Random(seed)
    native, expandable = NativeAllocator(), ExpandableAllocator()
    for _ in range(300):
        size = _some_size(generator)
        for allocator in (native, expandable):
            allocator.allocate(size, stream=0)
    pages = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
    assert expandable.reserved_bytes < expandable.allocated_bytes + pages
    assert expandable.reserved_bytes < native.reserved_bytes + pages


@pytest.mark.parametrize("kind", AllocatorKind)
def test_build_allocator_applies_the_limit(kind: AllocatorKind) -> None:
    """Oracle: a request of the limit succeeds, a larger one fails."""
    build_allocator(kind, 40 * MIB).allocate(40 * MIB, stream=0)
    with pytest.raises(OutOfMemory):
        build_allocator(kind, 40 * MIB).allocate(40 * MIB + 1, stream=0)


def _reserved(allocator: Allocator, requested: int) -> int:
    allocator.allocate(requested, stream=0)
    return allocator.reserved_bytes


def _some_size(generator: random.Random) -> int:
    if generator.random() < 0.2:
        return generator.choice(EDGES)
    return int(2 ** generator.uniform(5, 28))


def _first(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def _check(allocator: Allocator, live: list[Block]) -> None:
    assert (
        sum(block.size for block in live) == allocator.allocated_bytes <= allocator.reserved_bytes
    )
    assert sum(allocator.reserved_by_stream.values()) == allocator.reserved_bytes
    free = [block for pool in allocator.pools() for _, _, block in pool.free]
    holes = [block for pool in allocator.pools() for _, block in pool.unmapped]
    assert sum(block.size for block in live + free) == allocator.reserved_bytes
    for pool in allocator.pools():
        assert pool.free == sorted((block.size, block.address, block) for _, _, block in pool.free)
    spans = sorted((block.address, block.address + block.size) for block in live + free + holes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for block in live + free + holes:
        if block.next is not None:
            assert block.next.previous is block and block.next.address == block.address + block.size
            # Else they had been merged
            assert block.in_use or block.next.in_use or block.mapped != block.next.mapped


class _SlowNative:
    """The same rules over plain lists: each segment is a list of [offset, size, in use] in order of
    address."""

    def __init__(self) -> None:
        self.segments: list[list[list[int]]] = []
        self.keys: list[tuple[int, bool]] = []
        self.sizes: list[int] = []

    def allocate(self, requested: int, stream: int) -> tuple[int, int]:
        size = max(512, (requested + 511) // 512 * 512)
        small = size <= MIB
        fits = [
            (piece[1], number, place)
            for number, segment in enumerate(self.segments)
            if self.keys[number] == (stream, small)
            for place, piece in enumerate(segment)
            if not piece[2] and piece[1] >= size
        ]
        if fits:
            _, number, place = min(fits)
        else:
            taken = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            self.segments.append([[0, taken, 0]])
            self.keys.append((stream, small))
            self.sizes.append(taken)
            number, place = len(self.segments) - 1, 0
        piece = self.segments[number][place]
        rest = piece[1] - size
        if rest >= 512 if small else rest > MIB:
            self.segments[number].insert(place + 1, [piece[0] + size, rest, 0])
            piece[1] = size
        piece[2] = 1
        return number, piece[0]

    def free(self, where: tuple[int, int]) -> None:
        number, offset = where
        next(piece for piece in self.segments[number] if piece[0] == offset)[2] = 0
        joined: list[list[int]] = []
        for piece in self.segments[number]:
            if joined and not joined[-1][2] and not piece[2]:
                joined[-1][1] += piece[1]
            else:
                joined.append(piece)
        self.segments[number] = joined


KIB = 2**10


@pytest.mark.parametrize("kind", AllocatorKind)
@pytest.mark.parametrize(
    ("device_type", "bytes", "size"),
    [
        *(("cuda", 1, 512), ("cuda", 512, 512), ("cuda", 513, 1024)),
        *(
            ("npu", 1, 512),
            ("npu", 480, 512),
            ("npu", 481, 1024),
            ("npu", 512, 1024),
            ("npu", 4 * MIB, 4 * MIB + 512),
        ),
    ],
)
def test_requests_are_rounded_to_512_bytes_after_32_more_on_an_npu(
    kind: AllocatorKind, device_type: str, bytes: int, size: int
) -> None:
    """Oracle: ``round_size`` of each."""
    assert build_allocator(kind, device_type=device_type).allocate(bytes, 0).size == size


def test_large_expandable_blocks_of_an_npu_are_aligned_to_16_kib() -> None:
    """Oracle: by hand: 4 MiB take 512 bytes more, so the next block starts 16 KiB later, with 15.5
    KiB between them."""
    allocator = build_allocator(AllocatorKind.expandable, device_type="npu")
    first, second = (allocator.allocate(4 * MIB, 0) for _ in range(2))
    assert second.address - first.address == 4 * MIB + 16 * KIB
    gap = first.next
    assert gap is not None and not gap.in_use and gap.size == 16 * KIB - 512 and gap.next is second
    assert allocator.allocated_bytes == 2 * (4 * MIB + 512)
    allocator.free(first)
    allocator.free(second)
    (pool,) = (pool for pool in allocator.pools() if pool.free)
    assert [size for size, _, _ in pool.free] == [20 * MIB]


def test_native_segments_of_an_npu_are_not_aligned() -> None:
    """Oracle: alignment applies to expandable segments only."""
    allocator = build_allocator(AllocatorKind.native, device_type="npu")
    first, second = (allocator.allocate(4 * MIB, 0) for _ in range(2))
    assert second.address - first.address == 4 * MIB + 512


@pytest.mark.parametrize(("device_type", "pages"), [("cuda", 1), ("npu", 2)])
def test_recording_a_blocks_own_stream_delays_its_reuse_on_an_npu(
    device_type: str, pages: int
) -> None:
    """Oracle: ``recordStream`` of CUDA ignores the stream that a block was made on, that of an NPU
    does not."""
    block = Category.temporary
    busy = Kernel("busy", 0, KernelKind.memory, 0.0, 10**12, "float32")
    events = [
        *(
            Mark(0, "construction"),
            Alloc(1, 20 * MIB - 32, 0, block),
            busy,
            RecordStream(1, 0),
            Free(1),
        ),
        *(Alloc(2, 20 * MIB - 32, 0, block), Mark(1, "end")),
    ]
    hardware = imagined_hardware(device_type=device_type)
    allocator = build_allocator(AllocatorKind.expandable, device_type=device_type)
    assert replay(Trace(events), hardware, allocator).memory().reserved_bytes == pages * 20 * MIB
