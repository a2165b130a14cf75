"""On a simulated NPU every strategy and every switch of memory trains as on a CPU, in every bit, however late streams run."""

from typing import Any

import pytest

from fsdptoys.config import Config, SumDType
from fsdptoys.memory import GradientCheckpointing, MemoryConfig, OffloadSchedule
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
from tests.parallel.runs import TINY, make_config
from tests.simulated_npu.ranks import MODES, run_npu_ranks

# HCCL reduces no float64, and a CPU's own AdamW is another implementation.
LIKE_NPU: dict[str, Any] = {"deterministic": False, "sum_dtype": SumDType.float32, "steps": 3}
ADAMW = AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.all, implementation=Implementation.foreach)
BF16 = DType.bfloat16

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
    settings: dict[str, Any] = {"optim": ADAMW, **LIKE_NPU, **options}
    return make_config(parallel, ranks, device=device, **settings)


def assert_as_on_cpu(ranks: int, mode: str, rows: dict[str, tuple[ParallelConfig, dict[str, Any]]]) -> None:
    outcomes: dict[str, list[Outcome]] = {}
    for device in ("cpu", "npu"):
        configs = [config_for(device, parallel, ranks, **options) for parallel, options in rows.values()]
        if device == "cpu":
            outcomes[device] = run_ranks(ranks, train_all, configs)[0]
        else:
            outcomes[device] = run_npu_ranks(ranks, train_all, configs, mode=mode)[0]
    assert_same(list(rows), outcomes["npu"], outcomes["cpu"])


def assert_same(names: list[str], outcomes: list[Outcome], expected: list[Outcome]) -> None:
    pairs = zip(names, outcomes, expected, strict=True)
    differ = {name: (npu.losses, cpu.losses, npu.grad_norms, cpu.grad_norms) for name, npu, cpu in pairs if npu != cpu}
    assert differ == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", *TINY])
def test_one_npu_trains_every_family_as_a_cpu(family: str, mode: str) -> None:
    """Oracle: the same training on the CPU."""
    options = {"model": TINY.get(family)}
    assert_as_on_cpu(1, mode, {family: (SingleConfig(simulated_ranks=2), options)})


@pytest.mark.parametrize("mode", MODES)
def test_every_strategy_on_two_npus_trains_as_on_two_cpu_ranks(mode: str) -> None:
    """Oracle: the same strategy on CPU ranks with gloo."""
    assert_as_on_cpu(2, mode, {name: (parallel, {}) for name, parallel in STRATEGIES.items()})


@pytest.mark.parametrize("mode", MODES)
def test_hybrid_sharding_on_four_npus_trains_as_on_four_cpu_ranks(mode: str) -> None:
    """Oracle: the same strategy on CPU ranks with gloo."""
    assert_as_on_cpu(4, mode, {name: (parallel, {"fsdp_size": 2}) for name, parallel in HYBRID.items()})


SWITCHES: dict[str, dict[str, Any]] = {
    "full checkpointing": {"gradient_checkpointing": GradientCheckpointing.full},
    "selective checkpointing": {"gradient_checkpointing": GradientCheckpointing.selective},
    "chunked loss": {"chunk_loss": True, "chunk_tokens": "20"},
    "activation offload": {"activation_offload": True, "gradient_checkpointing": GradientCheckpointing.full},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_switch_of_memory_trains_as_on_cpu_ranks(mode: str) -> None:
    """Oracle: the same switch on CPU ranks."""
    rows: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {}
    for name, memory in SWITCHES.items():
        for parallel in (FSDP1Config(), FSDP2Config(param_dtype=BF16)):
            rows[f"{name} {parallel.name}"] = (parallel, {"memory": MemoryConfig(**memory)})
    assert_as_on_cpu(2, mode, rows)


@pytest.mark.parametrize("mode", MODES)
def test_offload_of_optimizer_and_parameters_changes_nothing(mode: str) -> None:
    """Oracle: the same training on CPU ranks without offload; FSDP1 offloads parameters on accelerators only."""
    rows: dict[str, tuple[ParallelConfig, str | None, dict[str, Any]]] = {}
    for parallel in (FSDP1Config(), FSDP2Config()):
        for schedule in OffloadSchedule:
            if schedule is not OffloadSchedule.auto:
                rows[f"{parallel.name} {schedule.value}"] = (parallel, schedule.value, {})
        rows[f"{parallel.name} cpu_offload"] = (parallel, None, {"cpu_offload": True})
    rows["fsdp2 overlapped"] = (FSDP2Config(), offloaded.OVERLAPPED, {"cpu_offload": True})
    expected = run_ranks(2, train_all, [config_for("cpu", parallel, 2) for parallel, _, _ in rows.values()])[0]
    given = [(config_for("npu", parallel, 2), how, memory) for parallel, how, memory in rows.values()]
    assert_same(list(rows), run_npu_ranks(2, offloaded.train_all, given, mode=mode)[0], expected)
