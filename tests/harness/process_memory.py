"""How far a call raises the peak of the resident set, as Linux counts it."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

NEEDS_PEAK = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the system does not report a peak",
)
_MMAP_THRESHOLD = -3
"""glibc's ``M_MMAP_THRESHOLD``."""


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """Return the growth of the peak during ``call``, in a process that does nothing else."""
    with contextlib.suppress(AttributeError):  # not in every C library
        libc = ctypes.CDLL(None)
        # By default glibc raises the threshold with every freed block, and then keeps freed tensors
        # in its heap.
        libc.mallopt(_MMAP_THRESHOLD, 2**17)
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    before = _peak_bytes()
    call()
    return _peak_bytes() - before


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
