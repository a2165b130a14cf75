"""Memory switches against strategy, layout, compiler and optimizer."""

from fsdptoys.config.sections import Sections
from fsdptoys.device import available_cores
from fsdptoys.models import MoEConfig

from .rule import Rules, Where

MEMORY = Rules()


@MEMORY.rule("memory.optimizer_in_backward=true", "parallel")
def gradients_are_final_in_the_backward(config: Sections, where: Where) -> str | None:
    """Some strategies hold all gradients until the backward ends."""
    held = config.parallel.gradients_held
    if not config.memory.optimizer_in_backward or not held:
        return None
    return (
        "memory.optimizer_in_backward=true frees gradients as they come, and "
        f"parallel={config.parallel.name} {held}; set parallel=fsdp2 or memory.optimizer_in_backward=false"
    )


MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "mesh.fsdp_size",
    when=lambda config, where: (
        config.parallel.shards_parameters
        and config.mesh.shard_ranks(where.world_size) < config.mesh.stage_ranks(where.world_size)
    ),
    says="memory.optimizer_in_backward=true saves nothing with {mesh.fsdp_size}, since FSDP2 holds gradients that go "
    "to replicas until the backward ends; set mesh.fsdp_size=-1 or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "optim",
    when=lambda config, where: config.optim.exchanges_matrices,
    says="memory.optimizer_in_backward=true updates parameter by parameter, and {optim} exchanges several at a time; "
    "set optim=adamw or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    says="memory.optimizer_in_backward=true updates on the device in the backward, memory.optimizer_offload=true "
    "elsewhere or later; set memory.optimizer_offload=false or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "memory.cpu_offload=true",
    says="memory.optimizer_in_backward=true updates on the device in the backward, memory.cpu_offload=true elsewhere "
    "or later; set memory.cpu_offload=false or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "train.grad_accum",
    says="memory.optimizer_in_backward=true leaves no gradients to add to, as {train.grad_accum} needs; set "
    "train.grad_accum=1 or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "train.max_grad_norm!=null",
    says="memory.optimizer_in_backward=true updates before the norm of all gradients is known, by which "
    "{train.max_grad_norm} scales them; set train.max_grad_norm=null or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.optimizer_in_backward=true",
    "train.skip_nonfinite=true",
    says="memory.optimizer_in_backward=true updates before it is known whether all gradients are finite, for which "
    "train.skip_nonfinite=true waits; set train.skip_nonfinite=false or memory.optimizer_in_backward=false",
)
MEMORY.exclude(
    "memory.cpu_offload_executor=overlapped",
    "parallel",
    when=lambda config, where: not config.parallel.overlaps_cpu_offload,
    says="memory.cpu_offload_executor=overlapped is not an option of {parallel}; set parallel=fsdp2 or "
    "memory.cpu_offload_executor=native",
)
MEMORY.exclude(
    "memory.offload_state_dtype=bfloat16",
    "train.deterministic!=false",
    says="memory.offload_state_dtype=bfloat16 draws random numbers on each rank, which {train.deterministic} rules "
    "out; set memory.offload_state_dtype=float32",
)


@MEMORY.rule("memory.cpu_threads")
def threads_have_cores(config: Sections, where: Where) -> str | None:
    """More threads than cores are slower."""
    threads, cores = config.memory.cpu_threads, available_cores()
    if threads is None or threads <= cores:
        return None
    return f"memory.cpu_threads={threads} is over the {cores} cores of this node; set memory.cpu_threads={cores}"


MEMORY.exclude(
    "memory.optimizer_offload=true",
    "mesh.ep_size=1",
    "parallel",
    when=lambda config, where: not config.parallel.keeps_full_states,
    says="memory.optimizer_offload=true is not an option of {parallel}, whose states are cut; leave it out or set "
    "parallel=toy_ddp",
)
MEMORY.exclude(
    "memory.optimizer_offload=true",
    "mesh.ep_size!=1",
    "parallel",
    when=lambda config, where: not config.parallel.keeps_full_states,
    says="memory.optimizer_offload=true is not an option of {parallel}, whose states are cut; leave it out",
)
MEMORY.exclude(
    "memory.optimizer_offload=true",
    "optim",
    when=lambda config, where: not config.optim.state_widths,
    says="memory.optimizer_offload=true moves states, of which {optim} keeps none as set; leave it out or set "
    "optim.momentum=0.9",
)
MEMORY.exclude(
    "memory.checkpointing_budget!=null",
    "train.compile=false",
    says="{memory.checkpointing_budget} acts through the compiler; set train.compile=true",
)
MEMORY.exclude(
    "train.compile=true",
    "parallel",
    when=lambda config, where: not config.parallel.compiles,
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
    says="memory.gradient_checkpointing=selective cannot see into blocks compiled by train.compile=true with experts, "
    "units within a block, memory.activation_offload=true, or mesh.cp_size or mesh.tp_size above 1; set "
    "memory.gradient_checkpointing=full",
)
