"""Low-rank adapters of plain and of quantized weights under every strategy, against one process."""

import dataclasses
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.checkpoint.adapter_export import write_adapter
from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.lora import is_adapter
from fsdptoys.models.nf4 import Codebook, is_packed, unpack, unquantized_name
from fsdptoys.parallel import (
    STRATEGIES,
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base, LoRAConfig
from fsdptoys.utils.dtensor import local_tensor
from tests.harness.nf4_models import GPT2, LLAMA
from tests.harness.offloaded_runs import outcome
from tests.harness.outcomes import Outcome
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import TINY, make_config, tiny_model, with_sizes

LORA = LoRAConfig(rank=4, dropout=0.2)
NF4 = dataclasses.replace(LORA, base=Base.nf4)
QUANTIZED: dict[str, Any] = {
    "tune": NF4,
    "model": LLAMA,
    "steps": 2,
    "deterministic": False,
}


def settings_of(ranks: int, **options: Any) -> dict[str, Any]:
    """Return steps of eight sequences, three unless given."""
    shares = ranks // options.get("cp_size", 1)
    return {
        "batch_size": 8 // shares,
        "grad_accum": 1,
        "steps": 3,
        "tune": LORA,
    } | options


def config(parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    return make_config(parallel, ranks, **settings_of(ranks, **options))


@dataclass
class Tuned:
    """Results of a run."""

    outcome: Outcome
    adapters: int
    """Adapters in a checkpoint."""
    others: int
    """Other tensors in a checkpoint."""
    packed: dict[str, str]
    """Hashes of the packed weights."""
    packed_bytes: int
    """Bytes of the packed weights on this rank."""


def train_all(configs: list[Config]) -> list[Tuned]:
    results = []
    for run_config in configs:
        trainer = Trainer(run_config)
        params = trainer.strategy.held_parameters()
        sizes = [
            local_tensor(param).nbytes for name, param in params if is_packed(name)
        ]
        trainer.train()
        names = [
            key.split(".", 1)[1]
            for key in trainer.strategy.state_tensors(trainer.optimizer)
        ]
        adapters = sum(map(is_adapter, names))
        result = outcome(trainer)
        packed = {
            name: value for name, value in result.parameters.items() if is_packed(name)
        }
        results.append(
            Tuned(result, adapters, len(names) - adapters, packed, sum(sizes))
        )
    return results


NAMES = [
    name
    for name, kind in STRATEGIES.items()
    if not kind.capabilities.single_process and name != "toy_ep"
]
PACKING = [
    name
    for name, kind in STRATEGIES.items()
    if kind.capabilities.mixed_dtypes and not kind.capabilities.single_process
]
OFFLOADED = {"memory": MemoryConfig(optimizer_offload=True)}
CHECKPOINTED = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True
)
SWITCHES: dict[str, dict[str, Any]] = {
    "fsdp2 cpu offload": {"memory": MemoryConfig(cpu_offload=True)},
    "fsdp2 optimizer offload": OFFLOADED,
    "fsdp2 checkpointing": {"memory": CHECKPOINTED},
    "fsdp2 cp": {"cp_size": 2},
}
MODELS = {
    "llama": tiny_model(),
    "qwen3_moe": with_sizes(TINY["qwen3_moe"], n_experts=4),
}
LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    "ddp": (DDPConfig(), {"grad_accum": 2, "batch_size": 1}),
    "fsdp1": (FSDP1Config(), {}),
    "hsdp": (FSDP2Config(), {"fsdp_size": 2}),
    "cp": (FSDP2Config(), {"cp_size": 2}),
    "ep": (FSDP2Config(), {"ep_size": 2}),
}
BF16 = DType.bfloat16
F32 = DType.float32


def row(
    parallel: ParallelConfig, ranks: int, layout: dict[str, Any], **options: Any
) -> Row:
    """Return a run that is compared with one process of the same sequences."""
    settings = settings_of(1, **options)
    return Row(parallel, ranks, settings_of(ranks, **layout), settings, settings)


def quantized(name: str, dtype: DType = BF16, **layout: Any) -> Row:
    layout = {**QUANTIZED, **layout}
    return row(STRATEGIES[name](param_dtype=dtype), 2, layout, **QUANTIZED)


CLOSE = {name: row(STRATEGIES[name](), 2, {}, deterministic=False) for name in NAMES}
CLOSE |= {
    name: row(FSDP2Config(), 2, layout, deterministic=False)
    for name, layout in SWITCHES.items()
}
NF4_ROWS = {f"nf4 {name}": quantized(name) for name in PACKING}
NF4_ROWS |= {f"nf4 {name} float32": quantized(name, F32) for name in ("ddp", "fsdp2")}
NF4_ROWS["nf4 fsdp2 cp"] = quantized("fsdp2", cp_size=2)
NF4_ROWS["nf4 fsdp2 optimizer offload"] = quantized("fsdp2", **OFFLOADED)
CLOSE |= {label: row for label, row in NF4_ROWS.items() if row.parallel.name in PACKING}
SHORT = {"ddp", "fsdp1", "fsdp2", "toy_zero3", "fsdp2 cpu offload", "fsdp2 cp"} | {
    *("nf4 ddp", "nf4 toy_ddp", "nf4 fsdp2", "nf4 fsdp2 float32", "nf4 fsdp2 cp"),
}
EXACT = {
    f"{model} {name}": row(
        parallel, 4, layout, model=MODELS[model], deterministic="layout", grains=4
    )
    for model, (name, (parallel, layout)) in product(MODELS, LAYOUTS.items())
    if (model, name) != ("llama", "ep")
}
close = trained_rows(CLOSE, train_all, argument="name")
exact = trained_rows(EXACT, train_all)


@pytest.mark.parametrize("name", levels(CLOSE, SHORT & CLOSE.keys()))
def test_every_strategy_trains_adapters_as_one_process(name: str, close: Pairs) -> None:
    """Oracle: one process of the same sequences, with the same dropped elements; the bytes of
    quantized weights.

    Under FSDP2 a rank holds half of those: 4.5 bits a weight over two ranks. Checkpoints hold
    adapters alone.
    """
    result, expected = close[name]
    loss = 2e-6
    norm = 2e-5
    if name in NF4_ROWS:
        loss, norm = (
            (2e-5, 1e-4) if CLOSE[name].parallel.param_dtype is F32 else (2e-2, 1e-1)
        )
        layers = LLAMA.build().layers.named_parameters()
        weights = sum(param.numel() for key, param in layers if "_proj.weight" in key)
        ranks = 2 if "fsdp2" in name else 1
        assert result.packed_bytes * 8 == weights * 4.5 / ranks
    assert result.outcome.losses == pytest.approx(expected.outcome.losses, rel=loss)
    assert result.outcome.grad_norms == pytest.approx(
        expected.outcome.grad_norms, rel=norm
    )
    assert result.packed == expected.packed
    assert result.adapters == expected.adapters > 0
    assert result.others == expected.others == 0


@pytest.mark.skipif(
    not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients"
)
@pytest.mark.parametrize("row", levels(EXACT, {"qwen3_moe ep"}))
def test_adapters_have_the_bits_of_one_process_under_every_layout(
    row: str, exact: Pairs
) -> None:
    """Oracle: one process, in the layout mode."""
    result, expected = exact[row]
    assert result.outcome == expected.outcome


def compare_with_plain(configs: list[Config]) -> list[list[Outcome]]:
    """Losses and norms of each run, and of one with plain weights of the values that its quantized
    ones stand for."""
    codebook = Codebook()
    results = []
    codebook.materialize(torch.device("cpu"))
    for run_config in configs:
        trainer = Trainer(run_config)
        values: dict[str, Tensor] = {}
        for name, param in trainer.strategy.full_parameters():
            if is_packed(name):
                values[unquantized_name(name)] = unpack(
                    param, codebook.pairs, param.dtype
                ).float()
            else:
                values[name] = param.clone()

        def fill(param: Tensor, name: str, values: dict[str, Tensor] = values) -> None:
            param.data.copy_(values[name])

        plain = Trainer(dataclasses.replace(run_config, tune=LORA), param_init=fill)
        runs = []
        for run in (trainer, plain):
            run.train()
            runs.append(dataclasses.replace(outcome(run), parameters={}))
        results.append(runs)
    return results


@pytest.mark.usefixtures("unmeasured")
def test_a_run_computes_with_the_values_of_its_packed_weights() -> None:
    """Oracle: one process with plain weights of the dequantized values: every bit of losses and
    norms."""
    bfloat16 = SingleConfig(param_dtype=BF16)
    runs = [
        config(SingleConfig(), 1, **QUANTIZED),
        config(SingleConfig(), 1, **QUANTIZED | {"model": GPT2}),
        config(bfloat16, 1, **QUANTIZED),
        config(bfloat16, 1, memory=CHECKPOINTED, **QUANTIZED),
    ]
    for result, expected in run_ranks(1, compare_with_plain, runs)[0]:
        assert result == expected


def read_adapters(configs: list[Config]) -> list[dict[str, bytes]]:
    """The initial adapters of each run, in full."""
    return [
        {
            name: param.numpy().tobytes()
            for name, param in Trainer(run_config).strategy.full_parameters()
            if is_adapter(name)
        }
        for run_config in configs
    ]


@pytest.mark.usefixtures("unmeasured")
def test_runs_start_from_the_adapters_of_a_folder(tmp_path: Path) -> None:
    """Oracle: the adapters that were written."""
    adapters = {}
    for name, param in tiny_model().build().layers.named_parameters():
        if name.endswith("_proj.weight"):
            layer = f"layers.{name.removesuffix('.weight')}"
            adapters[f"{layer}.lora_a.weight"] = torch.randn(4, param.shape[1])
            adapters[f"{layer}.lora_b.weight"] = torch.randn(param.shape[0], 4)
    write_adapter(
        tmp_path / "adapter", adapters, tiny_model(), rank=4, alpha=16.0, dropout=0.0
    )
    lora = LoRAConfig(rank=4, adapter=str(tmp_path / "adapter"))
    kinds = [STRATEGIES[name]() for name in NAMES]
    runs = [config(kind, 2, tune=lora) for kind in kinds]
    for kind, values in zip(kinds, run_ranks(2, read_adapters, runs)[0], strict=True):
        assert values == {
            name: param.numpy().tobytes() for name, param in adapters.items()
        }, kind
