"""Pipeline parallelism: ranks with some of the layers train like one process, with every schedule and other axis."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.config.compose import compose_config
from fsdptoys.config.pipeline_checks import SCHEDULES_SINCE, ZERO_BUBBLE_SINCE
from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.generate import Draw, generate
from fsdptoys.optim import MuonConfig
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, SingleConfig, ToyFSDPConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import TORCH, ReshardAfterForward
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build, write
from tests.parallel import test_layout_mode
from tests.parallel.runs import TINY, make_config, tiny_model
from tests.parallel.test_expert_parallelism import SGD, Outcome, assert_close
from tests.parallel.test_layout_mode import CHUNKED, FULL, SELECTIVE, Case, assert_bits_of_one_process, resume
from tests.parallel.test_tensor import initial
from tests.train.resumed import kept

needs_sums = pytest.mark.skipif(not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients")
EXPERTS: dict[str, Any] = {"n_experts": 4, "expert_ffn_dim": 24}
EVEN: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "ffn_dim": 52, "vocab_size": 68, "dim": 40}
MODELS: dict[str, Any] = {
    "llama": dataclasses.replace(tiny_model(), n_layers=4, **EVEN),
    "qwen3": dataclasses.replace(TINY["qwen3"], n_layers=4),
    "qwen3_moe": dataclasses.replace(TINY["qwen3_moe"], n_layers=4, **EXPERTS, **EVEN),
    "llama4": dataclasses.replace(TINY["llama4"], **EXPERTS, **EVEN, attention_chunk_len=12),
    "gpt2": dataclasses.replace(TINY["gpt2"], n_layers=5, tie_embeddings=False),
}
TRIED = [each for each in PipelineSchedule if TORCH >= ZERO_BUBBLE_SINCE or each is not PipelineSchedule.zero_bubble]
LAST = TRIED[-1].value
DOCUMENTS = SyntheticConfig(branching=60, mask_documents=True)


def pipeline(name: str, **options: Any) -> FSDP2Config:
    return FSDP2Config(schedule=PipelineSchedule(name), **options)


@pytest.mark.usefixtures("unmeasured")
@needs_sums
def test_layout_mode_has_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one process, whose micro-batch is the global batch: losses, held-out losses, gradients, parameters."""
    monkeypatch.setattr(test_layout_mode, "MODELS", MODELS)
    two = {"pp_size": 2}
    cases: list[Case] = [
        (
            *("llama", DType.float32, {"slices": 2}),
            {"shard": (pipeline("1f1b"), two), "tp": (pipeline(LAST), two | {"tp_size": 2})},
        ),
        (
            "qwen3",
            DType.bfloat16,
            {"data": DOCUMENTS},
            {"pp 4": (pipeline("1f1b"), {"pp_size": 4, "memory": SELECTIVE})},
        ),
        (
            *("qwen3_moe", DType.bfloat16, {"memory": CHUNKED}),
            {
                "ep": (pipeline(LAST), two | {"ep_size": 2}),
                "cp": (pipeline("interleaved"), two | {"cp_size": 2}),
            },
        ),
        (
            *("llama4", DType.float32, {}),
            {
                "cp ep": (
                    pipeline("gpipe", context=ContextForm.gathered),
                    two | {"cp_size": 2, "ep_size": 2, "memory": FULL},
                ),
                "hsdp": (pipeline("interleaved"), two | {"fsdp_size": 1}),
            },
        ),
        ("gpt2", DType.float32, {"data": DOCUMENTS}, {"shard": (pipeline("interleaved"), two)}),
    ]
    assert_bits_of_one_process(4, cases)


def train_all(configs: list[Config]) -> list[Outcome] | None:
    outcomes = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        outcomes.append(
            Outcome(
                losses=[step.loss for step in trainer.history]
                + [step.eval_loss for step in trainer.history if step.eval_loss is not None],
                norms=[step.grad_norm for step in trainer.history],
                balance=[step.routing.aux_loss for step in trainer.history if step.routing],
                grads={},
                parameters={name: param.numpy().copy() for name, param in trainer.strategy.full_parameters()},
            )
        )
    return outcomes if dist.get_rank() == 0 else None  # all ranks have the same


@pytest.mark.usefixtures("unmeasured")
@needs_sums
def test_every_schedule_trains_as_one_process() -> None:
    """Oracle: one process: losses, held-out losses, norms, balance of experts, parameters; padding, clipping.

    In 16 bits, parameters of a schedule that adds up gradients in them would be further away.
    """
    common: dict[str, Any] = {"model": MODELS["qwen3_moe"], "grad_accum": 4, "batch_size": 1, "steps": 2, "optim": SGD}
    common |= {"deterministic": False, "eval_every": 2}
    dtypes = [DType.float32, DType.bfloat16, DType.float16]
    simulated = [SingleConfig(simulated_ranks=2, param_dtype=dtype) for dtype in dtypes]
    alone = [make_config(each, 1, eval_batches=4, **common) for each in simulated]
    expected = dict(zip(dtypes, run_ranks(1, train_all, alone)[0], strict=True))
    rows = [(schedule, DType.float32) for schedule in TRIED]
    rows += [(TRIED[-1], dtype) for dtype in dtypes[1:]]
    shared = [
        make_config(FSDP2Config(schedule=schedule, param_dtype=dtype), 4, pp_size=2, eval_batches=2, **common)
        for schedule, dtype in rows
    ]
    for (_, dtype), outcome in zip(rows, run_ranks(4, train_all, shared)[0], strict=True):
        assert_close(outcome, expected[dtype])


@needs_sums
def test_a_run_resumed_with_other_stages_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one process in one piece; the other run has two stages, none, four stages of two ranks, and none."""
    monkeypatch.setattr("fsdptoys.metrics.plots.draw_loss", lambda *_: None)  # most of the time of such small runs
    monkeypatch.setattr(test_layout_mode, "MODELS", MODELS)

    def part(parallel: Any, ranks: int, folder: str = "run", **more: Any) -> Config:
        made = test_layout_mode.config(parallel, ranks, "gpt2", DType.float32, steps=4, eval_every=0, **more)
        return kept(made, tmp_path / folder, every=1)

    (expected,) = run_ranks(1, resume, part(SingleConfig(), 1, "whole", batch_size=4), None)
    run_ranks(4, resume, part(pipeline("1f1b"), 4, pp_size=2), 2)
    run_ranks(2, resume, part(DDPConfig(), 2, batch_size=2), 3)
    run_ranks(2, resume, part(pipeline(LAST), 2, pp_size=2), 4)
    (found,) = run_ranks(1, resume, part(SingleConfig(), 1), None)
    assert found == expected


def generated(config: Config) -> list[int]:
    trainer = Trainer(config)
    prompt_T = torch.tensor([3, 1, 4, 1, 5])
    return generate(trainer.strategy.full_model, prompt_T, 12, 12, Draw(0.0, None, 1.0, 0)).tolist()


@needs_sums
def test_stages_begin_with_the_values_of_one_process(tmp_path: Path) -> None:
    """Oracle: one process, from the seed and from a folder in Hugging Face format; and the tokens it generates."""
    model = MODELS["llama4"]
    write(tmp_path / "folder", build(model))
    models = [model, dataclasses.replace(model, init_from=str(tmp_path / "folder"))]
    options: dict[str, Any] = {"steps": 1, "deterministic": False}
    alone = [make_config(SingleConfig(), 1, model=each, **options) for each in models]
    mesh = {"pp_size": 2, "tp_size": 2}
    shared = [make_config(pipeline("interleaved"), 4, model=each, **mesh, **options) for each in models]
    assert run_ranks(4, initial, shared)[0] == run_ranks(1, initial, alone)[0]
    assert run_ranks(4, generated, shared[1]) == run_ranks(1, generated, alone[1]) * 4


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
    config = make_config(pipeline("1f1b"), 2, model=MODELS["llama"], pp_size=2, steps=1, deterministic=False)
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
    "=4": {"parallel": pipeline("zero_bubble"), "grad_accum": 3, "model": MODELS["llama"]},
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
        "model": MODELS["llama"],
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
    with pytest.raises(ConfigError) as refused:
        make_config(settings.pop("parallel"), 4, **settings)
    assert str(refused.value).startswith(message)


def test_full_checkpoints_of_stages_are_refused() -> None:
    """Oracle: the sentence."""
    given = ["model=llama_debug", "parallel=fsdp2", "mesh.pp_size=2", "data=synthetic", "launch.device=cpu"]
    with pytest.raises(ConfigError, match=r"^checkpoint\.form=full .* mesh\.pp_size=2 has some; set checkpoint\.form="):
        compose_config([*given, "checkpoint.form=full"]).validate(4, "cpu")


def test_older_versions_of_torch_have_fewer_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the sentences; gpipe passes."""
    options: dict[str, Any] = {"pp_size": 2, "deterministic": False}
    monkeypatch.setattr("fsdptoys.config.pipeline_checks.TORCH", (2, 11))
    with pytest.raises(ConfigError, match=r"^parallel\.schedule=zero_bubble needs torch 2\.13 .*; set .*=interleaved"):
        make_config(pipeline("zero_bubble"), 4, **options)
    monkeypatch.setattr("fsdptoys.config.pipeline_checks.TORCH", (2, 10))
    with pytest.raises(ConfigError, match=r"^parallel\.schedule=1f1b needs torch 2\.11 .*; set parallel\.sch"):
        make_config(pipeline("1f1b"), 4, **options)
    make_config(pipeline("gpipe"), 4, **options)
