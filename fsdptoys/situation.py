"""What a run was doing and what it held, in the plain numbers from which an out-of-memory error is explained."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdptoys.config import Config
from fsdptoys.profiler import Situation, Switches, live_bytes


def situation(
    config: Config,
    world_size: int,
    rank: int,
    step: int,
    phase: str,
    parameters: Iterable[Tensor] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Situation:
    """Count what is live.

    Args:
        config: validated, of the run.
        world_size: ranks over all machines.
        rank: of this process.
        step: number of the step, from 1; 0 before the first.
        phase: ``construction``, ``forward``, ``backward``, ``optimizer`` or ``evaluation``.
        parameters: as the strategy left them; none before it has any.
        optimizer: None where there is none yet.
    """
    parameters = list(parameters)
    model, memory, train = config.model, config.memory, config.train
    shards = config.parallel.name in ("fsdp1", "fsdp2")
    local_elements = sum((param.to_local() if isinstance(param, DTensor) else param).numel() for param in parameters)
    offloads = memory.optimizer_offload or memory.cpu_offload
    switches = Switches(
        parallel=config.parallel.name,
        world_size=world_size,
        fsdp_size=config.mesh.shard_ranks(world_size) if shards else 1,
        batch_size=train.batch_size,
        seq_len=train.seq_len,
        grad_accum=train.grad_accum,
        dim=model.dim,
        n_layers=model.n_layers,
        vocab_size=model.vocab_size,
        param_dtype=config.parallel.param_dtype.value,
        chunk_loss=memory.chunk_loss,
        gradient_checkpointing=memory.gradient_checkpointing.value,
        activation_offload=memory.activation_offload,
        optimizer_offload=memory.optimizer_offload,
        cpu_offload=memory.cpu_offload,
        states_bytes=0 if offloads else config.optim.state_bytes * local_elements,
    )
    return Situation(step, phase, rank, live_bytes(parameters, optimizer), switches)
