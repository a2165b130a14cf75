"""Gradient checkpointing: blocks drop their activations in the forward and compute them again in the backward.

Memory for activations falls from every block's to one block's plus each block's input; the forward of the checkpointed
blocks runs twice (arXiv:1604.06174). PyTorch's own non-reentrant ``checkpoint`` does the work.
"""

import functools
from enum import Enum

from torch import nn
from torch.utils.checkpoint import checkpoint


class GradientCheckpointing(Enum):
    """What is computed again."""

    none = "none"
    full = "full"


def checkpoint_blocks(blocks: nn.ModuleList, start_index: int) -> None:
    """Recompute every block from ``start_index`` on; must come before anything wraps the blocks.

    Only ``forward`` is replaced, on the instance: parameter names stay as they are, and hooks that a strategy puts on
    the block run outside the recomputation.
    """
    for block in list(blocks)[start_index:]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
