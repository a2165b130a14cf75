"""The toys train as what they are toys of: losses, norms and parameters, in every bit where the sums are the same."""

from typing import Any

import pytest

from fsdptoys.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.parallel import DDPConfig, ParallelConfig, ToyDDPConfig, ToyZero1Config, ToyZero2Config, ToyZero3Config
from fsdptoys.parallel.precision import DType
from fsdptoys.plan.switches import validate_switches
from fsdptoys.toys.owners import Evenness
from scripts.parity import train_all
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config, tiny_model

MODELS = {"llama": tiny_model(), "tied": tiny_model(tie_embeddings=True), **{k: TINY[k] for k in ("gpt2", "qwen3_moe")}}
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1)
EVERYTHING = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.selective, chunk_loss=True, chunk_tokens="20", optimizer_offload=True
)


def pairs(ranks: int) -> dict[str, tuple[ParallelConfig, ParallelConfig, dict[str, Any]]]:
    """Label → a native strategy, the toy that must equal it, and what both have in common."""
    default = {"deterministic": False, "steps": 2}
    made: dict[str, tuple[ParallelConfig, ParallelConfig, dict[str, Any]]] = {}
    for name, model in MODELS.items():
        made[f"ddp {name}"] = (DDPConfig(), ToyDDPConfig(), {"model": model, **default})
    half = {"param_dtype": DType.bfloat16}
    made["ddp deterministic"] = (DDPConfig(), ToyDDPConfig(), {"steps": 2, "memory": CHECKPOINTED})
    made["ddp bf16"] = (DDPConfig(**half), ToyDDPConfig(**half), {"memory": EVERYTHING, "eval_every": 1, **default})
    for toy in (ToyZero1Config, ToyZero2Config):
        made[f"{toy.name} deterministic"] = (DDPConfig(), toy(), {"steps": 2, "tie_embeddings": True})
        # Small buckets would be added up in another order over four ranks.
        alike = {**default, "grad_accum": 1, "model": MODELS["gpt2"]}
        if ranks < 4 or toy is ToyZero1Config:
            made[f"{toy.name} default"] = (DDPConfig(), toy(), alike)
    three = {"steps": 2, "tie_embeddings": True, "memory": CHECKPOINTED, "eval_every": 1}
    made["toy_zero3 deterministic"] = (DDPConfig(), ToyZero3Config(evenness=Evenness.unit), three)
    if ranks < 4:
        alike = {**default, "grad_accum": 1}
        made["toy_zero3 default"] = (DDPConfig(), ToyZero3Config(), {**alike, "model": MODELS["qwen3_moe"]})
        made["toy_zero3 alone"] = (DDPConfig(), ToyZero3Config(prefetch=False), {**alike, "model": MODELS["gpt2"]})
    made["toy_zero1 bf16"] = (DDPConfig(**half), ToyZero1Config(**half), {**default, "memory": CHECKPOINTED})
    return made


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_toys_train_in_the_bits_of_their_native_counterparts(ranks: int) -> None:
    """Oracle: the native strategy at the same world size, on every family, with accumulation and clipping."""
    made = pairs(ranks)
    configs = [make_config(each, ranks, **common) for *both, common in made.values() for each in both]
    outcomes = run_ranks(ranks, train_all, configs)[0]
    differing = [label for label, native, toy in zip(made, outcomes[::2], outcomes[1::2], strict=True) if native != toy]
    assert differing == []


def test_the_planner_says_in_one_sentence_that_it_does_not_know_a_toy() -> None:
    """Oracle: the sentence; a prediction of the wrong strategy would be worse than none."""
    with pytest.raises(ConfigError, match="parallel=toy_ddp cannot be predicted; set parallel=ddp"):
        validate_switches(compose_config(["parallel=toy_ddp"]), 2, "cpu")
