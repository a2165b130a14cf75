"""``train.deterministic=layout``: nothing may depend on how a batch is split."""

import math

import torch

from fsdptoys.config.sections import Sections
from fsdptoys.device import float64_collectives
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum

from .axes import split_sizes
from .rule import Rules, Where

LAYOUT_MODE = Rules()
LAYOUT = "train.deterministic=layout"

LAYOUT_MODE.exclude(
    LAYOUT,
    "parallel.reduce_each_microbatch=true",
    says=(
        "parallel.reduce_each_microbatch=true rounds the gradients of each micro-batch to "
        "float32, which train.deterministic=layout rules out; set "
        "parallel.reduce_each_microbatch=false"
    ),
)


LAYOUT_MODE.exclude(
    LAYOUT,
    "parallel.capabilities.uses_dtensor=true",
    when=lambda config, where: not fsdp2_can_sum(),
    says=f"train.deterministic=layout sums gradients, which FSDP2 of torch {torch.__version__} "
    "only averages; set parallel=ddp or parallel=fsdp1",
)


@LAYOUT_MODE.rule(LAYOUT)
def grains_divide_sequences(config: Sections, where: Where) -> str | None:
    """Grains are equal pieces of a sequence."""
    seq_len = config.train.seq_len
    grains = config.train.grains
    if seq_len % grains == 0:
        return None
    return (
        f"train.grains={grains} must divide train.seq_len={seq_len}; set "
        f"train.grains={math.gcd(seq_len, grains)}"
    )


@LAYOUT_MODE.rule(LAYOUT)
def ranks_have_whole_grains(config: Sections, where: Where) -> str | None:
    """Ranks that share a sequence have whole grains, and add up in one order."""
    train = config.train
    ranks = config.mesh.cp_size
    splits = config.mesh.tp_size
    if ranks * splits == 1:
        return None
    form = getattr(config.parallel, "context", ContextForm.auto)
    if form is ContextForm.ring:
        return (
            "parallel.context=ring merges parts of sums in an order of each rank's own, which "
            "train.deterministic=layout rules out; set parallel.context=gathered"
        )
    pieces = math.lcm(form.pieces_per_rank * ranks if ranks > 1 else 1, ranks * splits)
    if train.grains % pieces:
        cutter = (
            f"mesh.tp_size={splits}" if splits > 1 else f"parallel.context={form.value}"
        )
        return (
            f"train.grains={train.grains} must be a multiple of {pieces}, the pieces into which "
            f"{cutter} cuts a sequence with mesh.cp_size={ranks}; set "
            f"train.grains={math.lcm(train.grains, pieces)}"
        )
    chunk_len = getattr(config.model, "attention_chunk_len", None)
    grain = train.seq_len // train.grains
    if (
        ranks > 1
        and form is not ContextForm.ulysses
        and chunk_len
        and chunk_len < train.seq_len
        and chunk_len % grain
    ):
        return (
            f"model.attention_chunk_len={chunk_len} must be a multiple of the {grain} tokens of "
            f"a grain under parallel.context={form.value}; set another train.grains or "
            "parallel.context=ulysses"
        )
    return None


@LAYOUT_MODE.rule(LAYOUT)
def ranks_have_whole_slices(config: Sections, where: Where) -> str | None:
    """Ranks that split features have whole slices."""
    slices = config.train.slices
    ranks = config.mesh.tp_size
    sizes = split_sizes(config.model)
    if slices % ranks:
        return (
            f"train.slices={slices} must be a multiple of mesh.tp_size={ranks}, whose ranks have "
            "whole slices with train.deterministic=layout; set "
            f"train.slices={math.lcm(slices, ranks)} or mesh.tp_size=1"
        )
    for key, size in sizes.items():
        if size % slices:
            fitting = math.gcd(slices, *sizes.values())
            return (
                f"train.slices={slices} must divide model.{key}={size}; set "
                f"train.slices={fitting}"
            )
    return None


LAYOUT_MODE.exclude(
    LAYOUT,
    when=lambda config, where: not float64_collectives(where.device_type),
    says="{launch.device} has no collectives of float64, which train.deterministic=layout rules "
    "out; set train.deterministic=false",
)
LAYOUT_MODE.exclude(
    LAYOUT,
    "train.compile=true",
    says=(
        "train.compile=true rounds by the sizes that it compiles for, which "
        "train.deterministic=layout rules out; set train.compile=false"
    ),
)
LAYOUT_MODE.exclude(
    LAYOUT,
    "train.float8",
    says="{train.float8} scales by the largest number of a batch, which "
    "train.deterministic=layout rules out; set train.float8=none",
)
LAYOUT_MODE.exclude(
    LAYOUT,
    "parallel.param_dtype=float16",
    says=(
        "parallel.param_dtype=float16 scales the loss by the number of ranks and micro-batches, "
        "which train.deterministic=layout rules out; set parallel.param_dtype=bfloat16"
    ),
)


@LAYOUT_MODE.rule(LAYOUT)
def kernels_round_by_grains(config: Sections, where: Where) -> str | None:
    """Some kernels choose their order of summation by the sizes of their inputs."""
    for operation, name in config.kernels.names().items():
        if name in ("compiled", "npu", "flex"):
            return (
                f"kernels.{operation}={name} rounds by the sizes of its inputs, which "
                f"train.deterministic=layout rules out; set kernels.{operation}=torch"
            )
        if name in ("cudnn", "flash") and where.device_type == "cuda":
            return (
                f"kernels.{operation}={name} cannot attend from one grain, which "
                f"train.deterministic=layout rules out; set kernels.{operation}=auto"
            )
    return None


LAYOUT_MODE.exclude(
    LAYOUT,
    "parallel.capabilities.flattens_parameters=true",
    "model.tie_embeddings=true",
    "train.grad_accum",
    # torch refuses to assign its unreduced float64 gradient to each of its float32 names.
    when=lambda config, where: where.world_size == 1,
    says="model.tie_embeddings=true makes {parallel} on one rank round the gradients of each "
    "micro-batch, which train.deterministic=layout rules out; set parallel=single",
)
LAYOUT_MODE.exclude(
    LAYOUT,
    "memory.optimizer_in_backward=true",
    "parallel.capabilities.shards_parameters=false",
    says="memory.optimizer_in_backward=true needs gradients in the backward, and {parallel} adds "
    "float64 ones up until its end, which train.deterministic=layout rules out; set "
    "parallel=fsdp2 or memory.optimizer_in_backward=false",
)
