"""Check pipeline parallelism (``mesh.pp_size``) against model, memory switches, optimizer and number formats."""

from typing import Any, NoReturn, Protocol

import torch

from fsdptoys.checkpoint.config import CheckpointConfig, Form
from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.optim import OptimConfig
from fsdptoys.parallel import FSDP2Config, ParallelConfig
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import TORCH, ReshardAfterForward
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.tune import LoRAConfig, TuneConfig
from fsdptoys.utils.text import value_text

SCHEDULES_SINCE = (2, 11)
"""Version of torch from which 1f1b and interleaved are tried; with older ones gpipe is."""
ZERO_BUBBLE_SINCE = (2, 13)
"""Version from which zero_bubble is tried: with torch 2.11 it fails at the hooks of FSDP2."""


class Sections(Protocol):
    """Sections of a configuration that affect these checks; ``schema.Config`` has them."""

    train: Any
    mesh: MeshConfig
    model: ModelConfig
    memory: MemoryConfig
    optim: OptimConfig
    parallel: ParallelConfig
    tune: TuneConfig
    checkpoint: CheckpointConfig


def check_pipeline(config: Sections) -> None:
    """Refuse stages without a layer, micro-batches that do not fit the schedule, and settings that need all layers.

    Raises:
        ConfigError: naming key, value and fix.
    """
    parallel, ranks = config.parallel, config.mesh.pp_size
    if not isinstance(parallel, FSDP2Config):
        return
    schedule, accumulated = parallel.schedule, config.train.grad_accum
    if ranks == 1:
        if schedule is not PipelineSchedule.gpipe:
            raise UnusedKeyError(
                f"parallel.schedule={schedule.value} does nothing without stages; set mesh.pp_size=2 or leave it out"
            )
        return
    since = ZERO_BUBBLE_SINCE if schedule is PipelineSchedule.zero_bubble else SCHEDULES_SINCE
    if schedule is not PipelineSchedule.gpipe and since > TORCH:
        fix = "gpipe" if TORCH < SCHEDULES_SINCE else "interleaved"
        raise ConfigError(
            f"parallel.schedule={schedule.value} needs torch {since[0]}.{since[1]} (found {torch.__version__}); set "
            f"parallel.schedule={fix}"
        )
    stages, n_layers = ranks * schedule.stages_per_rank, config.model.n_layers
    if n_layers < stages:
        most = n_layers // schedule.stages_per_rank
        fitting = max((size for size in range(1, most + 1) if ranks % size == 0), default=1)
        has_stages = fitting > 1 or schedule is PipelineSchedule.gpipe
        fix = f"set mesh.pp_size={fitting}" if has_stages else "set parallel.schedule=gpipe"
        raise ConfigError(
            f"mesh.pp_size={ranks} makes {stages} stages with parallel.schedule={schedule.value}, more than "
            f"model.n_layers={n_layers}; {fix}"
        )
    if schedule is PipelineSchedule("1f1b") and accumulated < ranks:
        raise ConfigError(
            f"train.grad_accum={accumulated} has fewer micro-batches than mesh.pp_size={ranks} stages, which "
            f"parallel.schedule=1f1b needs; set train.grad_accum={ranks} or parallel.schedule=gpipe"
        )
    if schedule.stages_per_rank > 1 and accumulated % ranks:
        raise ConfigError(
            f"train.grad_accum={accumulated} must be a multiple of mesh.pp_size={ranks} with parallel.schedule="
            f"{schedule.value}; set train.grad_accum={-(-accumulated // ranks) * ranks}"
        )
    _check_switches(config, parallel)


def _check_switches(config: Sections, parallel: FSDP2Config) -> None:
    train, memory, ranks = config.train, config.memory, config.mesh.pp_size

    def refuse(setting: str, reason: str, fix: str) -> NoReturn:
        raise ConfigError(f"{setting} {reason}; set {fix} or mesh.pp_size=1")

    if config.model.tie_embeddings:
        refuse(
            "model.tie_embeddings=true",
            f"shares a weight of the first and the last of mesh.pp_size={ranks} stages",
            "model.tie_embeddings=false",
        )
    if isinstance(config.tune, LoRAConfig):
        refuse("tune=lora", f"has not been tried with the stages of mesh.pp_size={ranks}", "tune=full")
    if train.deterministic and not train.deterministic.covers_layouts:
        refuse(
            "train.deterministic=true",
            f"reduces gradients after each micro-batch, of which mesh.pp_size={ranks} has several under way",
            "train.deterministic=layout",
        )
    if train.compile:
        refuse("train.compile=true", f"cannot compile the stages of mesh.pp_size={ranks}", "train.compile=false")
    if train.float8 is not Float8.none:
        setting = f"train.float8={train.float8.value}"
        refuse(setting, f"has not been tried with the stages of mesh.pp_size={ranks}", "train.float8=none")
    for key in ("cpu_offload", "optimizer_offload", "activation_offload", "optimizer_in_backward"):
        if getattr(memory, key):
            reason = f"follows one forward and backward of a step, of which mesh.pp_size={ranks} has several under way"
            refuse(f"memory.{key}=true", reason, f"memory.{key}=false")
    if config.optim.exchanges_matrices:
        reason = f"exchanges matrices of all layers, of which a rank of mesh.pp_size={ranks} has some"
        refuse(f"optim={config.optim.name}", reason, "optim=adamw")
    if parallel.wrap_classes:
        setting = f"parallel.wrap_classes={value_text(parallel.wrap_classes)}"
        refuse(setting, f"may name no module of a stage of mesh.pp_size={ranks}", "parallel.wrap_classes=[]")
    if parallel.reshard_after_forward is ReshardAfterForward.always:
        refuse(
            "parallel.reshard_after_forward=always",
            f"would gather parameters again for each micro-batch of mesh.pp_size={ranks}",
            "parallel.reshard_after_forward=never",
        )
    if (
        parallel.schedule is PipelineSchedule.zero_bubble
        and memory.gradient_checkpointing is GradientCheckpointing.selective
    ):
        raise ConfigError(
            "memory.gradient_checkpointing=selective recomputes a block once, and parallel.schedule=zero_bubble has "
            "two backwards of each; set memory.gradient_checkpointing=full"
        )
    if config.checkpoint.form is Form.full:
        reason = f"gathers tensors that all ranks have, of which a rank of mesh.pp_size={ranks} has some"
        refuse("checkpoint.form=full", reason, "checkpoint.form=sharded")
