"""Training on simulated NPUs equals a CPU bitwise, for all strategies and memory switches, with
delayed streams too."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from fsdptoys import parallel
from fsdptoys.memory import GradientCheckpointing, MemoryConfig, OffloadSchedule
from fsdptoys.models import grouped, linear
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.precision import DType
from tests.harness import offloaded_runs as offloaded
from tests.harness.levels import by_level
from tests.harness.outcomes import Outcome, train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import DOCUMENTS, FAMILIES
from tests.simulated_npu.ranks import BOTH_MODES, config_for, run_npu_ranks

BF16 = DType.bfloat16
FULL = GradientCheckpointing.full


@dataclass
class Row:
    """A training run."""

    parallel: ParallelConfig
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    """Of optimizer offload, which CPU ranks do not need."""
    offload: dict[str, Any] = field(default_factory=dict)
    """Switches of memory on NPUs alone."""


STRATEGIES: dict[str, ParallelConfig] = {
    "ddp": DDPConfig(),
    "ddp bf16": DDPConfig(param_dtype=BF16),
    "fsdp1": FSDP1Config(),
    "fsdp1 flat": FSDP1Config(use_orig_params=False),
    "fsdp1 bf16": FSDP1Config(param_dtype=BF16),
    "fsdp2": FSDP2Config(),
    "fsdp2 bf16": FSDP2Config(param_dtype=BF16, wrap=Wrap.block_attn_mlp),
    "toy_ddp": parallel.ToyDDPConfig(),
    "toy_zero1": parallel.ToyZero1Config(),
    "toy_zero2": parallel.ToyZero2Config(),
    "toy_zero3": parallel.ToyZero3Config(),
    "toy_fsdp": parallel.ToyFSDPConfig(),
}
HYBRID: dict[str, ParallelConfig] = {
    "hsdp1": FSDP1Config(),
    "hsdp1 flat": FSDP1Config(use_orig_params=False),
    "hsdp2": FSDP2Config(),
    "hsdp2 bf16": FSDP2Config(param_dtype=BF16),
    "toy hsdp": parallel.ToyFSDPConfig(),
}
SWITCHES: dict[str, dict[str, Any]] = {
    "full checkpointing": {"gradient_checkpointing": FULL},
    "selective checkpointing": {
        "gradient_checkpointing": GradientCheckpointing.selective
    },
    "chunked loss": {"chunk_loss": True, "chunk_tokens": "20"},
    "activation offload": {"activation_offload": True, "gradient_checkpointing": FULL},
}
ROWS: dict[str, Row] = {name: Row(strategy) for name, strategy in STRATEGIES.items()}
ROWS |= {name: Row(strategy, 4, {"fsdp_size": 2}) for name, strategy in HYBRID.items()}
ROWS |= {
    family: Row(SingleConfig(simulated_ranks=2), 1, {"model": model})
    for family, model in FAMILIES.items()
}
ROWS["documents"] = Row(FSDP2Config(), options={"data": DOCUMENTS})
ROWS["fsdp2 overlapped"] = Row(
    FSDP2Config(), schedule=offloaded.OVERLAPPED, offload={"cpu_offload": True}
)
for fsdp in (FSDP1Config(), FSDP2Config()):
    for name, switches in SWITCHES.items():
        ROWS[f"{fsdp.name} {name}"] = Row(
            fsdp, options={"memory": MemoryConfig(**switches)}
        )
    for schedule in [
        schedule for schedule in OffloadSchedule if schedule is not OffloadSchedule.auto
    ]:
        ROWS[f"{fsdp.name} {schedule.value}"] = Row(fsdp, schedule=schedule.value)
    ROWS[f"{fsdp.name} cpu_offload"] = Row(fsdp, offload={"cpu_offload": True})

SHORT = {
    *STRATEGIES,
    "llama",
    "qwen3_moe",
    "fsdp1 cpu_offload",
    "fsdp2 overlapped",
    "fsdp2 pipelined",
}
SHORT |= {f"fsdp2 {name}" for name in SWITCHES if name != "full checkpointing"}
SHORT -= {"ddp bf16", "fsdp1 bf16"}
OTHER_SUMS_ON_CPU = ("chunked loss", "documents")
"""A CPU leaves ignored labels out of its chunks, whose number an accelerator would have to return
to the host, and queries share heads, which an NPU repeats."""


def multiply_in_16_bits() -> None:
    """Let a forked CPU rank multiply in 16 bits, as NPUs do, even where that is slower than through
    float32."""
    for module in (linear, grouped):
        mock.patch.object(module, "lacks_matmul", return_value=False).start()


def is_exact(name: str) -> bool:
    return not name.endswith(OTHER_SUMS_ON_CPU)


OutcomeOf = Callable[[str, str], Outcome]


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """Outcome of a row in a mode, or on CPUs: all chosen rows of as many ranks run in one group, at
    the first."""
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path
    }

    @functools.cache
    def train(ranks: int, exact: bool, mode: str) -> dict[str, Outcome]:
        names = [
            name
            for name in ROWS
            if name in chosen and ROWS[name].ranks == ranks and is_exact(name) == exact
        ]
        rows = [ROWS[name] for name in names]
        device = "cpu" if mode == "cpu" else "npu"
        configs = [
            config_for(device, row.parallel, ranks, **row.options) for row in rows
        ]
        if device == "cpu":
            outcomes = run_ranks(
                ranks, train_all, configs, prepare=multiply_in_16_bits
            )[0]
        else:
            runs = [
                (config, row.schedule, row.offload)
                for config, row in zip(configs, rows, strict=True)
            ]
            outcomes = run_npu_ranks(ranks, offloaded.train_all, runs, mode=mode)[0]
        return dict(zip(names, outcomes, strict=True))

    return lambda name, mode: train(ROWS[name].ranks, is_exact(name), mode)[name]


@BOTH_MODES
@pytest.mark.parametrize("name", by_level(ROWS, SHORT))
def test_training_on_npus_matches_cpu_ranks(
    name: str, mode: str, outcome_of: OutcomeOf
) -> None:
    """Oracle: the same run on CPU ranks, without offload, bitwise; where a CPU sums otherwise, its
    losses to 1e-6."""
    outcome = outcome_of(name, mode)
    expected = outcome_of(name, "cpu")
    if is_exact(name):
        assert outcome == expected
    else:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
        assert outcome == outcome_of(name, "immediate")
