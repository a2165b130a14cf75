"""Collect phase, live bytes and settings of a run, from which an out-of-memory error is
explained."""

from collections.abc import Callable

from fsdptoys.config.schema import Config
from fsdptoys.memory import OptimizerStepper
from fsdptoys.optim.matrix_optimizer import MATRICES
from fsdptoys.parallel import Strategy, World
from fsdptoys.parallel.fsdp import FSDPConfig
from fsdptoys.profiler import LiveBytes, OOMContext, PlacedBytes, Switches, live_bytes
from fsdptoys.utils.dtensor import local_tensor


def construction_context(
    config: Config, world: World, parameter_count: int
) -> Callable[[], OOMContext]:
    """Return a function that explains an out-of-memory error of construction.

    Nothing can be counted yet: it reports the planned share of the ``parameter_count`` parameters.
    """

    def context() -> OOMContext:
        switches = _switches(config, world.world_size, 0)
        planned_bytes = 4 * -(-parameter_count // switches.fsdp_size)
        on_host = config.memory.cpu_offload or not world.device.is_accelerator
        parameters = PlacedBytes(
            device_bytes=0 if on_host else planned_bytes,
            host_bytes=planned_bytes if on_host else 0,
        )
        live = LiveBytes(parameters=parameters)
        return OOMContext(0, "construction", world.rank, live, switches)

    return context


def oom_context(
    config: Config,
    strategy: Strategy,
    stepper: OptimizerStepper,
    step: int,
    phase: str,
) -> OOMContext:
    """Count live bytes, and collect the settings that affect memory.

    ``phase`` is ``forward``, ``backward``, ``optimizer`` or ``evaluation``.
    """
    parameters = [param for _, param in strategy.named_parameters()]
    in_blocks = {
        param
        for group in stepper.optimizer.param_groups
        if group.get(MATRICES)
        for param in group["params"]
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
    world = strategy.world
    live = live_bytes(parameters, stepper.optimizer, stepper.held_gradients)
    switches = _switches(config, world.world_size, states_bytes)
    return OOMContext(step, phase, world.rank, live, switches)


def _switches(config: Config, world_size: int, states_bytes: int) -> Switches:
    model = config.model
    memory = config.memory
    train = config.train
    offloads = memory.optimizer_offload or memory.cpu_offload
    return Switches(
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
