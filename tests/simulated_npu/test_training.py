"""Training on simulated NPUs equals a CPU bitwise, for all strategies and memory switches, with delayed streams too.

Immediate mode is compared with CPU ranks, delayed mode with immediate mode.
"""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest

from fsdptoys.config.schema import Config, SumDType
from fsdptoys.data import SyntheticConfig
from fsdptoys.memory import GradientCheckpointing, MemoryConfig, OffloadSchedule
from fsdptoys.models import grouped, linear
from fsdptoys.optim import AdamWConfig, Implementation, WeightDecayOn
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    ToyDDPConfig,
    ToyFSDPConfig,
    ToyZero1Config,
    ToyZero2Config,
    ToyZero3Config,
)
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.precision import DType
from scripts.parity import Outcome, train_all
from scripts.ranks import run_ranks
from tests.memory import offloaded
from tests.parallel.runs import PLAIN_KERNELS, TINY, make_config
from tests.simulated_npu.ranks import MODES, run_npu_ranks

# HCCL reduces no float64, and a CPU's own AdamW is another implementation.
LIKE_NPU: dict[str, Any] = {"deterministic": False, "sum_dtype": SumDType.float32, "steps": 3}
ADAMW = AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.all, implementation=Implementation.foreach)
BF16 = DType.bfloat16
OTHER_SUMS_ON_CPU = ("chunked loss", "documents")
"""A CPU leaves ignored labels out of its chunks, whose number an accelerator would have to return to the host, and
queries share heads, which an NPU repeats."""

STRATEGIES: dict[str, ParallelConfig] = {
    "ddp": DDPConfig(),
    "ddp bf16": DDPConfig(param_dtype=BF16),
    "fsdp1": FSDP1Config(),
    "fsdp1 flat": FSDP1Config(use_orig_params=False),
    "fsdp1 bf16": FSDP1Config(param_dtype=BF16),
    "fsdp2": FSDP2Config(),
    "fsdp2 bf16": FSDP2Config(param_dtype=BF16, wrap=Wrap.block_attn_mlp),
    "toy_ddp": ToyDDPConfig(),
    "toy_zero1": ToyZero1Config(),
    "toy_zero2": ToyZero2Config(),
    "toy_zero3": ToyZero3Config(),
    "toy_fsdp": ToyFSDPConfig(),
}
HYBRID: dict[str, ParallelConfig] = {
    "hsdp1": FSDP1Config(),
    "hsdp1 flat": FSDP1Config(use_orig_params=False),
    "hsdp2": FSDP2Config(),
    "hsdp2 bf16": FSDP2Config(param_dtype=BF16),
    "toy_fsdp": ToyFSDPConfig(),
}


def config_for(device: str, parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    """The same training for a device."""
    settings: dict[str, Any] = {"optim": ADAMW, "kernels": PLAIN_KERNELS, **LIKE_NPU, **options}
    return make_config(parallel, ranks, device=device, **settings)


_IMMEDIATE: dict[tuple[Any, ...], list[Outcome]] = {}
"""Ranks and rows → their trainings in immediate mode, which delayed mode is compared with."""


def multiply_in_16_bits() -> None:
    """Let a forked CPU rank multiply in 16 bits, as NPUs do, even where that is slower than through float32."""
    for module in (linear, grouped):
        mock.patch.object(module, "lacks_matmul", return_value=False).start()


def assert_trains_alike(ranks: int, mode: str, rows: dict[str, tuple[ParallelConfig, dict[str, Any]]]) -> None:
    """Train every row in a mode, and compare it with its oracle."""
    configs = {
        device: [config_for(device, parallel, ranks, **options) for parallel, options in rows.values()]
        for device in ("cpu", "npu")
    }
    key = (ranks, *rows)
    if mode == "immediate" or key not in _IMMEDIATE:
        _IMMEDIATE[key] = run_npu_ranks(ranks, train_all, configs["npu"])[0]
    if mode == "delayed":
        assert_same(rows, run_npu_ranks(ranks, train_all, configs["npu"], mode=mode)[0], _IMMEDIATE[key])
    else:
        expected = run_ranks(ranks, train_all, configs["cpu"], prepare=multiply_in_16_bits)[0]
        assert_same(rows, _IMMEDIATE[key], expected, OTHER_SUMS_ON_CPU)


def assert_same(
    names: Iterable[str], outcomes: list[Outcome], expected: list[Outcome], close: tuple[str, ...] = ()
) -> None:
    """Assert bitwise equality, or losses within 1e-6 for names with a word of ``close``."""
    for name, outcome, oracle in zip(names, outcomes, expected, strict=True):
        if any(word in name for word in close):
            assert outcome.losses == pytest.approx(oracle.losses, rel=1e-6), name
        else:
            assert (outcome.losses, outcome.grad_norms) == (oracle.losses, oracle.grad_norms), name
            assert outcome.parameters == oracle.parameters, name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", *TINY])
def test_every_family_on_one_npu_matches_the_cpu(family: str, mode: str) -> None:
    """Oracle: the same training on the CPU, and on an NPU in immediate mode."""
    options = {"model": TINY.get(family)}
    assert_trains_alike(1, mode, {family: (SingleConfig(simulated_ranks=2), options)})


@pytest.mark.parametrize("mode", MODES)
def test_document_masking_matches_cpu_ranks(mode: str) -> None:
    """Oracle: the same training on CPU ranks, and on NPUs in immediate mode."""
    options = {"data": SyntheticConfig(branching=60, mask_documents=True)}
    assert_trains_alike(2, mode, {"documents": (FSDP2Config(), options)})


@pytest.mark.parametrize("mode", MODES)
def test_every_strategy_on_two_npus_matches_cpu_ranks(mode: str) -> None:
    """Oracle: the same strategy on CPU ranks with gloo, and on NPUs in immediate mode."""
    assert_trains_alike(2, mode, {name: (parallel, {}) for name, parallel in STRATEGIES.items()})


@pytest.mark.parametrize("mode", MODES)
def test_hybrid_sharding_on_four_npus_matches_cpu_ranks(mode: str) -> None:
    """Oracle: the same strategy on CPU ranks with gloo, and on NPUs in immediate mode."""
    assert_trains_alike(4, mode, {name: (parallel, {"fsdp_size": 2}) for name, parallel in HYBRID.items()})


SWITCHES: dict[str, dict[str, Any]] = {
    "full checkpointing": {"gradient_checkpointing": GradientCheckpointing.full},
    "selective checkpointing": {"gradient_checkpointing": GradientCheckpointing.selective},
    "chunked loss": {"chunk_loss": True, "chunk_tokens": "20"},
    "activation offload": {"activation_offload": True, "gradient_checkpointing": GradientCheckpointing.full},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_memory_switch_matches_cpu_ranks(mode: str) -> None:
    """Oracle: the same switch on CPU ranks, and on NPUs in immediate mode."""
    rows: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {}
    for name, memory in SWITCHES.items():
        for parallel in (FSDP1Config(), FSDP2Config()):
            rows[f"{name} {parallel.name}"] = (parallel, {"memory": MemoryConfig(**memory)})
    assert_trains_alike(2, mode, rows)


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_and_parameter_offload_match_cpu_ranks(mode: str) -> None:
    """Oracle: the same training on CPU ranks without offload; FSDP1 offloads parameters on accelerators only."""
    rows: dict[str, tuple[ParallelConfig, str | None, dict[str, Any]]] = {}
    for parallel in (FSDP1Config(), FSDP2Config()):
        for schedule in OffloadSchedule:
            if schedule is not OffloadSchedule.auto:
                rows[f"{parallel.name} {schedule.value}"] = (parallel, schedule.value, {})
        rows[f"{parallel.name} cpu_offload"] = (parallel, None, {"cpu_offload": True})
    rows["fsdp2 overlapped"] = (FSDP2Config(), offloaded.OVERLAPPED, {"cpu_offload": True})
    plain = [config_for("cpu", parallel, 2) for parallel in (FSDP1Config(), FSDP2Config())]
    of = dict(zip(("fsdp1", "fsdp2"), run_ranks(2, train_all, plain)[0], strict=True))
    expected = [of[name.split()[0]] for name in rows]
    given = [(config_for("npu", parallel, 2), how, memory) for parallel, how, memory in rows.values()]
    assert_same(rows, run_npu_ranks(2, offloaded.train_all, given, mode=mode)[0], expected)
