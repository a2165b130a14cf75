"""``parallel.reduce_each_microbatch``: between micro-batches a rank keeps a shard of the gradients
only."""

from typing import Any

import numpy
import pytest

from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.parallel import FSDP1Config, FSDP2Config
from fsdptoys.parallel.fsdp import FSDPConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.parallel.toy_fsdp import ToyFSDPConfig
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import EVEN, EXPERTS, TINY, make_config, tiny_model, with_sizes

extended = pytest.mark.extended
LAYOUTS: dict[str, tuple[type[FSDPConfig], int, dict[str, Any]]] = {
    "fsdp2": (FSDP2Config, 4, {}),
    "fsdp1": (FSDP1Config, 4, {}),
    "toy_fsdp": (ToyFSDPConfig, 2, {}),
    "hsdp2": (FSDP2Config, 4, {"fsdp_size": 2}),
    "hsdp1": (FSDP1Config, 4, {"fsdp_size": 2}),
    "ep": (
        FSDP2Config,
        4,
        {"ep_size": 2, "model": with_sizes(TINY["qwen3_moe"], **EXPERTS)},
    ),
    "tp": (FSDP2Config, 4, {"tp_size": 2, "model": with_sizes(tiny_model(), **EVEN)}),
    "cp": (FSDP2Config, 4, {"cp_size": 2}),
}
"""Name → strategy, ranks and options."""


def config(
    name: str,
    reduce_each_microbatch: bool,
    dtype: DType = DType.float32,
    **options: Any,
) -> Config:
    """Return a run of four micro-batches a step."""
    kind, ranks, layout = LAYOUTS[name]
    settings = {"grad_accum": 4, "batch_size": 1, "steps": 2, **layout, **options}
    return make_config(
        kind(reduce_each_microbatch=reduce_each_microbatch, param_dtype=dtype),
        ranks,
        **settings,
    )


def both(name: str, **options: Any) -> list[Config]:
    return [config(name, reduces_often, **options) for reduces_often in (False, True)]


@pytest.mark.parametrize(
    "name",
    [
        *list(LAYOUTS)[:2],
        *(pytest.param(name, marks=extended) for name in list(LAYOUTS)[2:]),
    ],
)
def test_runs_are_those_of_one_reduction_a_step(name: str) -> None:
    """Oracle: the run that reduces once: every bit in the deterministic mode, which reduces often
    anyway, and losses and norms to the rounding of float32 sums without it."""
    pairs = [
        *both(name, deterministic=True, dtype=DType.bfloat16),
        *both(name, deterministic=False),
    ]
    exact, exact_often, plain, often = run_ranks(LAYOUTS[name][1], train_all, pairs)[0]
    assert exact == exact_often
    assert numpy.allclose(plain.losses, often.losses, rtol=1e-6, atol=0)
    assert numpy.allclose(plain.grad_norms, often.grad_norms, rtol=1e-5, atol=0)


LARGE: dict[str, Any] = {
    "n_layers": 20,
    "dim": 96,
    "ffn_dim": 256,
    "vocab_size": 128,
    "n_heads": 4,
    "n_kv_heads": 4,
}
LARGE_MODELS = {
    "ep": with_sizes(TINY["qwen3_moe"], **EXPERTS | LARGE | {"expert_ffn_dim": 96}),
    "other": with_sizes(tiny_model(), **LARGE),
}


def peaks(configs: list[Config]) -> list[tuple[float, int]]:
    """On rank 0, the highest bytes of each run's second step, and the bytes of a whole copy of the
    gradients."""
    rows = []
    for one in configs:
        trainer = Trainer(one)
        trainer.train()
        peak = trainer.history[-1].memory_peak_gib
        rows.append(
            (
                (peak or 0.0) * GIB,
                4
                * sum(trainer.parallel_model.parameter_sizes.values())
                // one.mesh.tp_size,
            )
        )
    return rows


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2",
        *(
            pytest.param(layout, marks=extended)
            for layout in ("fsdp1", "hsdp2", "ep", "tp")
        ),
    ],
)
def test_only_a_shard_of_the_gradients_is_kept_between_microbatches(name: str) -> None:
    """Oracle: bytes of whole gradients less those of a shard; gathered units that gloo still holds
    blur the peaks."""
    model = LARGE_MODELS.get(name, LARGE_MODELS["other"])
    options: dict[str, Any] = {"deterministic": False, "model": model, "seq_len": 8}
    runs = [*both(name, **options), config(name, False, grad_accum=1, **options)]
    (whole, copy), (often, _), (once, _) = run_ranks(LAYOUTS[name][1], peaks, runs)[0]
    shards = 4 if name.startswith("fsdp") else 2  # of experts two
    assert whole - often > 0.5 * (1 - 1 / shards) * copy
    assert often - once < 0.5 * copy
