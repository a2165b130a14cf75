"""Collect phase, live bytes and settings of a run, from which an out-of-memory error is
explained."""

import functools
from collections.abc import Callable, Iterable

from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.memory import OptimizerStepper
from fsdptoys.optim.matrix_optimizer import MATRICES
from fsdptoys.parallel import World
from fsdptoys.parallel.fsdp import FSDPConfig
from fsdptoys.profiler import LiveBytes, OOMContext, PlacedBytes, Switches, live_bytes
from fsdptoys.utils.dtensor import local_tensor


def construction_context(
    config: Config, world: World, parameter_count: int
) -> Callable[[], OOMContext]:
    """Return a function that explains an out-of-memory error of construction, of a model with that
    many parameters."""
    return functools.partial(
        oom_context, config, world, 0, "construction", parameter_count=parameter_count
    )


def oom_context(
    config: Config,
    world: World,
    step: int,
    phase: str,
    parameters: Iterable[Tensor] = (),
    stepper: OptimizerStepper | None = None,
    *,
    parameter_count: int = 0,
) -> OOMContext:
    """Count live bytes, and collect the settings that affect memory.

    During construction (step 0, no parameters) nothing can be counted yet; the rank's planned share
    of the ``parameter_count`` parameters is reported instead. ``phase`` is ``construction``,
    ``forward``, ``backward``, ``optimizer`` or ``evaluation``.
    """
    parameters, world_size = list(parameters), world.world_size
    model, memory, train = config.model, config.memory, config.train
    groups = stepper.optimizer.param_groups if stepper else []
    in_blocks = {
        param for group in groups if group.get(MATRICES) for param in group["params"]
    }
    states_bytes = sum(
        sum(
            config.optim.state_bytes(
                param.shape, local_tensor(param).numel(), param in in_blocks
            )
        )
        for param in parameters
        if param.requires_grad
    )
    offloads = memory.optimizer_offload or memory.cpu_offload
    switches = Switches(
        shards_parameters=config.parallel.capabilities.shards_parameters,
        takes_cpu_offload=config.parallel.capabilities.cpu_offload,
        world_size=world_size,
        fsdp_size=config.mesh.shard_ranks(world_size)
        if config.parallel.capabilities.shards_parameters
        else 1,
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
        sums_whole_gradients=train.grad_accum > 1
        and isinstance(config.parallel, FSDPConfig)
        and not config.parallel.reduces_often
        and config.mesh.pp_size == 1
        and not train.deterministic,
        states_bytes=0 if offloads else states_bytes,
    )
    if phase == "construction":
        planned = 4 * -(-parameter_count // switches.fsdp_size)
        on_host = memory.cpu_offload or not world.device.is_accelerator
        live = LiveBytes(
            parameters=PlacedBytes(
                device_bytes=0 if on_host else planned, host_bytes=planned * on_host
            )
        )
    else:
        live = live_bytes(
            parameters,
            stepper.optimizer if stepper else None,
            stepper.held_gradients if stepper else (),
        )
    return OOMContext(step, phase, world.rank, live, switches)
