"""Cores and memory of the node, and this process's share."""

import contextlib
import os
import platform
from pathlib import Path


def available_cores() -> int:
    """Physical cores available to this process, by affinity and the container's quota;
    hyper-threads count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(
            f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        )
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    with contextlib.suppress(OSError, ValueError):
        limit_us, period_us = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if limit_us != "max":
            return max(1, min(len(cores), int(limit_us) // int(period_us)))
    return len(cores)


def host_memory_bytes() -> int:
    """Return the memory of the node."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_set_bytes() -> int:
    """Return the resident memory of this process; 0 without ``/proc``."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def highest_resident_set_bytes() -> int | None:
    """Return the peak of ``resident_set_bytes`` since the process started; None without
    ``/proc``."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def cpu_name() -> str:
    """Return the maker's name of the processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
