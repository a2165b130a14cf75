"""Choice of the optimizer update's model."""

from .memory_ledger import Ledger
from .muon_step import MuonUpdate
from .optimizer_step import HostUpdate, LowBitUpdate, StreamedUpdate, Update
from .step_setup import StepSetup


def make_update(setup: StepSetup, ledger: Ledger) -> Update:
    """Construct the update of a configuration."""
    memory, optim = setup.config.memory, setup.config.optim
    kind: type[Update] = HostUpdate if memory.cpu_offload else StreamedUpdate if memory.optimizer_offload else Update
    if optim.exchanges_matrices:
        kind = MuonUpdate
    elif optim.low_bit_format and not memory.cpu_offload:
        kind = LowBitUpdate
    return kind(setup, ledger)
