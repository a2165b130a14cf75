"""Optimizer offload: no schedule changes a bit, under any strategy; ``test_state.py`` resumes such runs."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.memory.bucketed_optimizer import BucketedOptimizer
from fsdptoys.memory.config import OffloadSchedule, OffloadStateDType
from fsdptoys.memory.optimizer_offload import resolve_schedule
from fsdptoys.optim import AdamWConfig, Implementation, SGDConfig, WeightDecayOn
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.fsdp import ReshardAfterForward
from fsdptoys.parallel.fsdp2 import FSDP2, gathering_stream
from fsdptoys.parallel.precision import DType
from scripts.ranks import run_ranks
from tests.memory.offloaded import offloaded, take_steps, train_all, trainer
from tests.parallel.groups import Pair, Pairs, levels, trained_rows
from tests.parallel.runs import TINY, WRAPS, make_config, supported, tiny_model

SERIAL, PIPELINED, LAZY = "serial", "pipelined", "lazy"
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
BFLOAT16 = {"offload_state_dtype": OffloadStateDType.bfloat16}

SMALL = replace(tiny_model(), n_layers=2)

FSDP2_ALONE = FSDP2Config()
STRATEGIES: dict[str, tuple[ParallelConfig, int, int]] = {
    "single": (SingleConfig(), 1, -1),
    "ddp": (DDPConfig(), 2, -1),
    "fsdp1": (FSDP1Config(), 2, -1),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), 2, -1),
    "fsdp2": (FSDP2_ALONE, 2, -1),
    "hsdp2": (FSDP2Config(), 4, 2),
}


def schedules(parallel: ParallelConfig) -> list[str]:
    return [SERIAL, PIPELINED, *([LAZY] if parallel.defers_updates else [])]


def strategies() -> dict[str, Pair]:
    """Return every schedule under every strategy, over some steps with clipping, a cosine, two micro-batches."""
    rows = {}
    for name, (parallel, ranks, fsdp_size) in STRATEGIES.items():
        options: dict[str, Any] = {"fsdp_size": fsdp_size, "seq_len": 8, "batch_size": 1, "model": SMALL}
        for mode, steps in (("deterministic", 3), ("default", 5 if ranks < 4 else 3)):
            config = make_config(parallel, ranks, deterministic=mode == "deterministic", steps=steps, **options)
            rows |= {f"{name} {how}, {mode}": offloaded(ranks, config, how) for how in schedules(parallel)}
    return rows


def settings() -> dict[str, Pair]:
    """Return settings that interact with hooks or buckets; any two of wrapping, resharding, prefetching meet."""

    def row(parallel: ParallelConfig, how: str = LAZY, fraction: float = 1.0, **options: Any) -> Pair:
        config = make_config(parallel, 2, steps=3, seq_len=8, batch_size=1, **{"model": SMALL, **options})
        return offloaded(2, config, how, **({} if fraction == 1 else {"offload_fraction": fraction}))

    bf16: dict[str, Any] = {"param_dtype": DType.bfloat16}
    tied = tiny_model(tie_embeddings=True)
    rows: dict[str, Pair] = {}
    for (first, (label, wrap)), (second, reshard) in product(enumerate(WRAPS.items()), enumerate(ReshardAfterForward)):
        ahead = (0, 2)[(first + second) % 2]
        parallel = FSDP2Config(reshard_after_forward=reshard, forward_prefetch=ahead, **wrap, **bf16)
        rows[f"{label} {reshard.value} {ahead}"] = row(parallel, memory=CHECKPOINTED)
    rows["ddp tied"] = row(DDPConfig(**bf16), model=tied)
    rows["fsdp2 tied"] = row(FSDP2Config(**bf16), model=tied)
    rows["ddp checkpointing"] = row(DDPConfig(), memory=CHECKPOINTED)
    for how in (PIPELINED, LAZY):
        rows |= {f"{share} {how}": row(FSDP2_ALONE, how, share) for share in (0.1, 0.5)}
        rows[f"no clipping {how}"] = row(FSDP2_ALONE, how, max_grad_norm=None)
        for nesterov in (False, True):
            sgd = SGDConfig(lr=0.1, nesterov=nesterov, weight_decay_on=WeightDecayOn.all)
            rows[f"sgd nesterov={nesterov} {how}"] = row(FSDP2_ALONE, how, optim=sgd)
    rows |= {family: row(FSDP2_ALONE, model=TINY[family]) for family in ("qwen3_moe", "gpt2")}
    for implementation in Implementation:
        adamw = AdamWConfig(lr=1e-2, implementation=implementation)
        rows[implementation.value] = row(FSDP2_ALONE, optim=adamw, deterministic=False)
    return rows


ROWS = supported(strategies() | settings())
SHORT = {
    *("single lazy, deterministic", "ddp pipelined, default", "fsdp1 serial, default", "fsdp1 flat pipelined, default"),
    *("fsdp2 lazy, default", "parts always 0", "classes never 0", "ddp tied", "0.5 pipelined", "0.1 lazy"),
    *("sgd nesterov=True lazy", "sgd nesterov=False pipelined", "qwen3_moe", "fused"),
}
trained = trained_rows(ROWS, train_all)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_every_schedule_and_setting_matches_no_offload_bitwise(row: str, trained: Pairs) -> None:
    """Oracle: the plain optimizer under the same strategy and model."""
    found, plain = trained[row]
    assert found == plain


@pytest.mark.usefixtures("unmeasured")
def test_bfloat16_states_are_close_to_float32_and_independent_of_the_schedule() -> None:
    """Oracle: float32 states to 1%."""
    config = make_config(FSDP2_ALONE, 2, steps=10, seq_len=8, model=SMALL, deterministic=False)
    rows = [(config, None, {}), (config, LAZY, BFLOAT16), (config, PIPELINED, BFLOAT16)]
    plain, lazy, pipelined = run_ranks(2, train_all, rows)[0]
    assert lazy == pipelined
    assert lazy.parameters != plain.parameters
    assert lazy.losses == pytest.approx(plain.losses, rel=1e-2)


def test_auto_schedule_holds_no_gradients_between_steps() -> None:
    """Oracle: ``pipelined`` under every strategy; FSDP1 refuses ``lazy`` by itself."""
    fsdp1 = FSDP1Config()
    for parallel in (SingleConfig(), DDPConfig(), fsdp1, FSDP2Config()):
        chosen = resolve_schedule(OffloadSchedule.auto, parallel.name, parallel.defers_updates)
        assert chosen is OffloadSchedule.pipelined
    with pytest.raises(ConfigError, match=r"offload_schedule=lazy .* set memory.offload_schedule=pipelined"):
        resolve_schedule(OffloadSchedule.lazy, fsdp1.name, fsdp1.defers_updates)


def gathered_events(config: Config) -> tuple[int, list[int], bool]:
    """Number of units, and which of them waited for an event in the forward after a lazy step."""
    made = trainer(config, LAZY)
    assert isinstance(made.strategy, FSDP2)
    modules = [module for module, _ in made.strategy.units()]
    waited: list[int] = []
    take_steps(made, 1, 1)
    assert isinstance(made.optimizer, BucketedOptimizer)
    made.optimizer._gather_after = lambda module, event: waited.append(modules.index(module))
    made.optimizer.executor._transfers.mark = object  # type: ignore[attr-defined]
    take_steps(made, 2, 2)
    take_steps(made, 3, 3)
    return len(modules), waited, all(gathering_stream(module) is not None for module in modules)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("ahead", [0, 2])
def test_every_gather_of_fsdp2_waits_for_the_optimizer_step_of_its_parameters(ahead: int) -> None:
    """Oracle: unit i gathers up to unit i + ahead, so the last ones find nothing new to wait for."""
    config = make_config(FSDP2Config(forward_prefetch=ahead), 2, steps=3, grad_accum=1)
    count, waited, stream_found = run_ranks(2, gathered_events, config)[0]
    assert waited == [*range(count - ahead)] * 2
    assert stream_found
