"""Memory switches against strategy, layout, compiler and optimizer."""

from fsdptoys.config.sections import Sections
from fsdptoys.device import available_cores
from fsdptoys.models import MoEConfig

from .rule import Rules, Where

MEMORY = Rules()


MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "parallel.simulated_ranks",
    says="memory.optimizer_in_backward=true frees gradients as they come, and {parallel} adds "
    "them up with {parallel.simulated_ranks}; set parallel=fsdp2 or "
    "memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "mesh.fsdp_size",
    "parallel.capabilities.shards_parameters=true",
    when=lambda config, where: (
        config.mesh.shard_ranks(where.world_size)
        < config.mesh.stage_ranks(where.world_size)
    ),
    says="memory.optimizer_in_backward=true saves nothing with {mesh.fsdp_size}, since FSDP2 "
    "holds gradients that go to replicas until the backward ends; set mesh.fsdp_size=-1 or "
    "memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "optim.exchanges_matrices=true",
    says="memory.optimizer_in_backward=true updates parameter by parameter, and {optim} exchanges "
    "several at a time; set optim=adamw or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    says=(
        "memory.optimizer_in_backward=true updates on the device in the backward, "
        "memory.optimizer_offload=true elsewhere or later; set memory.optimizer_offload=false or "
        "memory.optimizer_in_backward=false"
    ),
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "memory.cpu_offload=true",
    says=(
        "memory.optimizer_in_backward=true updates on the device in the backward, "
        "memory.cpu_offload=true elsewhere or later; set memory.cpu_offload=false or "
        "memory.optimizer_in_backward=false"
    ),
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "train.grad_accum",
    says="memory.optimizer_in_backward=true leaves no gradients to add to, as {train.grad_accum} "
    "needs; set train.grad_accum=1 or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "train.max_grad_norm!=null",
    says="memory.optimizer_in_backward=true updates before the norm of all gradients is known, by "
    "which {train.max_grad_norm} scales them; set train.max_grad_norm=null or "
    "memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "train.skip_nonfinite=true",
    says=(
        "memory.optimizer_in_backward=true updates before it is known whether all gradients are "
        "finite, for which train.skip_nonfinite=true waits; set train.skip_nonfinite=false or "
        "memory.optimizer_in_backward=false"
    ),
)
MEMORY.exclude(
    "memory.offload_state_dtype=bfloat16",
    "train.deterministic!=false",
    says="memory.offload_state_dtype=bfloat16 draws random numbers on each rank, which "
    "{train.deterministic} rules out; set memory.offload_state_dtype=float32",
)


@MEMORY.rule("memory.cpu_threads!=null")
def threads_have_cores(config: Sections, where: Where) -> str | None:
    """More threads than cores are slower."""
    threads = config.memory.cpu_threads
    cores = available_cores()
    if threads <= cores:  # type: ignore[operator]
        return None
    return (
        f"memory.cpu_threads={threads} is over the {cores} cores of this node; set "
        f"memory.cpu_threads={cores}"
    )


MEMORY.exclude(
    "memory.optimizer_offload=true",
    "optim.state_widths=[]",
    says="memory.optimizer_offload=true moves states, of which {optim} keeps none as set; leave "
    "it out or set optim.momentum=0.9",
)
MEMORY.exclude(
    "train.compile=true",
    "parallel.use_orig_params=false",
    says="train.compile=true passes over every module whose parameters FSDP1 made flat; set "
    "parallel.use_orig_params=true",
)
MEMORY.exclude(
    "train.compile=true",
    "memory.gradient_checkpointing=selective",
    when=lambda config, where: (
        config.memory.activation_offload
        or isinstance(config.model, MoEConfig)
        or where.axes.sharing > 1
        or config.parallel.hooks_parts_of_blocks(config.model)
    ),
    says=(
        "memory.gradient_checkpointing=selective cannot see into blocks compiled by "
        "train.compile=true with experts, units within a block, memory.activation_offload=true, "
        "or mesh.cp_size or mesh.tp_size above 1; set memory.gradient_checkpointing=full"
    ),
)
