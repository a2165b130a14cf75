"""Toys compared with their native counterparts: losses, norms and parameters, bitwise if the sums
are the same.

The toys that share sequences or split experts are rows of ``test_context.py`` and
``test_expert_parallelism.py``.
"""

from typing import Any

import pytest

from fsdptoys.cli.plan import plan_command
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
)
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType, ReduceDType
from fsdptoys.toys.partition import Evenness
from tests.harness.run_tables import Pair, Pairs, levels, trained_rows
from tests.harness.tiny import FAMILIES, make_config, tiny_model

MODELS = {
    "tied": tiny_model(tie_embeddings=True),
    **{
        name: FAMILIES[name]
        for name in ("llama", "mistral", "qwen2", "gpt2", "qwen3_moe")
    },
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

Counterparts = tuple[ParallelConfig, ParallelConfig, dict[str, Any]]
"""A native strategy, the toy that must equal it, and their settings."""


def pairs_on(ranks: int) -> dict[str, Counterparts]:
    """Return pairs that add in the same order; over four ranks that of small buckets differs."""
    half = {"param_dtype": DType.bfloat16}
    tied = {**SMALL, "tie_embeddings": True}
    evaluated = {"memory": CHECKPOINTED, "eval_every": 2, "eval_batches": 1}
    pairs: dict[str, Counterparts] = {
        f"toy_ddp {name}": (DDPConfig(), ToyDDPConfig(), {"model": model, **DEFAULT})
        for name, model in MODELS.items()
    }
    pairs |= {
        "toy_ddp without overlap": (
            DDPConfig(),
            ToyDDPConfig(overlap=False),
            {**DEFAULT, **GPT2},
        ),
        "toy_ddp deterministic": (
            DDPConfig(),
            ToyDDPConfig(),
            {**SMALL, "memory": CHECKPOINTED},
        ),
        "toy_ddp reduced in bf16": (
            DDPConfig(reduce_dtype=ReduceDType.bfloat16),
            ToyDDPConfig(reduce_dtype=ReduceDType.bfloat16),
            DEFAULT,
        ),
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
            "toy_zero3": (
                DDPConfig(),
                ToyZero3Config(),
                {**ONCE, "model": MODELS["qwen3_moe"]},
            ),
            "toy_zero3 alone": (
                DDPConfig(),
                ToyZero3Config(prefetch=False),
                {**ONCE, **GPT2},
            ),
        }
    pairs |= {
        f"toy_fsdp {name}": (
            FSDP2Config(),
            ToyFSDPConfig(),
            {"model": model, **DEFAULT},
        )
        for name, model in MODELS.items()
    }
    if ranks == 4:
        pairs["toy_fsdp replicas"] = (
            FSDP2Config(),
            ToyFSDPConfig(),
            {**DEFAULT, "fsdp_size": 2},
        )
    if ranks == 2:
        freed = {
            "wrap": Wrap.block_attn_mlp,
            "reshard_after_forward": ReshardAfterForward.always,
        }
        ahead = {
            "reshard_after_forward": ReshardAfterForward.never,
            "forward_prefetch": 2,
            "backward_prefetch": 2,
        }
        offloaded = {"memory": MemoryConfig(optimizer_offload=True)}
        for label, settings, options in (
            # The evaluation after the last step leaves units gathered.
            ("deterministic", {}, {**SMALL, "eval_every": 2, "eval_batches": 1}),
            ("bf16", half, DEFAULT),
            ("parts, freed, recomputed", freed, {**SMALL, "memory": CHECKPOINTED}),
            (
                "not freed, prefetched",
                ahead,
                {**SMALL, "memory": MemoryConfig(chunk_loss=True)},
            ),
            ("states offloaded", {}, {**SMALL, **offloaded}),
        ):
            pairs[f"toy_fsdp {label}"] = (
                FSDP2Config(**settings),
                ToyFSDPConfig(**settings),
                options,
            )
    return pairs


PAIRS: dict[str, Pair] = {
    f"{label} on {ranks}": (
        (ranks, make_config(toy, ranks, **options)),
        (ranks, make_config(native, ranks, **options)),
    )
    for ranks in (1, 2, 4)
    for label, (native, toy, options) in pairs_on(ranks).items()
}
SHORT = {
    *(label for label in PAIRS if label.endswith("on 2") and "tied" not in label),
    "toy_zero1 deterministic on 4",
    "toy_zero3 deterministic on 4",
    "toy_fsdp replicas on 4",
}
trained = trained_rows(PAIRS, argument="label")


@pytest.mark.parametrize("label", levels(PAIRS, SHORT))
def test_toys_match_their_native_counterparts_bitwise(
    label: str, trained: Pairs
) -> None:
    """Oracle: the native strategy at the same world size, on every family, with accumulation and
    clipping."""
    toy, native = trained[label]
    assert toy == native


PREDICTED = {
    "parallel=toy_ddp": "ddp",
    "parallel=toy_fsdp": "fsdp2",
    "search parallel=toy_fsdp": "fsdp2",
}


@pytest.mark.parametrize("command", PREDICTED)
def test_planner_refuses_toys(command: str) -> None:
    """Oracle: the expected message; a prediction of the wrong strategy would be worse than none."""
    sentence = (
        r"^parallel=toy_\w+ cannot be predicted; set "
        f"parallel={PREDICTED[command]}, which is closest"
    )
    with pytest.raises(ConfigError, match=sentence):
        plan_command([*command.split(), "plan.hardware=h100"])
