"""Collectives of PyTorch's fake process group, with the same results under every torch; one process
is all its ranks."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def reduce_to_zeros() -> None:
    """Let each reduce-scatter write zeros: with no other ranks some versions of torch leave the
    output unwritten.

    FSDP1 and FSDP2 look the function up in ``torch.distributed`` at each call.
    """
    reduce_scatter = dist.reduce_scatter_tensor

    def zeros(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = reduce_scatter(output, *args, **kwargs)
        output.zero_()
        return work

    dist.reduce_scatter_tensor = zeros
