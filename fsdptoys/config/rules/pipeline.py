"""Pipeline parallelism (``mesh.pp_size``) against model, memory switches, optimizer and number
formats."""

import torch

from fsdptoys.config.sections import Sections
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule

from .rule import Rules, Where

PIPELINE = Rules()

SCHEDULES_SINCE = (2, 11)
"""Version of torch from which 1f1b and interleaved are tried; with older ones gpipe is."""
ZERO_BUBBLE_SINCE = (2, 13)
"""Version from which zero_bubble is tried: with torch 2.11 it fails at the hooks of FSDP2."""


def _schedule(config: Sections) -> PipelineSchedule:
    """Return the schedule of a run with several stages."""
    schedule: PipelineSchedule = config.parallel.schedule  # type: ignore[attr-defined]
    return schedule


@PIPELINE.rule("mesh.pp_size")
def schedule_is_in_this_torch(config: Sections, where: Where) -> str | None:
    """Schedules come with versions of torch."""
    schedule = _schedule(config)
    since = (
        ZERO_BUBBLE_SINCE
        if schedule is PipelineSchedule.zero_bubble
        else SCHEDULES_SINCE
    )
    if schedule is PipelineSchedule.gpipe or since <= TORCH:
        return None
    return (
        f"parallel.schedule={schedule.value} needs torch {since[0]}.{since[1]} (found "
        f"{torch.__version__}); set "
        f"parallel.schedule={'gpipe' if TORCH < SCHEDULES_SINCE else 'interleaved'}"
    )


@PIPELINE.rule("mesh.pp_size")
def every_stage_has_a_layer(config: Sections, where: Where) -> str | None:
    """Stages are whole layers."""
    schedule = _schedule(config)
    ranks = config.mesh.pp_size
    n_layers = config.model.n_layers
    if n_layers >= ranks * schedule.stages_per_rank:
        return None
    most = n_layers // schedule.stages_per_rank
    fitting = max((size for size in range(1, most + 1) if ranks % size == 0), default=1)
    has_stages = fitting > 1 or schedule is PipelineSchedule.gpipe
    return (
        f"mesh.pp_size={ranks} makes {ranks * schedule.stages_per_rank} stages with "
        f"parallel.schedule={schedule.value}, more than model.n_layers={n_layers}; set "
        f"{f'mesh.pp_size={fitting}' if has_stages else 'parallel.schedule=gpipe'}"
    )


@PIPELINE.rule("mesh.pp_size")
def micro_batches_fit_the_schedule(config: Sections, where: Where) -> str | None:
    """Schedules other than gpipe interleave the micro-batches of a step."""
    schedule = _schedule(config)
    ranks = config.mesh.pp_size
    count = config.train.grad_accum
    if schedule is PipelineSchedule("1f1b") and count < ranks:
        return (
            f"train.grad_accum={count} has fewer micro-batches than mesh.pp_size={ranks} stages, "
            f"which parallel.schedule=1f1b needs; set train.grad_accum={ranks} or "
            "parallel.schedule=gpipe"
        )
    if schedule.stages_per_rank > 1 and count % ranks:
        return (
            f"train.grad_accum={count} must be a multiple of mesh.pp_size={ranks} with "
            f"parallel.schedule={schedule.value}; set train.grad_accum={-(-count // ranks) * ranks}"
        )
    return None


PIPELINE.exclude(
    "mesh.pp_size",
    "model.tie_embeddings=true",
    says="model.tie_embeddings=true shares a weight of the first and the last of {mesh.pp_size} "
    "stages; set model.tie_embeddings=false or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "tune=lora",
    says="tune=lora has not been tried with the stages of {mesh.pp_size}; set tune=full or "
    "mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "train.deterministic=true",
    says="train.deterministic=true reduces gradients after each micro-batch, of which "
    "{mesh.pp_size} has several under way; set train.deterministic=layout or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "train.compile=true",
    says="train.compile=true cannot compile the stages of {mesh.pp_size}; set train.compile=false "
    "or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "train.float8",
    says="{train.float8} has not been tried with the stages of {mesh.pp_size}; set "
    "train.float8=none or mesh.pp_size=1",
)
for _switch in (
    "cpu_offload",
    "optimizer_offload",
    "activation_offload",
    "optimizer_in_backward",
):
    PIPELINE.exclude(
        "mesh.pp_size",
        f"memory.{_switch}=true",
        says=(
            f"memory.{_switch}=true follows one forward and backward of a step, of which "
            f"{{mesh.pp_size}} has several under way; set memory.{_switch}=false or "
            "mesh.pp_size=1"
        ),
    )
PIPELINE.exclude(
    "mesh.pp_size",
    "optim.exchanges_matrices=true",
    says="{optim} exchanges matrices of all layers, of which a rank of {mesh.pp_size} has some; "
    "set optim=adamw or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "parallel.wrap_classes",
    says="{parallel.wrap_classes} may name no module of a stage of {mesh.pp_size}; set "
    "parallel.wrap_classes=[] or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "parallel.reshard_after_forward=always",
    says="parallel.reshard_after_forward=always would gather parameters again for each "
    "micro-batch of {mesh.pp_size}; set parallel.reshard_after_forward=never or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "parallel.schedule=zero_bubble",
    "memory.gradient_checkpointing=selective",
    says=(
        "memory.gradient_checkpointing=selective recomputes a block once, and "
        "parallel.schedule=zero_bubble has two backwards of each; set "
        "memory.gradient_checkpointing=full"
    ),
)
PIPELINE.exclude(
    "mesh.pp_size",
    "checkpoint.form=full",
    says="checkpoint.form=full gathers tensors that all ranks have, of which a rank of "
    "{mesh.pp_size} has some; set checkpoint.form=sharded or mesh.pp_size=1",
)
PIPELINE.exclude(
    "mesh.pp_size",
    "parallel.reduce_each_microbatch=true",
    unused=True,
    says="parallel.reduce_each_microbatch=true has no effect with the stages of {mesh.pp_size}, "
    "which reduce once a step; leave it out",
)
