"""A search over a formula instead of the estimate, so that it can be compared with brute force."""

import functools
from collections.abc import Callable, Sequence

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing
from fsdptoys.metrics.prediction import MemoryPrediction, Prediction, TimePrediction
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.plan.search.combinations import EVERYTHING, Space
from fsdptoys.plan.search.search import SearchResult, search
from fsdptoys.plan.search.switches import read
from fsdptoys.utils.text import value_text
from tests.harness.traced_runs import imagined_hardware

MODEL = ["model=llama2_7b", "train.seq_len=2048", "parallel.param_dtype=bfloat16"]


@functools.cache
def composed_once(*overrides: str) -> Config:
    """Shared configuration, not to be changed in place."""
    return compose_config(overrides)


def compose(overrides: Sequence[str]) -> Config:
    return composed_once(*overrides)


HARDWARE = imagined_hardware(devices_per_node=8, memory_bytes=80 * GIB)


def formula(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """A prediction with the properties that a search relies on: memory that grows with the batch,
    time convex in it, and switches that trade one for the other."""
    parallel = config.parallel
    memory = config.memory
    train = config.train
    model = config.model
    parameters = 12 * model.n_layers * model.dim**2
    shards = (
        config.mesh.shard_ranks(world_size) if parallel.name.startswith("fsdp") else 1
    )
    full = memory.gradient_checkpointing is GradientCheckpointing.full
    activations = {"none": 30, "selective": 12, "full": 2}[
        memory.gradient_checkpointing.value
    ]
    activations *= 0.3 if memory.activation_offload else 1
    tokens = train.batch_size * train.seq_len // config.mesh.cp_size
    state = (
        {True: 4, False: 16}[memory.optimizer_offload]
        * (not memory.cpu_offload)
        * parameters
        / shards
    )
    gathered = (
        2 * parameters
        if value_text(read(config, "parallel.reshard_after_forward")) == "never"
        else 0
    )
    whole = (0 if parallel.name.startswith("fsdp") else 2) * parameters
    logits = (1 if memory.chunk_loss else 10) * tokens * model.vocab_size
    reserved = int(
        state
        + gathered
        + whole
        + activations * tokens * model.dim * model.n_layers
        + logits
        + GIB
    )
    reserved -= (
        int(0.1 * GIB) if read(config, "parallel.wrap") is Wrap.block_attn_mlp else 0
    )
    compute = (
        6
        * parameters
        * tokens
        * (4 / 3 if full else 1.1 if memory.checkpoints else 1)
        / 4e14
    )
    traffic = (
        (1 if gathered else 1.5)
        * parameters
        * (1 - 1 / shards)
        / (3e11 if shards <= 8 else 4e10)
    )
    traffic += 0 if shards == world_size else 0.3 * parameters / 4e10
    step = max(compute, traffic) + 0.01 + 0.02 * (config.mesh.cp_size > 1)
    step += 0.03 if read(config, "parallel.wrap") is Wrap.block_attn_mlp else 0
    step += 0.05 * compute if memory.activation_offload else 0
    step += parameters / shards / 3e9 if memory.optimizer_offload else 0
    if memory.cpu_offload:
        step += (
            parameters
            / shards
            / {CPUOffloadExecutor.native: 3e8, CPUOffloadExecutor.overlapped: 1e9}[
                memory.cpu_offload_executor
            ]
        )
    host = 16 * parameters // shards if memory.cpu_offload else 0
    return Prediction(
        method="formula",
        hardware=hardware.name,
        world_size=world_size,
        tokens_per_step=tokens * world_size,
        model_flops_per_step=6.0 * parameters * tokens,
        peak_flops=1e15,
        memory=MemoryPrediction(
            reserved // 2, reserved, reserved, "forward", host_bytes=host
        ),
        time=TimePrediction(step, compute, step - compute, 0, 0),
    )


@functools.cache
def find_once(world_size: int, gib: float) -> SearchResult:
    """Shared result over the full space for ``MODEL``, not to be changed."""
    return find(MODEL, world_size, gib)


def find(
    overrides: Sequence[str],
    world_size: int = 8,
    gib: float = 80,
    space: Space = EVERYTHING,
    predict: Callable[..., Prediction] = formula,
    host_bytes: float | None = None,
) -> SearchResult:
    base = compose(overrides)
    return search(
        base,
        overrides,
        HARDWARE,
        world_size,
        gib * GIB,
        predict,
        space=space,
        host_memory_bytes=host_bytes,
    )


SMALL = Space(strategies=("fsdp2", "ddp"), cpu_offload=False, every_mesh=False)
