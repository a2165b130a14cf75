"""Pipeline parallelism: ranks with some of the layers train like one process, with every schedule.

``test_layout_mode.py`` compares the bits, and resumes runs with other stages.
"""

import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.config.compose import compose_config
from fsdptoys.config.pipeline_checks import SCHEDULES_SINCE, ZERO_BUBBLE_SINCE
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.optim import MuonConfig
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ToyFSDPConfig
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import TORCH, ReshardAfterForward
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.parallel.groups import Pairs, Row, levels, trained_rows
from tests.parallel.runs import make_config, refusal
from tests.parallel.test_expert_parallelism import SGD, Outcome, assert_close
from tests.parallel.test_layout_mode import SELECTIVE, STAGES, needs_sums

TRIED = [each for each in PipelineSchedule if TORCH >= ZERO_BUBBLE_SINCE or each is not PipelineSchedule.zero_bubble]


def pipeline(name: str, **options: Any) -> FSDP2Config:
    return FSDP2Config(schedule=PipelineSchedule(name), **options)


def train_all(configs: list[Config]) -> list[Outcome] | None:
    outcomes = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        losses = [step.loss for step in trainer.history]
        outcome = Outcome(
            losses=losses + [step.eval_loss for step in trainer.history if step.eval_loss is not None],
            norms=[step.grad_norm for step in trainer.history],
            balance=[step.routing.aux_loss for step in trainer.history if step.routing],
            grads={},
            parameters={name: param.numpy().copy() for name, param in trainer.strategy.full_parameters()},
        )
        outcomes.append(outcome)
    return outcomes if dist.get_rank() == 0 else None  # all ranks have the same


COMMON: dict[str, Any] = {
    "model": STAGES["qwen3_moe"],
    "batch_size": 1,
    "grad_accum": 4,
    "steps": 2,
    "eval_every": 2,
    "eval_batches": 2,
    "optim": SGD,
    "deterministic": False,
}
ROWS = {
    f"{schedule.value} {dtype.value} on {ranks}": Row(
        FSDP2Config(schedule=schedule, param_dtype=dtype), ranks, {"pp_size": 2}, COMMON
    )
    for ranks, schedule, dtype in product((2, 4), TRIED, DType)
    if dtype is DType.float32 or schedule is TRIED[-1]
}
SHORT = {row for row in ROWS if row.endswith("on 2") and " float16" not in row}
trained = trained_rows(ROWS, train_all)


@needs_sums
@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_every_schedule_trains_as_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process: losses, held-out losses, norms, balance of experts, parameters; padding, clipping.

    In 16 bits, parameters of a schedule that adds up gradients in them would be further away.
    """
    assert_close(*trained[row])


def spoil_last_stage(config: Config) -> list[bool]:
    trainer = Trainer(config)
    clip = trainer._clip

    def spoil_and_clip(max_norm: float, unscale: float) -> torch.Tensor:
        if trainer.rank == trainer.world_size - 1:
            next(param.grad for _, param in trainer.strategy.named_parameters() if param.grad is not None).fill_(
                float("nan")
            )
        return clip(max_norm, unscale)

    trainer._clip = spoil_and_clip  # type: ignore[method-assign]
    before = hash_parameters(trainer)
    trainer.train()
    return [step.skipped for step in trainer.history] + [hash_parameters(trainer) == before]


@needs_sums
def test_a_gradient_that_is_not_finite_skips_the_update_of_all_stages() -> None:
    """Oracle: the initial parameters."""
    config = make_config(pipeline("1f1b"), 2, model=STAGES["llama"], pp_size=2, steps=1, deterministic=False)
    assert run_ranks(2, spoil_last_stage, config) == [[True, True]] * 2


REFUSED: dict[str, dict[str, Any]] = {
    "mesh.pp_size=2 is not an option of parallel=ddp; set parallel=fsdp2 or mesh.pp_size=1": {"parallel": DDPConfig()},
    "mesh.pp_size=2 is not an option of parallel=fsdp1; set parallel=fsdp2 or mesh": {"parallel": FSDP1Config()},
    "mesh.pp_size=2 is not an option of parallel=toy_fsdp; set parallel=fsdp2 or mesh": {"parallel": ToyFSDPConfig()},
    "mesh.pp_size=3 must divide the world size 4; set mesh.pp_size=2 or launch.nproc_per_node=3": {"pp_size": 3},
    "mesh.fsdp_size=4 must divide the 2 ranks of each of mesh.pp_size=2; set mesh.fsdp_size=2 or launch.nproc_per_node"
    "=8": {"fsdp_size": 4},
    "mesh.pp_size=4 makes 4 stages with parallel.schedule=gpipe, more than model.n_layers=3; set mesh.pp_size=3": {
        "pp_size": 4
    },
    "mesh.pp_size=2 makes 4 stages with parallel.schedule=interleaved, more than model.n_layers=3; set mesh.pp": {
        "parallel": pipeline("interleaved")
    },
    "train.grad_accum=1 has fewer micro-batches than mesh.pp_size=2 stages, which parallel.schedule=1f1b needs; set "
    "train.grad_accum=2 or parallel.schedule=gpipe": {"parallel": pipeline("1f1b"), "grad_accum": 1},
    "train.grad_accum=3 must be a multiple of mesh.pp_size=2 with parallel.schedule=zero_bubble; set train.grad_accum"
    "=4": {"parallel": pipeline("zero_bubble"), "grad_accum": 3, "model": STAGES["llama"]},
    "parallel.schedule=1f1b does nothing without stages; set mesh.pp_size=2 or leave it out": {
        "parallel": pipeline("1f1b"),
        "pp_size": 1,
    },
    "model.tie_embeddings=true shares a weight of the first and the last of mesh.pp_size=2 stages; set model.tie_": {
        "tie_embeddings": True
    },
    "tune=lora has not been tried with the stages of mesh.pp_size=2; set tune=full or mesh.pp_size=1": {
        "tune": LoRAConfig()
    },
    "train.deterministic=true reduces gradients after each micro-batch, of which mesh.pp_size=2 has several under way; "
    "set train.deterministic=layout or mesh.pp_size=1": {"deterministic": True},
    "train.compile=true cannot compile the stages of mesh.pp_size=2; set train.compile=false or": {"compile": True},
    "train.float8=tensorwise has not been tried with the stages of mesh.pp_size=2; set train.float8=none or": {
        "float8": Float8.tensorwise
    },
    "memory.cpu_offload=true follows one forward and backward of a step, of which mesh.pp_size=2 has several under": {
        "memory": MemoryConfig(cpu_offload=True)
    },
    "memory.optimizer_offload=true follows one forward and backward of a step, of which mesh.pp_size=2 has": {
        "memory": MemoryConfig(optimizer_offload=True)
    },
    "memory.activation_offload=true follows one forward and backward of a step, of which mesh.pp_size=2 has": {
        "memory": MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, activation_offload=True)
    },
    "memory.optimizer_in_backward=true follows one forward and backward of a step, of which mesh.pp_size=2 has": {
        "memory": MemoryConfig(optimizer_in_backward=True),
        "grad_accum": 1,
        "max_grad_norm": None,
        "skip_nonfinite": False,
    },
    "optim=muon exchanges matrices of all layers, of which a rank of mesh.pp_size=2 has some; set optim=adamw or": {
        "optim": MuonConfig()
    },
    "parallel.wrap_classes=[Attention] may name no module of a stage of mesh.pp_size=2; set parallel.wrap=block": {
        "parallel": FSDP2Config(wrap_classes=["Attention"])
    },
    "parallel.reshard_after_forward=always would gather parameters again for each micro-batch of mesh.pp_size=2; set": {
        "parallel": FSDP2Config(reshard_after_forward=ReshardAfterForward.always)
    },
    "memory.gradient_checkpointing=selective recomputes a block once, and parallel.schedule=zero_bubble has two": {
        "parallel": pipeline("zero_bubble"),
        "memory": SELECTIVE,
        "model": STAGES["llama"],
    },
}
"""Beginning of the sentence → settings, on four ranks under FSDP2 with two stages unless given."""


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_stages_cannot_be_trained_with_are_refused(message: str) -> None:
    """Oracle: the sentence, which names key, value and fix."""
    settings = {"parallel": FSDP2Config(), "pp_size": 2, "deterministic": False, **REFUSED[message]}
    schedule = getattr(settings["parallel"], "schedule", PipelineSchedule.gpipe)
    older = TORCH < SCHEDULES_SINCE and schedule is not PipelineSchedule.gpipe
    if settings["pp_size"] > 1 and (older or schedule not in TRIED):
        pytest.skip("this torch has fewer schedules")
    assert refusal(ranks=4, **settings).startswith(message)


def test_full_checkpoints_of_stages_are_refused() -> None:
    """Oracle: the sentence."""
    given = ["model=llama_debug", "parallel=fsdp2", "mesh.pp_size=2", "data=synthetic", "launch.device=cpu"]
    with pytest.raises(ConfigError, match=r"^checkpoint\.form=full .* mesh\.pp_size=2 has some; set checkpoint\.form="):
        compose_config([*given, "checkpoint.form=full"]).validate(4, "cpu")


def test_older_versions_of_torch_have_fewer_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the sentences; gpipe passes."""
    options: dict[str, Any] = {"pp_size": 2, "deterministic": False}
    monkeypatch.setattr("fsdptoys.config.pipeline_checks.TORCH", (2, 11))
    found = refusal(pipeline("zero_bubble"), 4, **options)
    assert re.match(r"parallel\.schedule=zero_bubble needs torch 2\.13 .*; set .*=interleaved", found)
    monkeypatch.setattr("fsdptoys.config.pipeline_checks.TORCH", (2, 10))
    found = refusal(pipeline("1f1b"), 4, **options)
    assert re.match(r"parallel\.schedule=1f1b needs torch 2\.11 .*; set parallel\.sch", found)
    make_config(pipeline("gpipe"), 4, **options)
