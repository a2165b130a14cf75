"""CPU offload of FSDP1 changes no bit of the training."""

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.parallel import FSDP1Config
from tests.harness.outcomes import Outcome, train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

FLAT = FSDP1Config(use_orig_params=False)


def train_offloaded(configs: list[Config]) -> list[Outcome]:
    """Train with FSDP1's CPU offload, without its pinned memory and streams, which a CPU does not
    have."""
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
    torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
    for config in configs:
        # after validation, which requires an accelerator
        config.memory.cpu_offload = True
    return train_all(configs)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("parallel", [FSDP1Config(), FLAT], ids=["own", "flat"])
def test_fsdp1_cpu_offload_matches_training_without_offload(
    parallel: FSDP1Config, grad_accum: int
) -> None:
    """Oracle: the same training without offload, bitwise."""

    def config() -> Config:
        return make_config(parallel, 2, grad_accum=grad_accum, deterministic=False)

    assert (
        run_ranks(2, train_offloaded, [config()])[0]
        == run_ranks(2, train_all, [config()])[0]
    )
