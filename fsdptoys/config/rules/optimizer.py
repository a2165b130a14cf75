"""The optimizer against strategy, offload and deterministic modes."""

import torch

from fsdptoys.config.sections import Sections
from fsdptoys.models import MoEConfig
from fsdptoys.optim import low_bit_adamw
from fsdptoys.parallel.placement import sharding
from fsdptoys.utils.torchao import torchao_fault

from .rule import Rules, Where

OPTIMIZER = Rules()


LOW_BITS = "optim.low_bit_format!=null"
MUON = "optim.exchanges_matrices=true"

OPTIMIZER.exclude(
    "train.grad_accum",
    "train.deterministic=true",
    "memory.cpu_offload=true",
    "parallel.capabilities.flattens_parameters=true",
    # Each reduction would overwrite the offloaded gradient of the previous one.
    says="{train.grad_accum} with train.deterministic=true reduces after every micro-batch, which "
    "FSDP1 cannot add up under memory.cpu_offload=true; set parallel=fsdp2",
)
OPTIMIZER.exclude(
    "optim.state_dtype!=float32",
    "memory.optimizer_offload=true",
    says="{optim.state_dtype} applies to states on the device, and memory.optimizer_offload=true "
    "keeps them in host memory; set memory.offload_state_dtype=bfloat16 and "
    "optim.state_dtype=float32",
)
OPTIMIZER.exclude(
    "optim.state_dtype!=float32",
    "memory.cpu_offload=true",
    "memory.cpu_offload_executor=overlapped",
    says="{optim.state_dtype} is not an option of memory.cpu_offload_executor=overlapped; set "
    "memory.cpu_offload_executor=native or optim.state_dtype=float32",
)


@OPTIMIZER.rule(LOW_BITS)
def low_bit_states_need_torchao(config: Sections, where: Where) -> str | None:
    """torchao has the low-bit states."""
    fault = torchao_fault()
    if fault is None:
        return None
    return (
        f"optim.state_dtype={config.optim.low_bit_format} needs the package torchao, which "
        f"{fault}, or set optim.state_dtype=bfloat16"
    )


OPTIMIZER.exclude(
    LOW_BITS,
    "optim.implementation=foreach",
    says="optim.implementation=foreach is not an option of {optim.state_dtype}; set "
    "optim.implementation=fused, which compiles the update, or optim.implementation=for_loop",
)
OPTIMIZER.exclude(
    LOW_BITS,
    "optim.implementation=fused",
    "train.deterministic!=false",
    says="optim.implementation=fused compiles updates for each size with {optim.state_dtype}, and "
    "rounds by it, which {train.deterministic} rules out; set optim.implementation=auto",
)
for _switch in ("memory.optimizer_offload", "memory.cpu_offload"):
    OPTIMIZER.exclude(
        MUON,
        f"{_switch}=true",
        says=(
            f"{_switch}=true is not an option of {{optim}}, whose update needs full matrices on "
            f"the device; set {_switch}=false or optim=adamw"
        ),
    )
OPTIMIZER.exclude(
    "optim.implementation=fused",
    "optim.fused_takes_shards=false",
    "parallel.capabilities.uses_dtensor=true",
    says="optim.implementation=fused of {optim} does not take FSDP2's sharded parameters; set "
    "optim.implementation=foreach",
)
OPTIMIZER.exclude(
    "optim.implementation=fused",
    "optim.fused_takes_shards=false",
    "train.deterministic!=false",
    when=lambda config, where: where.device_type == "cpu" or config.memory.cpu_offload,
    says="optim.implementation=fused of {optim} rounds by a shard's size on a CPU, which "
    "{train.deterministic} rules out; set optim.implementation=auto",
)
OPTIMIZER.exclude(
    "optim.weight_decay_on=matrices",
    "parallel.use_orig_params=false",
    when=lambda config, where: config.optim.weight_decay > 0,
    says=(
        "optim.weight_decay_on=matrices cannot select parameters under "
        "parallel.use_orig_params=false; set optim.weight_decay_on=all or "
        "parallel.use_orig_params=true"
    ),
)


@OPTIMIZER.rule(LOW_BITS, "parallel.capabilities.uses_dtensor=true")
def shards_end_between_blocks(config: Sections, where: Where) -> str | None:
    """Shards of stacks of experts can end within a quantization block."""
    format = config.optim.low_bit_format
    model = config.model
    axes = where.axes
    if not isinstance(model, MoEConfig):
        return None
    with torch.device("meta"):
        parameters = list(model.build().named_parameters())
    for name, param in parameters:
        block = low_bit_adamw.block_elements(str(format), param.shape)
        dim, ranks = sharding(param, axes)
        cut = param.shape[-1] // ranks if dim == param.ndim - 1 else 0
        if block is not None and cut % block:
            fix = "optim.state_dtype=bfloat16"
            if axes.ep == 1:
                fix = f"a mesh.fsdp_size that divides {param.shape[0]} or {fix}"
            elif model.n_experts % axes.ranks_per_replica == 0:
                fix = f"mesh.ep_size={axes.ranks_per_replica} or {fix}"
            return (
                f"optim.state_dtype={format} keeps a scale for {block} numbers of a row, and "
                f"mesh.fsdp_size={config.mesh.fsdp_size} cuts rows of {name} into {cut}; set {fix}"
            )
    return None
