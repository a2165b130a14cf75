"""Toys compared with their native counterparts: losses, norms and parameters, bitwise if the sums
are the same.

The toys that share sequences or split experts are rows of ``test_context.py`` and
``test_expert_parallelism.py``.
"""

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.cli.plan import plan_command
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP2Config,
    ParallelConfig,
    ToyDDPConfig,
    ToyFSDPConfig,
    ToyZero1Config,
    ToyZero2Config,
    ToyZero3Config,
    full_tensors,
    host_copy,
)
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.toys.partition import Evenness
from fsdptoys.train.distributed import deterministic_kernels
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import is_dtensor, local_bounds
from tests.harness.outcomes import Outcome, hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Run, levels, selected, train_runs
from tests.harness.tiny import FAMILIES, make_config, tiny_model

MODELS = {
    "tied": tiny_model(tie_embeddings=True),
    **{name: FAMILIES[name] for name in ("llama", "gpt2", "qwen3_moe")},
}
CHECKPOINTED = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1
)
EVERYTHING = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.selective,
    chunk_loss=True,
    chunk_tokens="20",
    optimizer_offload=True,
)
SMALL: dict[str, Any] = {"steps": 2, "seq_len": 8, "batch_size": 1}
DEFAULT = {**SMALL, "deterministic": False}
ONCE = {**DEFAULT, "grad_accum": 1}
GPT2 = {"model": MODELS["gpt2"]}

Pair = tuple[ParallelConfig, ParallelConfig, dict[str, Any]]
"""A native strategy, the toy that must equal it, and their settings."""


def pairs_on(ranks: int) -> dict[str, Pair]:
    """Return the pairs whose sums have the same order; over four ranks that of small buckets
    differs."""
    half = {"param_dtype": DType.bfloat16}
    tied = {**SMALL, "tie_embeddings": True}
    evaluated = {"memory": CHECKPOINTED, "eval_every": 2, "eval_batches": 1}
    pairs: dict[str, Pair] = {
        f"toy_ddp {name}": (DDPConfig(), ToyDDPConfig(), {"model": model, **DEFAULT})
        for name, model in MODELS.items()
    }
    pairs |= {
        "toy_ddp without overlap": (DDPConfig(), ToyDDPConfig(overlap=False), {**DEFAULT, **GPT2}),
        "toy_ddp deterministic": (DDPConfig(), ToyDDPConfig(), {**SMALL, "memory": CHECKPOINTED}),
        "toy_ddp bf16": (
            DDPConfig(**half),
            ToyDDPConfig(**half),
            {**DEFAULT, "memory": EVERYTHING},
        ),
        "toy_zero1": (DDPConfig(), ToyZero1Config(), {**ONCE, **GPT2}),
        "toy_zero1 without overlap": (
            DDPConfig(),
            ToyZero1Config(overlap=False),
            {**DEFAULT, **GPT2},
        ),
        "toy_zero1 deterministic": (DDPConfig(), ToyZero1Config(), tied),
        "toy_zero1 bf16": (
            DDPConfig(**half),
            ToyZero1Config(**half),
            {**DEFAULT, "memory": CHECKPOINTED},
        ),
        "toy_zero2 deterministic": (DDPConfig(), ToyZero2Config(), tied),
        "toy_zero3 deterministic": (
            DDPConfig(),
            ToyZero3Config(evenness=Evenness.unit),
            {**tied, **evaluated},
        ),
    }
    if ranks < 4:
        pairs |= {
            "toy_zero2": (DDPConfig(), ToyZero2Config(), {**ONCE, **GPT2}),
            "toy_zero2 without overlap": (
                DDPConfig(),
                ToyZero2Config(overlap=False),
                {**ONCE, **GPT2},
            ),
            "toy_zero3": (DDPConfig(), ToyZero3Config(), {**ONCE, "model": MODELS["qwen3_moe"]}),
            "toy_zero3 alone": (DDPConfig(), ToyZero3Config(prefetch=False), {**ONCE, **GPT2}),
        }
    pairs |= {
        f"toy_fsdp {name}": (FSDP2Config(), ToyFSDPConfig(), {"model": model, **DEFAULT})
        for name, model in MODELS.items()
    }
    if ranks == 4:
        pairs["toy_fsdp replicas"] = (FSDP2Config(), ToyFSDPConfig(), {**DEFAULT, "fsdp_size": 2})
    if ranks == 2:
        freed = {"wrap": Wrap.block_attn_mlp, "reshard_after_forward": ReshardAfterForward.always}
        ahead = {
            "reshard_after_forward": ReshardAfterForward.never,
            "forward_prefetch": 2,
            "backward_prefetch": 2,
        }
        offloaded = {"memory": MemoryConfig(optimizer_offload=True)}
        for label, settings, options in (
            ("deterministic", {}, SMALL),
            ("bf16", half, DEFAULT),
            ("parts, freed, recomputed", freed, {**SMALL, "memory": CHECKPOINTED}),
            ("not freed, prefetched", ahead, {**SMALL, "memory": MemoryConfig(chunk_loss=True)}),
            ("states offloaded", {}, {**SMALL, **offloaded}),
        ):
            pairs[f"toy_fsdp {label}"] = (
                FSDP2Config(**settings),
                ToyFSDPConfig(**settings),
                options,
            )
    return pairs


PAIRS = {
    f"{label} on {ranks}": (ranks, *pair)
    for ranks in (1, 2, 4)
    for label, pair in pairs_on(ranks).items()
}
SHORT = {
    *(label for label, (ranks, *_) in PAIRS.items() if ranks == 2 and "tied" not in label),
    "toy_zero1 deterministic on 4",
    "toy_zero3 deterministic on 4",
    "toy_fsdp replicas on 4",
}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, tuple[Outcome, Outcome]]:
    """Train the selected pairs."""
    labels = selected(request, "label")
    runs: list[list[Run]] = [[], []]
    for ranks, native, toy, options in map(PAIRS.__getitem__, labels):
        for run, parallel in zip(runs, (native, toy), strict=True):
            run.append((ranks, make_config(parallel, ranks, **options)))
    return dict(zip(labels, zip(*map(train_runs, runs), strict=True), strict=True))


@pytest.mark.parametrize("label", levels(PAIRS, SHORT))
def test_toys_match_their_native_counterparts_bitwise(
    label: str, trained: dict[str, tuple[Outcome, Outcome]]
) -> None:
    """Oracle: the native strategy at the same world size, on every family, with accumulation and
    clipping."""
    native, toy = trained[label]
    assert toy == native


def pass_on(configs: list[Config]) -> tuple[dict[str, str], dict[str, str]]:
    """Return final parameters of one run, and of one resumed under the next strategy after every
    step."""
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
        with closing(trainer.data.batches), deterministic_kernels(True, "cpu"):
            trainer.train_step(last)
            trainer.readings.finish(last)
        trainer.steps_done = last
        facts = trainer.state_dict()
        named = [dict(full_tensors(host_copy(trainer.strategy.state_tensors(trainer.optimizer))))]
        dist.broadcast_object_list(named)
        saved = named[0]  # type: ignore[assignment]
    return hash_parameters(whole), hash_parameters(trainer)


CHAINS: dict[str, list[ParallelConfig]] = {
    "ddp": [
        DDPConfig(),
        ToyZero1Config(),
        ToyZero3Config(),
        ToyZero2Config(),
        ToyDDPConfig(),
        ToyZero3Config(),
    ],
    "fsdp": [FSDP2Config(), ToyFSDPConfig(), FSDP2Config()],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_run_resumes_under_any_other_toy_bitwise(chain: str) -> None:
    """Oracle: the first strategy without interruption; parameters and optimizer states pass from
    one to the next."""
    options = {**SMALL, "steps": len(CHAINS[chain]), "tie_embeddings": True}
    expected, found = run_ranks(
        2, pass_on, [make_config(parallel, 2, **options) for parallel in CHAINS[chain]]
    )[0]
    assert found == expected


def full_hashes(config: Config) -> list[dict[str, str]]:
    """Return parameters before a step and after an evaluation, which has no backward."""
    trainer = Trainer(config)
    before = hash_parameters(trainer)
    trainer.strategy.model.eval()
    with torch.no_grad():
        trainer.strategy.model(torch.zeros(1, 4, dtype=torch.long))
    return [before, hash_parameters(trainer)]


def test_parameters_are_visible_in_full_after_a_forward_without_backward() -> None:
    """Oracle: the parameters before it."""
    before, after = run_ranks(2, full_hashes, make_config(ToyFSDPConfig(), 2, **SMALL))[0]
    assert before == after


PREDICTED = {
    "parallel=toy_ddp": "ddp",
    "parallel=toy_fsdp": "fsdp2",
    "search parallel=toy_fsdp": "fsdp2",
}


@pytest.mark.parametrize("words", PREDICTED)
def test_planner_refuses_toys(words: str) -> None:
    """Oracle: the expected message; a prediction of the wrong strategy would be worse than none."""
    sentence = (
        rf"^parallel=toy_\w+ cannot be predicted; set parallel={PREDICTED[words]}, which is closest"
    )
    with pytest.raises(ConfigError, match=sentence):
        plan_command([*words.split(), "plan.hardware=h100"])
