"""Fused AdamW that skips steps on a simulated NPU, without a read on the host."""

import dataclasses
from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.optim import AdamWConfig, Implementation, OptimStateDType, WeightDecayOn, fused_adamw
from fsdptoys.optim.loss_scale import LossScaleConfig
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from scripts.parity import hash_parameters
from tests.simulated_npu.ranks import MODES, run_npu_ranks
from tests.simulated_npu.test_training import config_for


def train_each_way(configs: list[Config]) -> list[tuple[bool, list[bool], list[Any]]]:
    """For each run whether the device decided, which steps were skipped, and the bits decided by device and host."""
    rows = []
    for config in configs:
        bits: list[Any] = []
        for on_device in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if on_device:  # the simulated kernel is the CPU's, which obeys as CUDA's does
                    patch.setattr(fused_adamw, "IGNORED_ON", frozenset())
                trainer = Trainer(config)
                decided = trainer.updates.skips_on_device
                trainer.train()
            skipped = [step.skipped for step in trainer.history]
            bits.append((skipped, [repr(step.grad_norm) for step in trainer.history], hash_parameters(trainer)))
            if not on_device:
                assert not decided, "torch_npu's kernel ignores the decision"
            else:
                row = decided, skipped, bits
        rows.append(row)
    return rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_skipped_on_the_device_equal_those_skipped_by_the_host(ranks: int, mode: str) -> None:
    """Oracle: the same run with the decision read on the host; float16 overflows until its loss scale fits."""
    parallel = (SingleConfig if ranks == 1 else FSDP2Config)(param_dtype=DType.float16)
    configs = []
    for dtype in (OptimStateDType.float32, OptimStateDType.bfloat16):
        optim = AdamWConfig(1e-2, weight_decay_on=WeightDecayOn.all, implementation=Implementation.fused)
        optim = dataclasses.replace(optim, state_dtype=dtype)
        # Without clipping: the kernel divides where the host multiplies, which is exact for powers of two only.
        config = config_for("npu", parallel, ranks, optim=optim, steps=6, seq_len=12, max_grad_norm=None)
        configs.append(dataclasses.replace(config, loss_scale=LossScaleConfig(initial=2.0**19, growth_interval=2)))
    for decided, skipped, (device, host) in run_npu_ranks(ranks, train_each_way, configs, mode=mode)[0]:
        assert decided
        assert set(skipped) == {True, False}
        assert device == host
