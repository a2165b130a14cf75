"""Small models under ZeRO."""

from collections.abc import Callable
from typing import Any

import torch

from fsdptoys.toys.zero1 import Zero1
from fsdptoys.toys.zero2 import Zero2
from fsdptoys.toys.zero3 import Zero3

SMALL_BUCKETS = 0.001  # MiB
CPU = torch.device("cpu")


def make(
    kind: str, module: Any, **of_ddp: Any
) -> tuple[Any, Any, Callable[[torch.optim.Optimizer], None]]:
    """A wrapped module, the parameters for its optimizer, and the function that attaches that."""
    if kind == "zero3":
        three = Zero3(module, list(module.blocks), CPU)
        return three, [param for _, param in three.owned()], lambda _: None
    if kind == "zero2":
        wrapped: Any = Zero2(module, bucket_cap_mb=SMALL_BUCKETS)
    elif kind == "zero1":
        wrapped = Zero1(module, bucket_cap_mb=SMALL_BUCKETS, **of_ddp)
    else:
        return module, list(module.parameters()), lambda _: None
    return wrapped, list(wrapped.pieces()), wrapped.attach
