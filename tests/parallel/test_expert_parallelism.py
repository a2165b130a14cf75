"""Experts split over ranks compute the training of one process, and their shards are read and
written exactly."""

from itertools import product
from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.models.moe import Router
from fsdptoys.optim import AdamWConfig, MuonConfig, OptimStateDType
from fsdptoys.parallel import FSDP2Config, SingleConfig, ToyEPConfig
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.profiler.collectives import Call, CollectiveTrace
from fsdptoys.train.trainer import Trainer
from tests.harness import outcomes
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pair, Pairs, Row, levels, trained_rows
from tests.harness.tiny import (
    EXPERTS,
    TINY,
    WITH_BLOCKS,
    make_config,
    supported,
    with_sizes,
)
from tests.parallel.numeric_outcomes import (
    SGD,
    Outcome,
    assert_close,
    distance,
    only_the_first,
    split,
    train_all,
)

MODELS: dict[str, ModelConfig] = {
    "qwen3_moe": with_sizes(TINY["qwen3_moe"], **EXPERTS),
    "llama4": with_sizes(TINY["llama4"], n_layers=2, **EXPERTS),
}


def single(world_size: int, **options: Any) -> Config:
    dtype = options.pop("param_dtype", DType.float32)
    options = {"optim": SGD, "steps": 2, "deterministic": False, **options}
    return make_config(
        SingleConfig(simulated_ranks=world_size, param_dtype=dtype), 1, **options
    )


FULL, SELECTIVE = (
    MemoryConfig(gradient_checkpointing=mode)
    for mode in list(GradientCheckpointing)[1:]
)
BY_SGD: dict[str, Any] = {"optim": SGD, "steps": 2, "deterministic": False}
TOY = ToyEPConfig()
MOE, LLAMA4 = ({"model": model, **BY_SGD} for model in MODELS.values())
ROWS = {
    "two ranks, chunked loss": Row(
        FSDP2Config(),
        2,
        {"ep_size": 2},
        {**MOE, "memory": MemoryConfig(chunk_loss=True, chunk_tokens="8")},
    ),
    "toy": Row(TOY, 2, {"ep_size": 2}, MOE),
    "toy recomputed": Row(TOY, 4, {"ep_size": 2, "memory": FULL}, MOE),
    "toy llama4": Row(TOY, 4, {"ep_size": 2}, LLAMA4),
    "toy clipped by less": Row(
        TOY, 4, {"ep_size": 2}, {**MOE, "max_grad_norm": 1e-3, "deterministic": True}
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "selective": {"ep_size": 2, "memory": SELECTIVE},
    "one expert a rank": {"ep_size": 4},
    "full": {"ep_size": 2, "memory": FULL, "deterministic": True},
    "hsdp2": {"ep_size": 2, "fsdp_size": 2},
}
for name, (label, layout) in product(MODELS, LAYOUTS.items()):
    ROWS[f"{name} {label}"] = Row(
        FSDP2Config(), 4, layout, {"model": MODELS[name], **BY_SGD}
    )
ROUGH = {
    "muon": MuonConfig(lr=1e-2),
    "int8": AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.int8),
}
"""Optimizers whose matrices or blocks are split over both views of the ranks."""
for (name, optim), ep_size in product(ROUGH.items(), (2, 4)):
    model = with_sizes(WITH_BLOCKS["qwen3_moe"], n_experts=4)
    ROWS[f"{name} {ep_size}"] = Row(
        FSDP2Config(),
        4,
        {"ep_size": ep_size},
        {"model": model, "optim": optim, "steps": 2},
    )
ROWS = supported(ROWS)
SHORT = {"two ranks, chunked loss", "toy", "qwen3_moe hsdp2", "muon 2"}


trained = trained_rows(ROWS, train_all)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_split_experts_train_as_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process: losses, norms, every gradient and parameter; accumulation, ragged
    padding, balancing."""
    assert_close(*trained[row], 1e-4 if row.split()[0] in ROUGH else 2e-6)


def train_with_idle_experts(configs: list[Config]) -> list[Outcome] | None:
    Router.forward = only_the_first  # type: ignore[method-assign]
    return train_all(configs)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_moe", 2),
        pytest.param("qwen3_moe", 4, marks=pytest.mark.extended),
        pytest.param("llama4", 4, marks=pytest.mark.extended),
    ],
)
def test_ranks_whose_experts_get_no_token_have_zero_gradients(
    family: str, ranks: int
) -> None:
    """Oracle: one process, with every token sent to expert 0: ranks receive all rows, or none.

    ``test_experts.py`` compares the bits of strategies that split no experts.
    """
    options: dict[str, Any] = {"model": with_sizes(MODELS[family], top_k=1)}
    (expected,) = run_ranks(1, train_with_idle_experts, [single(ranks, **options)])[0]
    rows = [split(ranks, ep_size, **options) for ep_size in (2, 4) if ep_size <= ranks]
    for outcome in run_ranks(ranks, train_with_idle_experts, rows)[0]:
        assert_close(outcome, expected)
        stacks = [grad for name, grad in outcome.grads.items() if ".experts." in name]
        assert stacks and all(grad[0].any() and not grad[1:].any() for grad in stacks)


@pytest.mark.usefixtures("unmeasured")
def test_bf16_is_as_near_to_float32_as_one_process_in_bf16() -> None:
    """Oracle: one process in float32, and its distance to one process in bf16; the first step's
    gradients."""
    options: dict[str, Any] = {"model": MODELS["qwen3_moe"], "steps": 1}
    rows = [single(2, **options), single(2, **options, param_dtype=DType.bfloat16)]
    exact, rounded = run_ranks(1, train_all, rows)[0]
    (outcome,) = run_ranks(
        2,
        train_all,
        [split(2, 2, **options, parallel=FSDP2Config(param_dtype=DType.bfloat16))],
    )[0]
    assert outcome.losses == pytest.approx(exact.losses, rel=1e-3)
    for name, grad in exact.grads.items():
        assert (
            distance(outcome.grads[name], grad)
            < 1.5 * distance(rounded.grads[name], grad) + 1e-3
        ), name


IN_BACKWARD: dict[str, Any] = {
    "grad_accum": 1,
    "max_grad_norm": None,
    "skip_nonfinite": False,
}
ALIKE: dict[str, dict[str, Any]] = {
    "parts": {"parallel": FSDP2Config(wrap=Wrap.block_attn_mlp, backward_prefetch=2)},
    "classes": {
        "parallel": FSDP2Config(
            wrap_classes=["MoE", "Attention"],
            reshard_after_forward=ReshardAfterForward.never,
        )
    },
    "size": {
        "parallel": FSDP2Config(
            min_params=1500,
            forward_prefetch=2,
            reshard_after_forward=ReshardAfterForward.always,
        )
    },
    "checkpointing": {
        "memory": MemoryConfig(
            gradient_checkpointing=GradientCheckpointing.full,
            checkpointing_start_index=1,
        )
    },
    "selective": {"memory": SELECTIVE},
    "cpu offload": {"memory": MemoryConfig(cpu_offload=True)},
    "overlapped": {
        "memory": MemoryConfig(
            cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped
        )
    },
    "optimizer offload": {"memory": MemoryConfig(optimizer_offload=True)},
    "in the backward": {
        **IN_BACKWARD,
        "memory": MemoryConfig(optimizer_in_backward=True),
    },
}
"""Settings that must not change a bit of a run with split experts."""


MUST_EQUAL: dict[str, Any] = {
    "model": MODELS["qwen3_moe"],
    "deterministic": True,
    "optim": AdamWConfig(lr=1e-2),
}
PAIRS: dict[str, Pair] = {
    setting: (
        (4, split(4, 2, **MUST_EQUAL | options)),
        (
            4,
            split(
                4,
                2,
                **MUST_EQUAL | (IN_BACKWARD if setting == "in the backward" else {}),
            ),
        ),
    )
    for setting, options in ALIKE.items()
}
alike = trained_rows(PAIRS, outcomes.train_all, argument="setting")


@pytest.mark.parametrize("setting", levels(PAIRS, {"overlapped", "in the backward"}))
def test_memory_switches_and_units_do_not_change_a_bit_of_split_experts(
    setting: str, alike: Pairs
) -> None:
    """Oracle: the same layout without them, in the deterministic mode."""
    result, expected = alike[setting]
    assert result == expected


def calls_of_a_step(config: Config) -> list[Call]:
    calls: list[Call] = []
    trainer = Trainer(config)
    trace = CollectiveTrace(1, trainer.strategy.model, {}, calls.extend)
    trainer.on_phase = trace.enter
    trainer.around_step = trace.around
    trainer.train()
    return calls


@pytest.mark.usefixtures("unmeasured")
def test_traced_exchanges_count_the_rows_that_leave_a_rank() -> None:
    """Oracle: by hand: pairs times width, weights and counts; what ranks send is what they receive,
    and returns."""
    model = MODELS["qwen3_moe"]
    config = split(2, 2, model=model, steps=1, grad_accum=1, batch_size=1, seq_len=16)
    by_rank = run_ranks(2, calls_of_a_step, config)
    pairs = 16 * 2
    layers = model.n_layers
    for calls in by_rank:
        exchanges = [call for call in calls if call.collective == "all_to_all"]
        assert {call.site for call in exchanges} == {
            "expert_parallel._route",
            "expert_parallel.exchange",
        }
        counts, rows, weights, results, *_ = exchanges
        assert [call.phase for call in exchanges] == ["forward"] * 4 * layers + [
            "backward"
        ] * 3 * layers
        assert (counts.gives_bytes, rows.gives_bytes, weights.gives_bytes) == (
            4 * 8,
            pairs * model.dim * 4,
            pairs * 4,
        )
        assert (results.gives_bytes, results.gets_bytes) == (
            rows.gets_bytes,
            rows.gives_bytes,
        )
        assert rows.sends_bytes == model.dim * weights.sends_bytes
    one, other = (
        [call for call in calls if call.collective == "all_to_all"] for calls in by_rank
    )
    for call, peer_call in zip(one, other, strict=True):
        if call.site == "expert_parallel.exchange":
            assert (
                call.gets_bytes
                == call.gives_bytes - call.sends_bytes + peer_call.sends_bytes
            )
