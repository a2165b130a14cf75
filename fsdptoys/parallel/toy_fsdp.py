"""The toy FSDP as a strategy, with the units, the order and the collectives of ``parallel=fsdp2``.

Results are those of PyTorch's, bit for bit, since reductions add the same numbers in the same places.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .fsdp import FSDPConfig
from .fsdp2 import FSDP2
from .strategy import ParallelContext, Strategy


@dataclass
class ToyFSDPConfig(FSDPConfig):
    """FSDP2 as in ``fsdptoys.toys.fsdp``; the next unit is gathered ahead in the forward too, even with 0 of them."""

    name: ClassVar[str] = "toy_fsdp"
    uses_dtensor: ClassVar[bool] = True
    takes_cpu_offload: ClassVar[bool] = False

    def build(self, context: ParallelContext) -> "ToyFSDP":
        """Construct the strategy."""
        from fsdptoys.toys import fsdp  # loads DTensor

        return ToyFSDP(self, context, fsdp)


class ToyFSDP(FSDP2):
    """``fully_shard`` of ``fsdptoys.toys.fsdp``."""

    def __init__(self, config: FSDPConfig, context: ParallelContext, library: Any) -> None:
        super().__init__(config, context, library)
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
