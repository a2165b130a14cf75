"""The toy FSDP as a strategy, with the units, the order and the collectives of ``parallel=fsdp2``.

Results are those of PyTorch's, bit for bit, since reductions add the same numbers in the same places.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdptoys.toys import fsdp

from .fsdp import FSDPConfig
from .fsdp2 import FSDP2
from .strategy import ParallelContext, Strategy


class ToyFSDP(FSDP2):
    """``fully_shard`` of ``fsdptoys.toys.fsdp``."""

    library: ClassVar[Any] = fsdp

    def __init__(self, config: FSDPConfig, context: ParallelContext) -> None:
        super().__init__(config, context)
        self.units_ahead = max(1, config.forward_prefetch)
        self._averages = True  # on every device, with every version of gloo

    gather_after = Strategy.gather_after
    """It gathers on the compute stream."""

    def state_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the tensors of the shards."""
        self._reshard()
        return super().state_tensors(optimizer)

    def load_state_tensors(self, optimizer: torch.optim.Optimizer, load: Callable[[dict[str, Tensor]], None]) -> None:
        """Load into the shards."""
        self._reshard()
        super().load_state_tensors(optimizer, load)
