"""Every strategy computes the same training: the bits of losses, norms and parameters against one
process."""

from typing import Any

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.memory import ActivationOffload, MemoryConfig
from fsdptoys.memory.activation_offload import Copies
from fsdptoys.models import NATIVE_MODELS
from fsdptoys.optim import AdamWConfig, Implementation
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.train import parallelize as prepare_module
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import Outcome, train_all
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import FAMILIES, make_config
from tests.parallel.equality_rows import (
    OFFLOADED,
    ROWS,
    SHARED,
    SHORT,
    STRATEGIES,
    strategies_on,
)
from tests.parallel.numeric_outcomes import initial_hashes


def train_moving_all(configs: list[Config]) -> list[tuple[Outcome, int]]:
    """Train with activation offload that moves small tensors too; also return the number of copies
    of each run."""
    copies = 0

    class Counting(Copies):
        def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
            nonlocal copies
            copies += 1
            super().start(target, source)

    def build(device: torch.device) -> ActivationOffload:
        return ActivationOffload(device, min_bytes=0, copies=Counting())

    prepare_module.ActivationOffload = build  # type: ignore[assignment, misc]
    results = []
    for config in configs:
        copies = 0
        results.append((train_all([config])[0], copies))
    return results


trained = trained_rows(ROWS, train_moving_all)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_training_equals_one_process_bitwise(row: str, trained: Pairs) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode."""
    (outcome, copies), (expected, _) = trained[row]
    assert outcome == expected
    memory = ROWS[row].layout.get("memory", MemoryConfig())
    assert (copies > 0) == memory.activation_offload


def test_tiny_models_cover_all_families() -> None:
    """Oracle: the registry; a missing family would be trained under no strategy."""
    assert {config.family for config in FAMILIES.values()} == set(NATIVE_MODELS)


CLOSE: dict[str, Row] = {
    name: Row(parallel, 2, {}, {"deterministic": False})
    for name, (parallel, _) in strategies_on(2).items()
}
FUSED = AdamWConfig(lr=1e-3, implementation=Implementation.fused)
CLOSE |= {
    f"{name} fused": Row(
        STRATEGIES[name][0], 2, {}, {"deterministic": False, "optim": FUSED}
    )
    for name in SHARED
}


trained_by_default = trained_rows(CLOSE, argument="name")


@pytest.mark.parametrize("name", CLOSE)
def test_default_mode_matches_one_process_closely(
    name: str, trained_by_default: Pairs
) -> None:
    """Oracle: one process in float32; the vector and tail loops of the fused kernel round
    differently."""
    outcome, expected = trained_by_default[name]
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def test_default_mode_of_fsdp1_equals_fsdp2_bitwise(trained_by_default: Pairs) -> None:
    """Oracle: each other; at two ranks they add the same two numbers."""
    fsdp1, flat, fsdp2 = (
        trained_by_default[name][0] for name in ("fsdp1", "fsdp1 flat", "fsdp2")
    )
    assert fsdp1 == flat == fsdp2


def test_initial_values_differ_by_parameter_and_seed() -> None:
    """Oracle: other hashes; the equality above would hold for constants too. All norms are
    equal."""
    first, other = run_ranks(
        1,
        initial_hashes,
        [make_config(SingleConfig(), 1, init_seed=seed) for seed in (0, 1)],
    )[0]
    assert len(set(first.values())) == len(first) - 6 == 24
    differing = {name for name, value in first.items() if value != other[name]}
    assert differing == {name for name in other if not name.endswith("norm.weight")}


MAX_NORM = 0.05


def first_step(configs: list[Config]) -> list[tuple[float, float, float]]:
    """Return loss, norm before clipping, and norm of the gradient passed to the optimizer."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        norms: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_, trainer=trainer, norms=norms: norms.append(
                trainer.strategy.clip_grad_norm(float("inf"))
            )
        )
        trainer.train()
        results.append(
            (trainer.history[0].loss, trainer.history[0].grad_norm, norms[0].item())
        )
    return results


def clipped_by_pytorch() -> tuple[float, float]:
    """Return the norms before and after PyTorch's own clipping in one process."""
    trainer = Trainer(
        make_config(SingleConfig(simulated_ranks=2), 1, steps=1, max_grad_norm=None)
    )
    params = [param for _, param in trainer.strategy.named_parameters()]
    norms: list[float] = []

    def clip(*_: Any) -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(params, MAX_NORM).item())
        norms.append(
            torch.nn.utils.get_total_norm([param.grad for param in params]).item()
        )

    trainer.optimizer.register_step_pre_hook(clip)
    trainer.train()
    return norms[0], norms[1]


def test_clipping_scales_every_strategys_gradient_to_the_same_norm() -> None:
    """Oracle: torch.nn.utils.clip_grad_norm_ over the full gradient of one process, then its
    norm."""
    options: dict[str, Any] = {"steps": 1, "max_grad_norm": MAX_NORM}
    configs = [
        make_config(parallel, 2, **options) for parallel, _ in strategies_on(2).values()
    ]
    configs.append(make_config(FSDP2Config(), 2, memory=OFFLOADED, **options))
    before, after = run_ranks(1, clipped_by_pytorch)[0]
    assert before > MAX_NORM
    for _, norm, clipped in run_ranks(2, first_step, configs)[0]:
        assert norm == pytest.approx(before, rel=1e-6)
        assert clipped == pytest.approx(after, rel=1e-5)
