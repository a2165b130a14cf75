"""Adapters of quantized weights: a run against plain weights of the same values, and ranks against one process."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import GPT2Config, ModelConfig
from fsdptoys.models.nf4 import Codebook, is_packed, unpack, unquantized_name
from fsdptoys.parallel import (
    STRATEGIES,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base, LoRAConfig
from fsdptoys.utils.dtensor import local_tensor
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config, tiny_model

NF4 = LoRAConfig(rank=4, dropout=0.2, base=Base.nf4)
LLAMA = dataclasses.replace(tiny_model(), dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128)
GPT2 = GPT2Config(name="tiny", dim=64, n_layers=2, n_heads=4, vocab_size=67, max_seq_len=64)


def config(parallel: ParallelConfig, ranks: int, model: ModelConfig = LLAMA, **options: Any) -> Config:
    """Two steps of eight sequences."""
    shares = ranks // options.get("cp_size", 1)
    settings = {"batch_size": 8 // shares, "grad_accum": 1, "steps": 2, "tune": NF4, "deterministic": False} | options
    return make_config(dataclasses.replace(parallel), ranks, model=model, **settings)


def train_all(configs: list[Config]) -> list[dict[str, Any]]:
    """Of each run its losses and norms, the bytes of packed weights, and what a checkpoint holds."""
    found = []
    for each in configs:
        trainer = Trainer(each)
        held = {name: local_tensor(param).nbytes for name, param in trainer.strategy.held_parameters()}
        trainer.train()
        found.append(
            {
                "losses": [step.loss for step in trainer.history],
                "norms": [step.grad_norm for step in trainer.history],
                "packed": {name: value for name, value in hash_parameters(trainer).items() if is_packed(name)},
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
    """Losses and norms of each run, and of one with plain weights of the values that its quantized ones stand for."""
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

        runs = [trainer, Trainer(plain, fill=fill)]
        for run in runs:
            run.train()
        results.append([[value for step in run.history for value in (step.loss, step.grad_norm)] for run in runs])
    return results


@pytest.mark.usefixtures("unmeasured")
def test_a_run_computes_with_the_values_of_its_packed_weights() -> None:
    """Oracle: one process with plain weights of the dequantized values: every bit of losses and norms."""
    bfloat16 = SingleConfig(param_dtype=DType.bfloat16)
    checkpointed = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True)
    runs = [
        config(SingleConfig(), 1),
        config(SingleConfig(), 1, GPT2),
        config(bfloat16, 1),
        config(bfloat16, 1, memory=checkpointed),
    ]
    for found, expected in run_ranks(1, compare_with_plain, runs)[0]:
        assert found == expected


@pytest.mark.usefixtures("unmeasured")
def test_every_strategy_that_packs_weights_trains_as_one_process() -> None:
    """Oracle: one process of the same sequences: the bytes of weights; losses and norms to rounding.

    Under FSDP2 a rank holds half of them: 4.5 bits a weight over two ranks. Checkpoints hold adapters alone.
    """
    dtypes = (DType.float32, DType.bfloat16)
    expected = run_ranks(1, train_all, [config(SingleConfig(param_dtype=dtype), 1) for dtype in dtypes])[0]
    names = [name for name, kind in STRATEGIES.items() if kind.mixes_dtypes and not kind.single_process]
    assert {"ddp", "toy_ddp"} <= set(names)
    rows: list[tuple[str, DType, dict[str, Any]]] = [(name, DType.bfloat16, {}) for name in names]
    rows += [(name, DType.float32, {}) for name in ("ddp", "fsdp2") if name in names]
    offload: dict[str, Any] = {"memory": MemoryConfig(optimizer_offload=True)}
    more_of_fsdp2: list[dict[str, Any]] = [{"cp_size": 2}, offload]
    rows += [("fsdp2", DType.bfloat16, options) for options in more_of_fsdp2 if "fsdp2" in names]
    runs = [config(STRATEGIES[name](param_dtype=dtype), 2, **more) for name, dtype, more in rows]
    weights = sum(
        param.numel() for name, param in LLAMA.build().named_parameters() if "_proj.weight" in name and "layers" in name
    )
    for (name, dtype, more), found in zip(rows, run_ranks(2, train_all, runs)[0], strict=True):
        reference, close = expected[dtypes.index(dtype)], 2e-5 if dtype is DType.float32 else 2e-2
        assert found["packed"] == reference["packed"] and found["packed"], name
        assert found["losses"] == pytest.approx(reference["losses"], rel=close), (name, more)
        assert found["norms"] == pytest.approx(reference["norms"], rel=5 * close), (name, more)
        assert found["saved"] == set(), name
        assert found["packed bytes"] * 8 == weights * 4.5 / (2 if name == "fsdp2" else 1), name


def test_settings_that_quantized_weights_rule_out_are_refused() -> None:
    """Oracle: the messages."""
    with pytest.raises(ConfigError, match=r"parallel=fsdp1 would cast .*; set parallel=(fsdp2|ddp) or tune.base=plain"):
        config(FSDP1Config(), 2)
    with pytest.raises(ConfigError, match=r"deterministic=layout computes with in float64; set tune.base=plain or"):
        config(SingleConfig(), 1, deterministic="layout", grains=4)
    with pytest.raises(ConfigError, match=r"do not divide the 36 columns of layers.0.attn.q_proj; set tune.base=plain"):
        config(SingleConfig(), 1, tiny_model())
    if FSDP2Config.mixes_dtypes:
        with pytest.raises(
            ConfigError, match=r"memory.cpu_offload=true keeps them in host memory; set memory.cpu_offload"
        ):
            config(FSDP2Config(), 2, memory=MemoryConfig(cpu_offload=True))
