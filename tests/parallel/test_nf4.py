"""Adapters of quantized weights: a run against plain weights of the same values, and ranks against
one process."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.nf4 import Codebook, is_packed, unpack, unquantized_name
from fsdptoys.parallel import STRATEGIES, ParallelConfig, SingleConfig
from fsdptoys.parallel.capabilities import CAPABILITIES
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base, LoRAConfig
from fsdptoys.utils.dtensor import local_tensor
from tests.harness.nf4_models import GPT2, LLAMA
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import make_config

NF4 = LoRAConfig(rank=4, dropout=0.2, base=Base.nf4)


def settings_of(ranks: int, **options: Any) -> dict[str, Any]:
    """Return two steps of eight sequences."""
    settings = {"batch_size": 8 * options.get("cp_size", 1) // ranks, "grad_accum": 1, "steps": 2}
    return settings | {"model": LLAMA, "tune": NF4, "deterministic": False} | options


def config(parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    return make_config(parallel, ranks, **settings_of(ranks, **options))


def train_all(configs: list[Config]) -> list[dict[str, Any]]:
    """Of each run its losses and norms, the bytes of packed weights, and what a checkpoint
    holds."""
    found = []
    for each in configs:
        trainer = Trainer(each)
        held = {
            name: local_tensor(param).nbytes for name, param in trainer.strategy.held_parameters()
        }
        trainer.train()
        found.append(
            {
                "losses": [step.loss for step in trainer.history],
                "norms": [step.grad_norm for step in trainer.history],
                "packed": {
                    name: value
                    for name, value in hash_parameters(trainer).items()
                    if is_packed(name)
                },
                "packed bytes": sum(size for name, size in held.items() if is_packed(name)),
                "saved": {
                    key.split(".", 1)[1]
                    for key in trainer.strategy.state_tensors(trainer.optimizer)
                    if ".lora" not in key
                },
            }
        )
    return found


def compare_with_plain(configs: list[Config]) -> list[list[list[float]]]:
    """Losses and norms of each run, and of one with plain weights of the values that its quantized
    ones stand for."""
    codebook, results = Codebook(), []
    codebook.put(torch.device("cpu"))
    for each in configs:
        trainer = Trainer(each)
        values: dict[str, Tensor] = {}
        for name, param in trainer.strategy.full_parameters():
            if is_packed(name):
                values[unquantized_name(name)] = unpack(param, codebook.pairs, param.dtype).float()
            else:
                values[name] = param.clone()
        plain = dataclasses.replace(each, tune=dataclasses.replace(NF4, base=Base.plain))

        def fill(param: Tensor, name: str, values: dict[str, Tensor] = values) -> None:
            with torch.no_grad():
                param.copy_(values[name])

        runs = [trainer, Trainer(plain, param_init=fill)]
        for run in runs:
            run.train()
        results.append(
            [
                [value for step in run.history for value in (step.loss, step.grad_norm)]
                for run in runs
            ]
        )
    return results


@pytest.mark.usefixtures("unmeasured")
def test_a_run_computes_with_the_values_of_its_packed_weights() -> None:
    """Oracle: one process with plain weights of the dequantized values: every bit of losses and
    norms."""
    bfloat16 = SingleConfig(param_dtype=DType.bfloat16)
    checkpointed = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True)
    runs = [
        config(SingleConfig(), 1),
        config(SingleConfig(), 1, model=GPT2),
        config(bfloat16, 1),
        config(bfloat16, 1, memory=checkpointed),
    ]
    for found, expected in run_ranks(1, compare_with_plain, runs)[0]:
        assert found == expected


BF16, F32 = DType.bfloat16, DType.float32
PACKING = [
    name for name, can in CAPABILITIES.items() if can.packed_weights and not can.single_process
]


def row(name: str, dtype: DType = BF16, **layout: Any) -> Row:
    """Return a run on two ranks that is compared with one process of the same sequences."""
    settings = settings_of(1)
    return Row(STRATEGIES[name](param_dtype=dtype), 2, settings_of(2, **layout), settings, settings)


ROWS = {name: row(name) for name in PACKING} | {
    f"{name} float32": row(name, F32) for name in ("ddp", "fsdp2")
}
ROWS["fsdp2 cp"] = row("fsdp2", cp_size=2)
ROWS["fsdp2 optimizer offload"] = row("fsdp2", memory=MemoryConfig(optimizer_offload=True))
ROWS = {label: row for label, row in ROWS.items() if row.parallel.name in PACKING}
SHORT = {"ddp", "toy_ddp", "fsdp2", "fsdp2 float32", "fsdp2 cp"}
trained = trained_rows(ROWS, train_all)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_every_strategy_that_packs_weights_trains_as_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process of the same sequences: the bytes of weights; losses and norms to
    rounding.

    Under FSDP2 a rank holds half of them: 4.5 bits a weight over two ranks. Checkpoints hold
    adapters alone.
    """
    found, expected = trained[row]
    close = 2e-5 if ROWS[row].parallel.param_dtype is F32 else 2e-2
    layers = LLAMA.build().layers
    weights = sum(
        param.numel()
        for param_name, param in layers.named_parameters()
        if "_proj.weight" in param_name
    )
    assert found["packed"] == expected["packed"] and found["packed"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=close)
    assert found["norms"] == pytest.approx(expected["norms"], rel=5 * close)
    assert found["saved"] == set()
    assert found["packed bytes"] * 8 == weights * 4.5 / (2 if row.startswith("fsdp2") else 1)
