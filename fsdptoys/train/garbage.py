"""Python's garbage collection at fixed steps, the same on all ranks.

Left alone, the collector runs whenever this process has allocated enough objects: each rank pauses
in another step, and all others wait for it in the next collective. Here it runs between steps only.
A pass visits the objects made since the last one; every ``FULL``-th visits all; most are PyTorch's
modules. Freezing those instead could not be undone for them alone (``gc.unfreeze`` has no
argument).

Steps leave reference cycles of Python objects, but the tensors of a step are not in cycles, and are
freed at once.

Source: https://github.com/pytorch/torchtitan (torchtitan/tools/utils.py, GarbageCollection)
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG = 1  # Generation of objects that have survived one pass at most
FULL = 100  # Passes from one over all objects to the next


@contextmanager
def collection_between_steps(every: int) -> Iterator[Callable[[int], None]]:
    """Turn the automatic collector off, and back on at the end.

    The yielded function, to be called after each step, collects after every ``every``-th; 0 leaves
    the collector alone.
    """
    if every == 0:
        yield lambda step: None
        return

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect(2 if step // every % FULL == 0 else YOUNG)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        yield collect
    finally:
        if was_enabled:
            gc.enable()
