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
    MIB,
    Allocator,
    Block,
    ExpandableAllocator,
    NativeAllocator,
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
EDGES = [
    1,
    512,
    513,
    MIB,
    MIB + 1,
    10 * MIB - 512,
    10 * MIB,
    19 * MIB - 512,
    19 * MIB,
    20 * MIB,
]
"""Bytes at which a rule changes."""


@pytest.mark.parametrize(
    ("device_type", "requested", "native", "expandable"),
    [
        ("cuda", 1, 2 * MIB, 2 * MIB),
        ("cuda", MIB, 2 * MIB, 2 * MIB),
        (
            "npu",
            MIB,
            20 * MIB,
            20 * MIB,
        ),  # its padded size exceeds the limit of small blocks
        ("cuda", MIB + 1, 20 * MIB, 20 * MIB),
        ("cuda", 10 * MIB - 512, 20 * MIB, 20 * MIB),
        ("cuda", 10 * MIB, 10 * MIB, 20 * MIB),
        ("cuda", 31 * MIB, 32 * MIB, 40 * MIB),
    ],
)
def test_first_request_reserves_the_documented_segment(
    device_type: str, requested: int, native: int, expandable: int
) -> None:
    """Oracle: the table of the guide to the allocator (zdevito.github.io), and pages of 2 and 20
    MiB."""
    for kind, expected in zip(KINDS, (native, expandable), strict=True):
        allocator = kind(device_type)
        allocator.allocate(requested, stream=0)
        assert _reserved(allocator) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pools_of_streams_and_sizes_are_separate(kind: type[Allocator]) -> None:
    """Oracle: the rule: free memory of one pool serves no request of another."""
    allocator = kind()
    for stream in (0, 1):
        for requested in (MIB, 20 * MIB):
            allocator.free(allocator.allocate(requested, stream))
    assert allocator.reserved_by_stream == {0: 22 * MIB, 1: 22 * MIB}


def test_expandable_segment_grows_by_the_missing_pages() -> None:
    """Oracle: computed by hand: 90 MiB stay, 30 are free at the end of 120, so 100 more need 70:
    four pages."""
    allocator = ExpandableAllocator()
    allocator.allocate(90 * MIB, stream=0)
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    assert _reserved(allocator) == 120 * MIB
    block = allocator.allocate(100 * MIB, stream=0)
    assert _reserved(allocator) == 200 * MIB
    assert block.previous is not None and block.previous.size == 90 * MIB


def test_expandable_segment_end_is_used_last() -> None:
    """Oracle: the rule: 10 MiB fit the 15 at the end best, but the end can grow, so the hole of 40
    is used."""
    allocator = ExpandableAllocator()
    hole = allocator.allocate(40 * MIB, stream=0)
    allocator.allocate(5 * MIB, stream=0)
    assert _reserved(allocator) == 60 * MIB
    allocator.free(hole)
    assert allocator.allocate(10 * MIB, stream=0).address == hole.address


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_over_random_requests(kind: type[Allocator], seed: int) -> None:
    """Oracle: invariants: no overlap, consistent sums, and no lost bytes after all blocks are
    freed."""
    generator = random.Random(seed)
    allocator = kind()
    live: list[Block] = []
    for number in range(2000):
        if live and generator.random() < (0.45 if len(live) < 150 else 0.8):
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            live.append(
                allocator.allocate(_some_size(generator), stream=generator.randrange(3))
            )
        if number % 50 == 0:
            _check(allocator, live)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    _check(allocator, [])
    for block in _free_blocks(allocator):
        assert block.previous is None and block.next is None


@pytest.mark.parametrize("seed", range(3))
def test_native_agrees_with_a_slow_reference_implementation(seed: int) -> None:
    """Oracle: ``_SlowNative``, which scans plain lists; addresses and totals must be equal."""
    generator = random.Random(seed)
    allocator = NativeAllocator()
    slow = _SlowNative()
    live: list[tuple[Block, tuple[int, int]]] = []
    numbers: dict[int, int] = {}
    for _ in range(1500):
        if live and generator.random() < 0.48:
            block, position = live.pop(generator.randrange(len(live)))
            allocator.free(block)
            slow.free(position)
        else:
            size = _some_size(generator)
            stream = generator.randrange(2)
            block = allocator.allocate(size, stream)
            position = slow.allocate(size, stream)
            base = _first(block).address
            assert numbers.setdefault(base, position[0]) == position[0]
            assert block.address - base == position[1]
            live.append((block, position))
        assert _reserved(allocator) == sum(slow.sizes)


def _reserved(allocator: Allocator) -> int:
    return sum(allocator.reserved_by_stream.values())


def _free_blocks(allocator: Allocator) -> list[Block]:
    pools = itertools.chain.from_iterable(allocator.pools.values())
    return [block for pool in pools for _, _, block in pool.free]


def _some_size(generator: random.Random) -> int:
    if generator.random() < 0.2:
        return generator.choice(EDGES)
    return int(2 ** generator.uniform(5, 28))


def _first(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def _check(allocator: Allocator, live: list[Block]) -> None:
    blocks = live + _free_blocks(allocator)
    assert sum(block.size for block in live) == allocator.allocated_bytes
    assert sum(block.size for block in blocks) == _reserved(allocator)
    for block in blocks:
        if block.next is not None:
            assert (
                block.next.previous is block
                and block.next.address == block.address + block.size
            )
            assert block.in_use or block.next.in_use  # else they had been merged


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
            (piece[1], number, index)
            for number, segment in enumerate(self.segments)
            if self.keys[number] == (stream, small)
            for index, piece in enumerate(segment)
            if not piece[2] and piece[1] >= size
        ]
        if fits:
            _, number, index = min(fits)
        else:
            segment_bytes = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            self.segments.append([[0, segment_bytes, 0]])
            self.keys.append((stream, small))
            self.sizes.append(segment_bytes)
            number = len(self.segments) - 1
            index = 0
        piece = self.segments[number][index]
        rest = piece[1] - size
        if rest >= 512 if small else rest > MIB:
            self.segments[number].insert(index + 1, [piece[0] + size, rest, 0])
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
    assert (
        build_allocator(kind, device_type=device_type).allocate(bytes, 0).size == size
    )


@pytest.mark.parametrize(("kind", "gap"), [("expandable", 16 * KIB), ("native", 512)])
def test_large_blocks_of_an_npu_are_aligned_in_expandable_segments(
    kind: str, gap: int
) -> None:
    """Oracle: by hand: 4 MiB take 512 bytes more, so the next block of an expandable segment starts
    at the next multiple of 16 KiB."""
    allocator = build_allocator(AllocatorKind(kind), "npu")
    first, second = (allocator.allocate(4 * MIB, 0) for _ in range(2))
    assert second.address - first.address == 4 * MIB + gap
    assert allocator.allocated_bytes == 2 * (4 * MIB + 512)
    allocator.free(first)
    allocator.free(second)
    assert [block.size for block in _free_blocks(allocator)] == [20 * MIB]


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
    assert (
        replay(Trace(events), hardware, allocator).memory().reserved_bytes
        == pages * 20 * MIB
    )
