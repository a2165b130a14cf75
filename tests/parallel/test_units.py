"""Units: a strategy's list of the parameters needed by each forward."""

import pytest
from torch import nn

from fsdptoys.config.schema import Config
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    ToyFSDPConfig,
)
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import levels
from tests.harness.tiny import FAMILIES, make_config, tiny_model

PARALLELS: dict[str, ParallelConfig] = {
    "single": SingleConfig(),
    "ddp": DDPConfig(),
    "ddp bf16": DDPConfig(param_dtype=DType.bfloat16),
    "fsdp1": FSDP1Config(),
    "fsdp1 flat": FSDP1Config(use_orig_params=False),
    "fsdp2": FSDP2Config(),
    "fsdp2 parts": FSDP2Config(wrap=Wrap.block_attn_mlp),
    "fsdp2 classes": FSDP2Config(wrap_classes=["Linear", "Block"], forward_prefetch=2),
    "fsdp2 size": FSDP2Config(min_params=10),
    "fsdp1 size": FSDP1Config(min_params=1500),
    "toy_fsdp size": ToyFSDPConfig(min_params=1500),
}


def walk(configs: list[Config]) -> list[tuple[list[int], list[int], bool]]:
    """Order of units, order of their modules' forwards, and whether each parameter came once."""
    rows = []
    for config in configs:
        trainer = Trainer(config)
        units = trainer.strategy.units()
        began: list[int] = []

        def hook(
            module: nn.Module, *_: object, began: list[int] = began, units: list = units
        ) -> None:
            began.append([unit for unit, _ in units].index(module))

        for module, _ in units:
            module.register_forward_pre_hook(hook)
        trainer.train()
        named = [param for _, params in units for param in params]
        whole = [param for _, param in trainer.strategy.named_parameters()]
        once = len(named) == len(set(named)) and set(named) == set(whole)
        rows.append((list(range(len(units))), began, once))
    return rows


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "name", levels(PARALLELS, {"ddp", "fsdp1 size", "fsdp2 parts", "fsdp2 classes"})
)
def test_units_hold_every_parameter_once_in_forward_order(name: str) -> None:
    """Oracle: forward hooks during a step, and the strategy's own list of parameters; every family,
    tied weights."""
    parallel = PARALLELS[name]
    ranks = 1 if name == "single" else 2
    models = [tiny_model(tie_embeddings=True), *FAMILIES.values()]
    configs = [
        make_config(parallel, ranks, model=model, steps=1, grad_accum=1, seq_len=8)
        for model in models
    ]
    for config, (units, began, once) in zip(
        configs, run_ranks(ranks, walk, configs)[0], strict=True
    ):
        assert once
        assert len(units) > config.model.n_layers * (3 if name == "fsdp2 parts" else 1)
        if parallel.capabilities.lazy_updates:
            assert began == units
