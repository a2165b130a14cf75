"""One interface to CUDA, NPU and CPU: collectives, streams, memory, random states, environment and
peak FLOP/s."""

from .allocations import (
    REST,
    AllocationCount,
    CountedBytes,
    HostMemory,
    UncountableError,
    in_host_place,
    profiler_is_on,
)
from .device import (
    Device,
    Event,
    MemoryStats,
    Stream,
    Streams,
    device_name,
    is_accelerator,
    peak_flops,
)
from .environment import (
    allocator_environment,
    check_allocator_settings,
    device_environment,
)
from .host import available_cores, highest_resident_set_bytes, resident_set_bytes
from .kinds import DEVICE_TYPES, KINDS, float64_collectives
from .presence import (
    available_device_type,
    check_visible_devices,
    device_count,
    missing_device,
)

GIB = 2**30

__all__ = [
    "DEVICE_TYPES",
    "GIB",
    "KINDS",
    "REST",
    "AllocationCount",
    "CountedBytes",
    "Device",
    "Event",
    "HostMemory",
    "MemoryStats",
    "Stream",
    "Streams",
    "UncountableError",
    "allocator_environment",
    "available_cores",
    "available_device_type",
    "check_allocator_settings",
    "check_visible_devices",
    "device_count",
    "device_environment",
    "device_name",
    "float64_collectives",
    "highest_resident_set_bytes",
    "in_host_place",
    "is_accelerator",
    "missing_device",
    "peak_flops",
    "profiler_is_on",
    "resident_set_bytes",
]
