"""Optimizer offload: neither schedules nor checkpoints change a bit, under any strategy."""

from dataclasses import dataclass, field, replace
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
from fsdptoys.parallel.fsdp import TORCH, ReshardAfterForward
from fsdptoys.parallel.fsdp2 import FSDP2, gathering_stream
from fsdptoys.parallel.precision import DType
from scripts.ranks import run_ranks
from tests.memory.offloaded import interrupted, take_steps, train_all, trainer
from tests.parallel.runs import TINY, WRAPS, make_config, tiny_model

SERIAL, PIPELINED, LAZY = "serial", "pipelined", "lazy"
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
BFLOAT16 = {"offload_state_dtype": OffloadStateDType.bfloat16}

SMALL = replace(tiny_model(), n_layers=2)

STRATEGIES: dict[str, tuple[ParallelConfig, int, int]] = {
    "single": (SingleConfig(), 1, -1),
    "ddp": (DDPConfig(), 2, -1),
    "fsdp1": (FSDP1Config(), 2, -1),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), 2, -1),
    "fsdp2": (FSDP2Config(), 2, -1),
    "hsdp2": (FSDP2Config(), 4, 2),
}
HSDP2_RUNS = pytest.mark.skipif(TORCH < (2, 8), reason="HSDP on a CPU came with torch 2.8")
STRATEGY_NAMES = [pytest.param(name, marks=HSDP2_RUNS) if name == "hsdp2" else name for name in STRATEGIES]


def schedules(parallel: ParallelConfig) -> list[str]:
    return [SERIAL, PIPELINED, *([LAZY] if parallel.defers_updates else [])]


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_every_schedule_matches_no_offload_bitwise(name: str) -> None:
    """Oracle: the plain optimizer over 3 and 5 steps (4 ranks: 3) with clipping, a cosine, two micro-batches."""
    parallel, ranks, fsdp_size = STRATEGIES[name]
    options: dict[str, Any] = {"fsdp_size": fsdp_size, "seq_len": 8, "batch_size": 1, "model": SMALL}
    for deterministic, steps in ((True, 3), (False, 5 if ranks < 4 else 3)):

        def config(deterministic: bool = deterministic, steps: int = steps) -> Config:
            return make_config(parallel, ranks, deterministic=deterministic, steps=steps, **options)

        rows = [(config(), how, {}) for how in (None, *schedules(parallel))]
        plain, *offloaded = run_ranks(ranks, train_all, rows)[0]
        equal = {how: got == plain for how, got in zip(schedules(parallel), offloaded, strict=True)}
        assert equal == dict.fromkeys(equal, True)


@dataclass
class Variant:
    """A run with offload, and the equal run without it."""

    config: Config
    oracle: str
    how: str = LAZY
    memory: dict[str, Any] = field(default_factory=dict)


def variants() -> tuple[dict[str, Config], dict[str, Variant]]:
    """Settings that interact with the hooks or the buckets, and the configurations without offload to compare with.

    Any two values of wrapping, resharding and prefetching meet.
    """

    def config(parallel: ParallelConfig, **options: Any) -> Config:
        return make_config(parallel, 2, steps=3, seq_len=8, batch_size=1, **{"model": SMALL, **options})

    bf16, tied = {"param_dtype": DType.bfloat16}, tiny_model(tie_embeddings=True)
    sgd = {nesterov: SGDConfig(lr=0.1, nesterov=nesterov, weight_decay_on=WeightDecayOn.all) for nesterov in (0, 1)}
    fsdp2 = FSDP2Config()
    plain = {
        "": config(fsdp2),
        "bf16": config(FSDP2Config(**bf16)),
        "tied": config(FSDP2Config(**bf16), model=tied),
        "ddp": config(DDPConfig()),
        "no clipping": config(fsdp2, max_grad_norm=None),
    }
    made: dict[str, Variant] = {}
    for (first, (label, wrap)), (second, reshard) in product(enumerate(WRAPS.items()), enumerate(ReshardAfterForward)):
        ahead = (0, 2)[(first + second) % 2]
        parallel = FSDP2Config(reshard_after_forward=reshard, forward_prefetch=ahead, **wrap, **bf16)
        made[f"{label} {reshard.value} {ahead}"] = Variant(config(parallel, memory=CHECKPOINTED), "bf16")
    made["ddp tied"] = Variant(config(DDPConfig(**bf16), model=tied), "tied")
    made["fsdp2 tied"] = Variant(config(FSDP2Config(**bf16), model=tied), "tied")
    made["ddp checkpointing"] = Variant(config(DDPConfig(), memory=CHECKPOINTED), "ddp")
    for how in (PIPELINED, LAZY):
        for share in (0.1, 0.5):
            made[f"{share} {how}"] = Variant(config(fsdp2), "", how, {"offload_fraction": share})
        made[f"no clipping {how}"] = Variant(config(fsdp2, max_grad_norm=None), "no clipping", how)
        for nesterov, optim in sgd.items():
            plain[f"sgd {nesterov}"] = config(fsdp2, optim=optim)
            made[f"sgd {nesterov} {how}"] = Variant(config(fsdp2, optim=optim), f"sgd {nesterov}", how)
    for family in ("qwen3_moe", "gpt2"):
        plain[family] = config(fsdp2, model=TINY[family])
        made[family] = Variant(config(fsdp2, model=TINY[family]), family)
    for implementation in Implementation:
        options = {"optim": AdamWConfig(lr=1e-2, implementation=implementation), "deterministic": False}
        plain[implementation.value] = config(fsdp2, **options)
        made[implementation.value] = Variant(config(fsdp2, **options), implementation.value)
    return plain, made


@pytest.mark.usefixtures("unmeasured")
def test_every_setting_matches_no_offload_bitwise() -> None:
    """Oracle: the plain optimizer under the same strategy and model."""
    plain, made = variants()
    rows: list[tuple[Config, str | None, dict[str, Any]]] = [(config, None, {}) for config in plain.values()]
    rows += [(variant.config, variant.how, variant.memory) for variant in made.values()]
    outcomes = run_ranks(2, train_all, rows)[0]
    oracles = dict(zip(plain, outcomes, strict=False))
    got = dict(zip(made, outcomes[len(plain) :], strict=True))
    assert [name for name, variant in made.items() if got[name] != oracles[variant.oracle]] == []


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("name", "optim"),
    [
        *(pytest.param(name, "adamw", marks=[HSDP2_RUNS] if name == "hsdp2" else []) for name in STRATEGIES),
        ("single", "sgd"),
        ("fsdp2", "sgd"),
    ],
)
def test_resuming_with_or_without_offload_is_bitwise_equal(name: str, optim: str) -> None:
    """Oracle: the uninterrupted run with the plain optimizer; through torch's distributed checkpoint."""
    parallel, ranks, fsdp_size = STRATEGIES[name]
    how = schedules(parallel)[-1]
    options: dict[str, Any] = {"fsdp_size": fsdp_size, "steps": 4, "seq_len": 8, "model": SMALL}
    if optim == "sgd":
        options["optim"] = SGDConfig(lr=0.1, weight_decay_on=WeightDecayOn.all)
    pairs = [(how, how), (None, how), (how, None)]
    rows = [(make_config(parallel, ranks, **options), *pair) for pair in pairs]
    whole = run_ranks(ranks, train_all, [(make_config(parallel, ranks, **options), None, {})])[0][0]
    assert run_ranks(ranks, interrupted, rows, {})[0] == [whole] * len(pairs)


@pytest.mark.usefixtures("unmeasured")
def test_bfloat16_states_are_close_reproducible_and_resumable() -> None:
    """Oracles: float32 states to 1%; the same run again and the uninterrupted run bitwise."""

    def config() -> Config:
        return make_config(FSDP2Config(), 2, steps=20, seq_len=8, model=SMALL, deterministic=False)

    rows = [(config(), None, {}), (config(), LAZY, BFLOAT16), (config(), PIPELINED, BFLOAT16)]
    plain, lazy, pipelined = run_ranks(2, train_all, rows)[0]
    assert lazy == pipelined
    assert lazy.parameters != plain.parameters
    assert lazy.losses == pytest.approx(plain.losses, rel=1e-2)
    assert run_ranks(2, interrupted, [(config(), LAZY, LAZY)], BFLOAT16)[0] == [lazy]


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
