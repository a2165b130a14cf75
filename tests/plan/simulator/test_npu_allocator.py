"""Differences of torch_npu's allocator from CUDA's, by its source (``NPUCachingAllocator.cpp``)."""

import pytest

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.allocator import MIB, build_allocator
from fsdptoys.plan.simulator.events import Alloc, Free, Kernel, KernelKind, Mark, RecordStream, Trace
from fsdptoys.plan.simulator.replay import replay
from tests.plan.simulator.imagined import imagined_hardware

KIB = 2**10


@pytest.mark.parametrize("kind", AllocatorKind)
@pytest.mark.parametrize(
    ("device_type", "bytes", "size"),
    [
        *(("cuda", 1, 512), ("cuda", 512, 512), ("cuda", 513, 1024)),
        *(("npu", 1, 512), ("npu", 480, 512), ("npu", 481, 1024), ("npu", 512, 1024), ("npu", 4 * MIB, 4 * MIB + 512)),
    ],
)
def test_requests_are_rounded_to_512_bytes_after_32_more_on_an_npu(
    kind: AllocatorKind, device_type: str, bytes: int, size: int
) -> None:
    """Oracle: ``round_size`` of each."""
    assert build_allocator(kind, device_type=device_type).allocate(bytes, 0).size == size


def test_one_mebibyte_counts_as_large_on_an_npu() -> None:
    """Oracle: the padded size exceeds the limit of small blocks, so a page of 20 MiB is mapped, not one of 2 MiB."""
    for device_type, reserved in (("cuda", 2 * MIB), ("npu", 20 * MIB)):
        allocator = build_allocator(AllocatorKind.expandable, device_type=device_type)
        allocator.allocate(MIB, 0)
        assert allocator.reserved_bytes == reserved


def test_large_expandable_blocks_of_an_npu_are_aligned_to_16_kib() -> None:
    """Oracle: by hand: 4 MiB take 512 bytes more, so the next block starts 16 KiB later, with 15.5 KiB between them."""
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
def test_recording_a_blocks_own_stream_delays_its_reuse_on_an_npu(device_type: str, pages: int) -> None:
    """Oracle: ``recordStream`` of CUDA ignores the stream that a block was made on, that of an NPU does not."""
    block = Category.temporary
    busy = Kernel("busy", 0, KernelKind.memory, 0.0, 10**12, "float32")
    events = [
        *(Mark(0, "construction"), Alloc(1, 20 * MIB - 32, 0, block), busy, RecordStream(1, 0), Free(1)),
        *(Alloc(2, 20 * MIB - 32, 0, block), Mark(1, "end")),
    ]
    hardware = imagined_hardware(device_type=device_type)
    allocator = build_allocator(AllocatorKind.expandable, device_type=device_type)
    assert replay(Trace(events), hardware, allocator).memory().reserved_bytes == pages * 20 * MIB
