"""Low-rank adapters under every strategy, against one process."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.checkpoint.adapter_export import write_adapter
from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.lora import is_adapter
from fsdptoys.parallel import STRATEGIES, DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig
from fsdptoys.parallel.capabilities import CAPABILITIES
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from tests.harness.offloaded_runs import outcome
from tests.harness.outcomes import Outcome
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import TINY, make_config, tiny_model, with_sizes

LORA = LoRAConfig(rank=4, dropout=0.2)


def settings_of(ranks: int, **options: Any) -> dict[str, Any]:
    """Return three steps of eight sequences."""
    shares = ranks // options.get("cp_size", 1)
    return {"batch_size": 8 // shares, "grad_accum": 1, "steps": 3, "tune": LORA} | options


def config(parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    return make_config(parallel, ranks, **settings_of(ranks, **options))


def train_all(configs: list[Config]) -> list[tuple[Outcome, int, int]]:
    """Of each run its outcome, and the numbers of tensors that a checkpoint holds, of adapters and
    of anything else."""
    found = []
    for each in configs:
        trainer = Trainer(each)
        trainer.train()
        names = [key.split(".", 1)[1] for key in trainer.strategy.state_tensors(trainer.optimizer)]
        adapters = sum(map(is_adapter, names))
        found.append((outcome(trainer), adapters, len(names) - adapters))
    return found


NAMES = [name for name, can in CAPABILITIES.items() if not can.single_process and name != "toy_ep"]
SWITCHES: dict[str, dict[str, Any]] = {
    "fsdp2 cpu offload": {"memory": MemoryConfig(cpu_offload=True)},
    "fsdp2 optimizer offload": {"memory": MemoryConfig(optimizer_offload=True)},
    "fsdp2 checkpointing": {
        "memory": MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True)
    },
    "fsdp2 cp": {"cp_size": 2},
}
MODELS = {"llama": tiny_model(), "qwen3_moe": with_sizes(TINY["qwen3_moe"], n_experts=4)}
LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    "ddp": (DDPConfig(), {"grad_accum": 2, "batch_size": 1}),
    "fsdp1": (FSDP1Config(), {}),
    "hsdp": (FSDP2Config(), {"fsdp_size": 2}),
    "cp": (FSDP2Config(), {"cp_size": 2}),
    "ep": (FSDP2Config(), {"ep_size": 2}),
}


def row(parallel: ParallelConfig, ranks: int, layout: dict[str, Any], **options: Any) -> Row:
    """Return a run that is compared with one process of the same sequences."""
    settings = settings_of(1, **options)
    return Row(parallel, ranks, settings_of(ranks, **layout), settings, settings)


CLOSE = {name: row(STRATEGIES[name](), 2, {}, deterministic=False) for name in NAMES}
CLOSE |= {
    name: row(FSDP2Config(), 2, layout, deterministic=False) for name, layout in SWITCHES.items()
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


@pytest.mark.parametrize(
    "name", levels(CLOSE, {"ddp", "fsdp1", "fsdp2", "toy_zero3", "fsdp2 cpu offload", "fsdp2 cp"})
)
def test_every_strategy_trains_adapters_as_one_process(name: str, close: Pairs) -> None:
    """Oracle: one process of the same sequences, with the same dropped elements; checkpoints hold
    adapters alone."""
    (found, *saved), (expected, adapters, rest) = close[name]
    assert found.losses == pytest.approx(expected.losses, rel=2e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5)
    assert saved == [adapters, 0] and adapters > 0 and rest == 0


@pytest.mark.skipif(not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients")
@pytest.mark.parametrize("row", levels(EXACT, {"qwen3_moe ep"}))
def test_adapters_have_the_bits_of_one_process_under_every_layout(row: str, exact: Pairs) -> None:
    """Oracle: one process, in the layout mode."""
    found, expected = exact[row]
    assert found == expected


def read_adapters(configs: list[Config]) -> list[dict[str, bytes]]:
    """The initial adapters of each run, in full."""
    return [
        {
            name: param.numpy().tobytes()
            for name, param in Trainer(each).strategy.full_parameters()
            if is_adapter(name)
        }
        for each in configs
    ]


@pytest.mark.usefixtures("unmeasured")
def test_runs_start_from_the_adapters_of_a_folder(tmp_path: Path) -> None:
    """Oracle: the adapters that were written."""
    with torch.device("meta"):
        model = tiny_model().build()
    shapes = {
        name: (param.shape, name.removesuffix(".weight"))
        for name, param in model.layers.named_parameters()
    }
    layers = {
        f"layers.{layer}": shape for shape, layer in shapes.values() if layer.endswith("_proj")
    }
    adapters = {
        f"{layer}.lora_a.weight": torch.randn(4, shape[1]) for layer, shape in layers.items()
    }
    adapters |= {
        f"{layer}.lora_b.weight": torch.randn(shape[0], 4) for layer, shape in layers.items()
    }
    write_adapter(tmp_path / "adapter", adapters, tiny_model(), rank=4, alpha=16.0, dropout=0.0)
    lora = LoRAConfig(rank=4, adapter=str(tmp_path / "adapter"))
    kinds = [STRATEGIES[name]() for name in NAMES]
    runs = [config(kind, 2, tune=lora) for kind in kinds]
    for kind, found in zip(kinds, run_ranks(2, read_adapters, runs)[0], strict=True):
        assert found == {name: param.numpy().tobytes() for name, param in adapters.items()}, kind
