"""The toy FSDP as a strategy, with the units, the order and the collectives of ``parallel=fsdp2``.

Results are those of PyTorch's, bit for bit, since reductions add the same numbers in the same
places.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from .capabilities import FORMS, Capabilities
from .fsdp import FSDPConfig
from .fsdp2 import FSDP2
from .strategy import Strategy, World


class ToyFSDP(FSDP2):
    """``fully_shard`` of ``fsdptoys.toys.fsdp``."""

    def __init__(self, config: FSDPConfig, world: World) -> None:
        super().__init__(config, world)
        self.units_ahead = max(1, config.forward_prefetch)
        # on every device, with every version of gloo
        self.gradient_divisor = world.world_size

    gather_after = Strategy.gather_after
    """It gathers on the compute stream."""

    @property
    def library(self) -> Any:
        """The toy's package."""
        from fsdptoys.toys import fsdp  # loads DTensor

        return fsdp


@dataclass
class ToyFSDPConfig(FSDPConfig):
    """FSDP2 as in ``fsdptoys.toys.fsdp``; the next unit is gathered ahead in the forward too, even
    with 0 of them."""

    name: ClassVar[str] = "toy_fsdp"
    strategy = ToyFSDP
    capabilities = Capabilities(
        deterministic=True,
        shards_parameters=True,
        uses_dtensor=True,
        context_forms=FORMS,
        optimizer_offload=True,
        lazy_updates=True,
        float8=True,
        muon=True,
        low_bit_states=True,
    )
