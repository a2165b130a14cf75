"""End a child process when its parent dies, which Linux alone can."""

import ctypes
import os
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int) -> Callable[[], None] | None:
    """Return a function for the child to call, after which the parent's death sends it a signal.

    Return None on other systems. Call this before a fork: loading a library after it is not safe.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask_the_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before this call
            os._exit(1)

    return ask_the_kernel
