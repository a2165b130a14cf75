"""One Device for CUDA, NPU and CPU: backend, memory statistics, synchronisation and peak FLOP/s.

``torch.accelerator`` serves CUDA and NPU alike; what it lacks on a plain CPU is answered here, so that no other room
asks which hardware it runs on. On a CPU the process's resident set, read from ``/proc``, stands for its memory.
"""

import contextlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError

GIB = 2**30

PEAK_FLOPS = {
    # Dense bf16 FLOP/s with float32 accumulation, from NVIDIA's data sheets (2:1 sparsity taken out).
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Words of the device's name → peak; the longest that occur in the name count."""

DEVICE_TYPES = ("cuda", "npu", "cpu")


@dataclass(frozen=True)
class MemoryStats:
    """Bytes on an accelerator."""

    allocated_bytes: int
    peak_bytes: int
    """Highest allocated since the last ``reset_peak_memory``."""
    reserved_bytes: int


def available_device_type() -> str:
    """``cuda``, ``npu`` or ``cpu``: the first that has a device here, without touching it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in DEVICE_TYPES else "cpu"


def device_count(device_type: str) -> int:
    """Number of devices of a type on this machine; 1 for a CPU."""
    if device_type == "cpu":
        return 1
    return torch.accelerator.device_count() if available_device_type() == device_type else 0


def available_cores() -> int:
    """Physical cores that this process may use: its affinity, hyper-threads counted once, and its container's quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    quota = Path("/sys/fs/cgroup/cpu.max")
    with contextlib.suppress(OSError, ValueError):
        limit_us, period_us = quota.read_text().split()
        if limit_us != "max":
            return max(1, min(len(cores), int(limit_us) // int(period_us)))
    return len(cores)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device by its name, or None where it is not known."""
    if re.search(r"\b(MIG|Laptop)\b", device_name):
        return None
    known = sorted((words for words in PEAK_FLOPS if re.search(rf"\b{words}\b", device_name)), key=len)
    return PEAK_FLOPS[known[-1]] if known else None


def float64_collectives(device_type: str) -> bool:
    """Whether the device's collectives reduce float64; HCCL's do not."""
    return device_type != "npu"


class Device:
    """The device of this process.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        local_rank: index of the device on this machine.

    Raises:
        ConfigError: if this machine has no such device.
    """

    def __init__(self, device_type: str, local_rank: int = 0) -> None:
        self.type = device_type
        if device_type != "cpu" and local_rank >= device_count(device_type):
            raise ConfigError(
                f"local rank {local_rank} needs its own {device_type} device, this machine has "
                f"{device_count(device_type)}; set launch.nproc_per_node={max(1, device_count(device_type))}"
            )
        self.torch_device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local_rank)
        self.backend = torch.distributed.get_default_backend_for_device(device_type)
        if self.is_accelerator:
            torch.accelerator.set_device_index(local_rank)

    @property
    def is_accelerator(self) -> bool:
        """Whether the device has streams and memory of its own."""
        return self.type != "cpu"

    @property
    def _module(self) -> Any:
        # torch.accelerator has memory statistics from torch 2.9 on only; torch.cuda and torch.npu always had them.
        return torch.get_device_module(self.type)

    @property
    def name(self) -> str:
        """The name that its maker gave it."""
        if self.is_accelerator:
            return str(self._module.get_device_name(self.torch_device))
        return _cpu_name()

    @property
    def total_memory_bytes(self) -> int:
        """Memory of the device, or of the machine for a CPU."""
        if self.is_accelerator:
            return int(self._module.get_device_properties(self.torch_device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bf16 FLOP/s, or None where it is not known."""
        return peak_flops(self.name) if self.is_accelerator else None

    def synchronize(self) -> None:
        """Wait for what was given to the computing stream; a CPU has nothing to wait for.

        Copies on other streams that nothing on it waits for yet go on: they belong to what comes next.
        """
        if self.is_accelerator:
            torch.accelerator.current_stream().synchronize()

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats()

    def memory(self) -> MemoryStats:
        """Memory of an accelerator in use now, at its peak, and reserved by the allocator."""
        assert self.is_accelerator
        module = self._module
        return MemoryStats(module.memory_allocated(), module.max_memory_allocated(), module.memory_reserved())


def resident_set_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system has no ``/proc``."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def highest_resident_set_bytes() -> int | None:
    """Highest ``resident_set_bytes`` since the process started; None where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
