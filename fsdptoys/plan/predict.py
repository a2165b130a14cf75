"""Prediction of a run, with its limits."""

import dataclasses

from fsdptoys.config.kernel_choice import AttentionKernel, GroupedKernel
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB, Device, available_device_type
from fsdptoys.device.profile import (
    AttentionKind,
    Hardware,
    Quantity,
    list_hardware,
    load_hardware,
)
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import profile_of_this_machine
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.models import MoEConfig
from fsdptoys.models.attention import BACKENDS
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.mesh import straddling
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.switches import STRATEGIES, check_strategy, node_ranks_of
from fsdptoys.plan.trace.op_costs import attention_of

VALIDATED_RANKS = 128  # Most ranks of a published run that the model was tested against
TIME_BANDS = {
    "a2": (
        "published steps of an older program took 1.05 to 1.18 times as long as predicted for "
        "this trainer without offload, 1.3 to 1.6 times with optimizer_offload, and 3.4 to 4.0 "
        "times with cpu_offload on one core a rank"
    ),
    "h100": "published steps of torchtitan took 1.14 and 1.19 times as long as predicted",
    "h200": (
        "eight steps of Llama 3 1B and 8B on one device took 0.98 to 1.05 times as long as "
        "predicted, small models on its slow host 7 to 12 times"
    ),
}
"""Profile → errors of its times, from benchmarks/plan.md and gpu_planned.md; others were not
compared with a run."""


def hardware_of(config: Config) -> Hardware:
    """The profile of ``plan.hardware``, or of this machine's device; a ConfigError if there is
    none."""
    profile = (
        profile_of_this_machine()
        if config.plan.hardware == "auto"
        else config.plan.hardware
    )
    if profile is None:
        raise ConfigError(
            f"plan.hardware=auto has no profile of {Device(available_device_type()).name}; set "
            f"plan.hardware to one of {', '.join(list_hardware())}, or to your own YAML file"
        )
    return load_hardware(profile)


def estimate_run(config: Config, world_size: int) -> tuple[Prediction, Hardware] | None:
    """Estimate a validated run on this machine; None if not requested or not possible."""
    unknown = config.plan.hardware == "auto" and profile_of_this_machine() is None
    if unknown or not config.plan.predict or config.parallel.name not in STRATEGIES:
        return None
    if not config.model.capabilities.fast_estimate:
        return None
    hardware = hardware_of(config)
    memory = config.memory
    if hardware.device_type == "cpu" and (
        memory.cpu_offload or memory.optimizer_offload
    ):
        return None  # offload on a CPU moves nothing, which the estimate does not model
    return predict(config, hardware, world_size), hardware


def world_size_of(config: Config, hardware: Hardware) -> int:
    """Ranks to plan for: as requested, or those of one node."""
    if config.plan.world_size is not None:
        return config.plan.world_size
    if config.parallel.capabilities.single_process:
        return 1
    ranks = config.launch.nproc_per_node
    return (
        int(hardware.devices_per_node.value) if ranks == -1 else ranks
    ) * config.launch.nnodes


def predict(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Predict one rank's memory and time for a validated configuration, with the limits of the
    prediction.

    Raises:
        ConfigError: for a strategy that cannot be predicted.
    """
    check_strategy(config)
    estimate = fast_estimate(config, hardware, world_size)
    return dataclasses.replace(estimate, caveats=caveats(config, hardware, world_size))


def caveats(config: Config, hardware: Hardware, world_size: int) -> tuple[str, ...]:
    """Known limits of the model for this configuration, one sentence each."""
    plan = config.plan
    kernels = config.kernels
    float8 = config.train.float8
    sharding = None
    if config.parallel.capabilities.shards_parameters:
        node_ranks = node_ranks_of(config, hardware, world_size)
        sharding = straddling(
            config.mesh.shard_ranks(world_size),
            config.mesh.stage_ranks(world_size),
            node_ranks,
        )
    quantities = {
        name: value
        for name, value in vars(hardware).items()
        if isinstance(value, Quantity)
    }
    assumed = [
        name
        for name, quantity in quantities.items()
        if quantity.source.startswith("assumed")
    ]
    sizes = ", ".join(name for name in assumed if name.endswith("_bytes"))
    rates = ", ".join(name for name in assumed if not name.endswith("_bytes"))
    measured = ("torch", "auto", GroupedKernel.looped.value, *BACKENDS)
    unmeasured = ", ".join(
        f"{key}={name}" for key, name in kernels.names().items() if name not in measured
    )
    prefers_cudnn = (
        attention_of(config, hardware) is AttentionKind.cudnn
        and kernels.attention.value in measured[:2]
    )
    cudnn = (
        prefers_cudnn or kernels.attention is AttentionKernel.cudnn
    ) and not config.data.mask_documents
    cudnn &= config.parallel.param_dtype.torch.itemsize == 2
    experts = isinstance(config.model, MoEConfig)
    single_experts = kernels.grouped_matmul is GroupedKernel.looped
    single_experts |= (
        hardware.device_type == "npu"
        and kernels.grouped_matmul is not GroupedKernel.npu
    )
    single_experts |= (
        hardware.device_type == "cuda"
        and config.parallel.param_dtype.value != "bfloat16"
    )
    zero_bubble = (
        getattr(config.parallel, "schedule", None) is PipelineSchedule.zero_bubble
    )
    profile = f"plan.hardware={hardware.name}"
    sentences: dict[str, object] = {
        f"time beyond {VALIDATED_RANKS} ranks is not validated: stragglers, congestion and "
        "failures are not modeled, so the error has no upper bound": world_size
        > VALIDATED_RANKS,
        (
            f"{sharding}; the prediction assumes that each group starts at a node's first rank"
        ): sharding,
        (
            f"plan.memory_gib={plan.memory_gib or 0:g} is over the "
            f"{hardware.usable_bytes / GIB:.2f} GiB that {hardware.name} leaves the allocator"
        ): (plan.memory_gib or 0) * GIB > hardware.usable_bytes,
        (
            f"{profile} assumes {sizes}; set plan.memory_gib to the memory that your devices leave"
        ): sizes,
        (
            f"{profile} assumes {rates}; "
            f"{TIME_BANDS.get(hardware.name, 'no published step was compared with its times')}; "
            "fsdptoys plan calibrate replaces rates by measurements"
        ): rates,
        (
            "only two steps are traced; reserved memory may grow in a third, by up to 2% in "
            "measurements"
        ): (
            config.parallel.capabilities.flattens_parameters
            or config.memory.optimizer_offload
        ),
        (
            f"{profile} assumes attention by cuDNN, as torch from 2.11 on with CUDA 13 chooses, "
            "with FlashAttention's scratch memory"
        ): cudnn,
        (
            "train.compile=true is predicted as eager with fused rotary positions and SwiGLU: an "
            "upper bound of memory"
        ): (config.train.compile),
        (
            "train.deterministic=layout is predicted for experts as the default mode, without "
            "float64 tensors and the matmuls of single grains: a lower bound of memory and time"
        ): experts and config.train.deterministic.covers_layouts,
        (
            "document lengths are unknown: attention is assumed over full sequences"
        ): config.data.mask_documents,
        (
            f"train.float8={float8.value} is predicted as bfloat16 matmuls and gathers: an upper "
            "bound of time if the compiler fuses the casts, without the casts' scratch memory"
        ): float8 is not Float8.none,
        (
            f"kernels.{{{unmeasured}}} are assumed to touch each tensor once, to keep the tensors "
            "that their sources keep, and to take no scratch memory"
        ): unmeasured,
        (
            f"optim.state_dtype={config.optim.low_bit_format} is assumed to update in two compiled "
            "kernels, with the scratch memory of the compiler on a CPU: not measured on other "
            "devices"
        ): config.optim.low_bit_format,
        (
            "experts are assumed to receive equal numbers of tokens: an idle or a busy one costs "
            "time"
        ): experts and config.mesh.ep_size == 1,
        (
            f"this rank's experts are assumed to receive {plan.expert_imbalance:g} times the mean "
            "of all ranks' tokens: loads depend on the router, and memory and time grow with the "
            "busiest rank; set plan.expert_imbalance"
        ): config.mesh.ep_size > 1,
        (
            "experts are assumed to be one matmul, but are multiplied one by one: a lower bound of "
            "time"
        ): (experts and single_experts),
        "offload on a CPU moves nothing, and is predicted as on an accelerator": (
            hardware.device_type == "cpu"
            and (config.memory.cpu_offload or config.memory.optimizer_offload)
        ),
        (
            "plan.allocator=native is predicted without fragmentation of its segments: a lower "
            "bound of reserved memory"
        ): (plan.allocator is AllocatorKind.native),
        (
            "train.deterministic=layout is predicted without its float64 tensors and matmuls of "
            "single grains: a lower bound of memory and time"
        ): config.train.deterministic.covers_layouts and not experts,
        (
            "parallel.schedule=zero_bubble is predicted as interleaved, with the logits of all "
            "micro-batches: an upper bound of time and a lower bound of memory"
        ): zero_bubble,
        "reading the data is assumed to take no time": config.data.reads_files,
    }
    return tuple(sentence for sentence, applies in sentences.items() if applies)
