"""Fused AdamW that skips steps on a simulated NPU, without a read on the host."""

import dataclasses
from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    OptimStateDType,
    WeightDecayOn,
    fused_adamw,
)
from fsdptoys.optim.loss_scale import LossScaleConfig
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from tests.harness.levels import extended
from tests.harness.outcomes import hash_parameters
from tests.simulated_npu.ranks import BOTH_MODES, config_for, run_npu_ranks


def train(config: Config, obeys: bool) -> tuple[bool, list[bool], tuple[Any, ...]]:
    """Return whether the device decided, which steps were skipped, and the bits of the run."""
    with pytest.MonkeyPatch.context() as patch:
        # the simulated kernel is the CPU's, which obeys as CUDA's does; torch_npu's ignores the
        # decision
        if obeys:
            patch.setattr(fused_adamw, "IGNORED_ON", frozenset())
        trainer = Trainer(config)
        decided = trainer.stepper.skips_on_device
        trainer.train()
    norms = [repr(step.grad_norm) for step in trainer.history]
    return (
        decided,
        [step.skipped for step in trainer.history],
        (norms, hash_parameters(trainer)),
    )


@BOTH_MODES
@pytest.mark.parametrize(
    "dtype", [OptimStateDType.float32, extended(OptimStateDType.bfloat16)]
)
@pytest.mark.parametrize("ranks", [1, extended(2)])
def test_steps_skipped_on_the_device_equal_those_skipped_by_the_host(
    ranks: int, dtype: OptimStateDType, mode: str
) -> None:
    """Oracle: the same run with the decision read on the host; float16 overflows until its loss
    scale fits."""
    parallel = (SingleConfig if ranks == 1 else FSDP2Config)(param_dtype=DType.float16)
    optim = AdamWConfig(
        1e-2, weight_decay_on=WeightDecayOn.all, implementation=Implementation.fused
    )
    optim = dataclasses.replace(optim, state_dtype=dtype)
    # Without clipping: the kernel divides where the host multiplies, which is exact for powers of
    # two only.
    config = config_for(
        "npu", parallel, ranks, optim=optim, steps=6, seq_len=12, max_grad_norm=None
    )
    config = dataclasses.replace(
        config, loss_scale=LossScaleConfig(initial=2.0**19, growth_interval=2)
    )
    on_device, on_host = run_npu_ranks(
        ranks, lambda: [train(config, True), train(config, False)], mode=mode
    )[0]
    assert (on_device[0], on_host[0]) == (True, False)
    assert set(on_device[1]) == {True, False}
    assert on_device[1:] == on_host[1:]
