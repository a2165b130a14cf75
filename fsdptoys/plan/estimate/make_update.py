"""TODO."""

from typing import TYPE_CHECKING

from fsdptoys.optim.config import AdamWConfig, MuonConfig

if TYPE_CHECKING:
    from .step_model import StepModel
from .optimizer_step import HostUpdate, LowBitUpdate, StreamedUpdate, Update


def make_update(walk: "StepModel") -> Update:
    """The update that the configuration asks for."""
    memory = walk.config.memory
    if isinstance(walk.config.optim, MuonConfig):
        from .muon_step import MuonUpdate

        return MuonUpdate(walk)
    optim = walk.config.optim
    if isinstance(optim, AdamWConfig) and optim.state_dtype.is_low_bit and not memory.cpu_offload:
        return LowBitUpdate(walk)
    return (HostUpdate if memory.cpu_offload else StreamedUpdate if memory.optimizer_offload else Update)(walk)
