"""Check the settings of ``train.deterministic=layout`` before the launch."""

import math
from typing import Any, Protocol

import torch

from fsdptoys.device import float64_collectives
from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.memory import MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.mesh import MeshConfig

from .kernel_choice import KernelConfig
from .tensor_checks import split_sizes

DEFAULT_GRAINS = 8


class Sections(Protocol):
    """Sections of a configuration that affect these checks; ``schema.Config`` has them."""

    train: Any
    parallel: ParallelConfig
    mesh: MeshConfig
    memory: MemoryConfig
    model: ModelConfig
    kernels: KernelConfig


def check_grains(config: Sections, world_size: int, device_type: str) -> None:
    """Refuse settings under which sums by grains would depend on the layout, or cannot run.

    Raises:
        ConfigError: naming key, value and fix.
    """
    train, parallel, memory = config.train, config.parallel, config.memory
    if not train.deterministic.covers_layouts:
        if train.grains != DEFAULT_GRAINS:
            raise UnusedKeyError(
                f"train.grains={train.grains} does nothing as set; set train.deterministic=layout or leave it out"
            )
        if train.slices != 1:
            raise UnusedKeyError(
                f"train.slices={train.slices} does nothing as set; set train.deterministic=layout or leave it out"
            )
        return

    def refuse(setting: str, reason: str, fix: str) -> None:
        raise ConfigError(f"{setting} {reason}, which train.deterministic=layout rules out; set {fix}")

    if not parallel.sums_grains:
        refuse(f"parallel={parallel.name}", "does not sum gradients in float64 once a step", "parallel=fsdp2")
    if parallel.reduces_often:
        key = "parallel.reduce_each_microbatch"
        refuse(f"{key}=true", "rounds the gradients of each micro-batch to float32", f"{key}=false")
    if parallel.uses_dtensor and not fsdp2_can_sum():
        raise ConfigError(
            f"train.deterministic=layout sums gradients, which FSDP2 of torch {torch.__version__} only averages; "
            "set parallel=ddp or parallel=fsdp1"
        )
    if train.seq_len % train.grains:
        fitting = math.gcd(train.seq_len, train.grains)
        raise ConfigError(
            f"train.grains={train.grains} must divide train.seq_len={train.seq_len}; set train.grains={fitting}"
        )
    _check_pieces(config)
    _check_slices(config)
    if not float64_collectives(device_type):
        refuse(f"launch.device={device_type}", "has no collectives of float64", "train.deterministic=false")
    if train.compile:
        refuse("train.compile=true", "rounds by the sizes that it compiles for", "train.compile=false")
    if train.float8 is not Float8.none:
        refuse(f"train.float8={train.float8.value}", "scales by the largest number of a batch", "train.float8=none")
    if parallel.param_dtype.needs_loss_scale:
        dtype = parallel.param_dtype.value
        refuse(
            f"parallel.param_dtype={dtype}",
            "scales the loss by the number of ranks and micro-batches",
            "parallel.param_dtype=bfloat16",
        )
    for operation, name in config.kernels.names().items():
        if name in ("compiled", "npu", "flex"):
            refuse(f"kernels.{operation}={name}", "rounds by the sizes of its inputs", f"kernels.{operation}=torch")
        if name in ("cudnn", "flash") and device_type == "cuda":
            refuse(f"kernels.{operation}={name}", "cannot attend from one grain", f"kernels.{operation}=auto")
    if parallel.flattens_parameters and world_size == 1 and config.model.tie_embeddings and train.grad_accum > 1:
        # torch refuses to assign its unreduced float64 gradient to each of its float32 names.
        refuse(
            "model.tie_embeddings=true",
            f"makes parallel={parallel.name} on one rank round the gradients of each micro-batch",
            "parallel=single",
        )
    if memory.optimizer_in_backward and not parallel.shards_parameters:
        refuse(
            "memory.optimizer_in_backward=true",
            f"needs gradients in the backward, and parallel={parallel.name} adds float64 ones up until its end",
            "parallel=fsdp2 or memory.optimizer_in_backward=false",
        )


def _check_slices(config: Sections) -> None:
    """Check that ranks that split features have whole slices."""
    slices, ranks = config.train.slices, config.mesh.tp_size
    sizes = split_sizes(config.model)
    common = math.gcd(*sizes.values())
    if slices % ranks:
        raise ConfigError(
            f"train.slices={slices} must be a multiple of mesh.tp_size={ranks}, whose ranks have whole slices with "
            f"train.deterministic=layout; set train.slices={math.lcm(slices, ranks)} or mesh.tp_size=1"
        )
    if common % slices:
        key, size = next((key, size) for key, size in sizes.items() if size % slices)
        raise ConfigError(
            f"train.slices={slices} must divide model.{key}={size}; set train.slices={math.gcd(common, slices)}"
        )


def _check_pieces(config: Sections) -> None:
    """Check that ranks that share a sequence have whole grains."""
    train, ranks, splits = config.train, config.mesh.cp_size, config.mesh.tp_size
    if ranks * splits == 1:
        return
    form = getattr(config.parallel, "context", ContextForm.auto)
    if form is ContextForm.ring:
        raise ConfigError(
            "parallel.context=ring merges parts of sums in an order of each rank's own, which "
            "train.deterministic=layout rules out; set parallel.context=gathered"
        )
    pieces = math.lcm(form.pieces_per_rank * ranks if ranks > 1 else 1, ranks * splits)
    if train.grains % pieces:
        context = f"parallel.context={form.value} cuts a sequence with mesh.cp_size={ranks}"
        cut = f"mesh.tp_size={splits} cuts a sequence with mesh.cp_size={ranks}" if splits > 1 else context
        raise ConfigError(
            f"train.grains={train.grains} must be a multiple of {pieces}, the pieces into which {cut}; set "
            f"train.grains={math.lcm(train.grains, pieces)}"
        )
    if ranks == 1:
        return
    chunk_len, grain = getattr(config.model, "attention_chunk_len", None), train.seq_len // train.grains
    if form is not ContextForm.ulysses and chunk_len and chunk_len < train.seq_len and chunk_len % grain:
        raise ConfigError(
            f"model.attention_chunk_len={chunk_len} must be a multiple of the {grain} tokens of a grain under "
            f"parallel.context={form.value}; set another train.grains or parallel.context=ulysses"
        )
