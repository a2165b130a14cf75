"""Toys compared with their native counterparts: losses, norms and parameters, bitwise if the sums are the same."""

from contextlib import closing
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.parallel import (
    DDPConfig,
    ParallelConfig,
    ToyDDPConfig,
    ToyZero1Config,
    ToyZero2Config,
    ToyZero3Config,
    full_tensors,
    host_copy,
)
from fsdptoys.parallel.precision import DType
from fsdptoys.plan.search.switches import validate_switches
from fsdptoys.toys.partition import Evenness
from fsdptoys.train.distributed import deterministic_kernels
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import (
    is_dtensor,
    local_bounds,
)
from scripts.parity import hash_parameters, train_all
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config, tiny_model

MODELS = {"llama": tiny_model(), "tied": tiny_model(tie_embeddings=True), **{k: TINY[k] for k in ("gpt2", "qwen3_moe")}}
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1)
EVERYTHING = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.selective, chunk_loss=True, chunk_tokens="20", optimizer_offload=True
)
SMALL = {"steps": 2, "seq_len": 8, "batch_size": 1}


def pairs(ranks: int) -> dict[str, tuple[ParallelConfig, ParallelConfig, dict[str, Any]]]:
    """Label → a native strategy, the toy that must equal it, and their common settings."""
    default = {**SMALL, "deterministic": False}
    made: dict[str, tuple[ParallelConfig, ParallelConfig, dict[str, Any]]] = {}
    for name, model in MODELS.items():
        made[f"ddp {name}"] = (DDPConfig(), ToyDDPConfig(), {"model": model, **default})
    for toy in (ToyDDPConfig, ToyZero1Config, ToyZero2Config):
        if ranks < 4 or toy is not ToyZero2Config:  # whose sums of more than two numbers have another order
            alike = {**default, "grad_accum": 1 if toy is ToyZero2Config else 2, "model": MODELS["gpt2"]}
            made[f"{toy.name} without overlap"] = (DDPConfig(), toy(overlap=False), alike)
    half = {"param_dtype": DType.bfloat16}
    made["ddp deterministic"] = (DDPConfig(), ToyDDPConfig(), {**SMALL, "memory": CHECKPOINTED})
    made["ddp bf16"] = (DDPConfig(**half), ToyDDPConfig(**half), {"memory": EVERYTHING, **default})
    for toy in (ToyZero1Config, ToyZero2Config):
        made[f"{toy.name} deterministic"] = (DDPConfig(), toy(), {**SMALL, "tie_embeddings": True})
        # Small buckets would be summed in another order over four ranks.
        alike = {**default, "grad_accum": 1, "model": MODELS["gpt2"]}
        if ranks < 4 or toy is ToyZero1Config:
            made[f"{toy.name} default"] = (DDPConfig(), toy(), alike)
    three = {**SMALL, "tie_embeddings": True, "memory": CHECKPOINTED, "eval_every": 2, "eval_batches": 1}
    made["toy_zero3 deterministic"] = (DDPConfig(), ToyZero3Config(evenness=Evenness.unit), three)
    if ranks < 4:
        alike = {**default, "grad_accum": 1}
        made["toy_zero3 default"] = (DDPConfig(), ToyZero3Config(), {**alike, "model": MODELS["qwen3_moe"]})
        made["toy_zero3 alone"] = (DDPConfig(), ToyZero3Config(prefetch=False), {**alike, "model": MODELS["gpt2"]})
    made["toy_zero1 bf16"] = (DDPConfig(**half), ToyZero1Config(**half), {**default, "memory": CHECKPOINTED})
    return made


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_toys_match_their_native_counterparts_bitwise(ranks: int, request: pytest.FixtureRequest) -> None:
    """Oracle: the native strategy at the same world size, on every family, with accumulation and clipping."""
    if ranks != 2:
        request.getfixturevalue("unmeasured")
    made = pairs(ranks)
    configs = [make_config(each, ranks, **common) for *both, common in made.values() for each in both]
    outcomes = run_ranks(ranks, train_all, configs)[0]
    differing = [label for label, native, toy in zip(made, outcomes[::2], outcomes[1::2], strict=True) if native != toy]
    assert differing == []


def test_planner_refuses_toys() -> None:
    """Oracle: the expected message; a prediction of the wrong strategy would be worse than none."""
    with pytest.raises(ConfigError, match="parallel=toy_ddp cannot be predicted; set parallel=ddp"):
        validate_switches(compose_config(["parallel=toy_ddp"]), 2, "cpu")


def pass_on(configs: list[Config]) -> tuple[dict[str, str], dict[str, str]]:
    """Final parameters of one run, and of one resumed under the next strategy after every step."""
    whole = Trainer(configs[0])
    whole.train()
    facts: dict[str, Any] = {}
    saved: dict[str, Tensor] = {}

    def load(tensors: dict[str, Tensor]) -> None:
        assert set(tensors) == set(saved)
        for name, tensor in tensors.items():
            if is_dtensor(tensor):
                rows = tuple(slice(low, high) for low, high in local_bounds(tensor))
                tensor.to_local().copy_(saved[name][rows])
            else:
                tensor.copy_(saved[name])

    for config in configs:
        trainer = Trainer(config)
        if facts:
            trainer.load_state_dict(facts, load)
        last = trainer.steps_done + 1
        with closing(trainer.batches), deterministic_kernels(True, "cpu"):
            trainer._train_step(last, 0.0)
            trainer.readings.finish(last)
        trainer.steps_done = last
        facts = trainer.state_dict()
        named = [dict(full_tensors(host_copy(trainer.strategy.state_tensors(trainer.optimizer))))]
        dist.broadcast_object_list(named)
        saved = named[0]  # type: ignore[assignment]
    return hash_parameters(whole), hash_parameters(trainer)


def test_run_resumes_under_any_other_toy_bitwise() -> None:
    """Oracle: native DDP without interruption; parameters and optimizer states pass from strategy to strategy."""
    chain = [DDPConfig(), ToyZero1Config(), ToyZero3Config(), ToyZero2Config(), ToyDDPConfig(), ToyZero3Config()]
    configs = [make_config(parallel, 2, **{**SMALL, "steps": len(chain), "tie_embeddings": True}) for parallel in chain]
    expected, found = run_ranks(2, pass_on, configs)[0]
    assert found == expected


REFUSED = [
    (["parallel=toy_zero1", "memory.optimizer_offload=true"], "memory.optimizer_offload=true is not an option"),
    (["parallel=toy_zero3", "memory.optimizer_offload=true"], "memory.optimizer_offload=true is not an option"),
    (["parallel=toy_zero2", "memory.cpu_offload=true"], "memory.cpu_offload=true is not an option"),
    (["parallel=toy_zero3", "memory.cpu_offload=true"], "memory.cpu_offload=true is not an option"),
    (["parallel=toy_zero3", "parallel.param_dtype=bfloat16"], "parallel.param_dtype=bfloat16 is not an option"),
    (["parallel=toy_zero3", "mesh.fsdp_size=1"], "mesh.fsdp_size=1 replicates"),
    (["parallel=toy_zero2", "mesh.fsdp_size=2"], "mesh.fsdp_size=2 shards"),
    (["parallel=toy_ddp", "parallel.bucket_cap_mb=0"], "parallel.bucket_cap_mb=0 must be"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_unsupported_settings_of_toys_are_refused_in_one_sentence_with_a_fix(words: list[str], sentence: str) -> None:
    """Oracle: key and value at the beginning of the sentence, a fix after its semicolon."""
    with pytest.raises(ConfigError) as refused:
        compose_config([*words, "model=llama_debug"]).validate(2, "cpu")
    message = str(refused.value)
    assert message.startswith(sentence) and ("; set " in message or "; leave " in message)
