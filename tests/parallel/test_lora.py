"""Low-rank adapters under every strategy, against one process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.checkpoint.adapter_folder import write_adapter
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.lora import is_adapter
from fsdptoys.parallel import STRATEGIES, DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from scripts.parity import Outcome, hash_parameters
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config, tiny_model

LORA = LoRAConfig(rank=4, dropout=0.2)
OFFLOADED = {"cpu_offload": True}, {"optimizer_offload": True}


def config(parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    """Three steps of eight sequences."""
    shares = ranks // options.get("cp_size", 1)
    settings = {"batch_size": 8 // shares, "grad_accum": 1, "steps": 3, "tune": LORA} | options
    return make_config(dataclasses.replace(parallel), ranks, **settings)


def train_all(configs: list[Config]) -> list[tuple[Outcome, int, int]]:
    """Of each run its outcome, and the numbers of tensors that a checkpoint holds, of adapters and of anything else."""
    found = []
    for each in configs:
        trainer = Trainer(each)
        trainer.train()
        names = [key.split(".", 1)[1] for key in trainer.strategy.state_tensors(trainer.optimizer)]
        adapters = sum(map(is_adapter, names))
        losses, norms = ([getattr(step, name) for step in trainer.history] for name in ("loss", "grad_norm"))
        found.append((Outcome(losses, norms, hash_parameters(trainer)), adapters, len(names) - adapters))
    return found


@pytest.mark.usefixtures("unmeasured")
def test_every_strategy_trains_adapters_as_one_process() -> None:
    """Oracle: one process of the same sequences, with the same dropped elements; checkpoints hold adapters alone."""
    names = [name for name, kind in STRATEGIES.items() if not kind.single_process and name != "toy_ep"]
    (expected, adapters, rest), *_ = run_ranks(1, train_all, [config(SingleConfig(), 1, deterministic=False)])[0]
    assert adapters > 0 and rest == 0
    rows = {name: config(STRATEGIES[name](), 2, deterministic=False) for name in names}
    switches = [*OFFLOADED, {"gradient_checkpointing": GradientCheckpointing.full, "chunk_loss": True}]
    rows |= {str(each): config(FSDP2Config(), 2, deterministic=False, memory=MemoryConfig(**each)) for each in switches}
    rows["cp"] = config(FSDP2Config(), 2, deterministic=False, cp_size=2)
    for name, (outcome, *held) in zip(rows, run_ranks(2, train_all, list(rows.values()))[0], strict=True):
        assert outcome.losses == pytest.approx(expected.losses, rel=2e-6), name
        assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5), name
        assert held == [adapters, 0], name


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.skipif(not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients")
def test_adapters_have_the_bits_of_one_process_under_every_layout() -> None:
    """Oracle: one process, in the layout mode."""
    options: dict[str, Any] = {"deterministic": "layout", "grains": 4}
    models = {"llama": tiny_model(), "qwen3_moe": dataclasses.replace(TINY["qwen3_moe"], n_experts=4)}  # type: ignore[call-arg]
    expected = run_ranks(1, train_all, [config(SingleConfig(), 1, model=each, **options) for each in models.values()])
    layouts: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
        "ddp": (DDPConfig(), {"grad_accum": 2, "batch_size": 1}),
        "fsdp1": (FSDP1Config(), {}),
        "hsdp": (FSDP2Config(), {"fsdp_size": 2}),
        "cp": (FSDP2Config(), {"cp_size": 2}),
    }
    rows = [
        (name, layout, config(parallel, 4, model=model, **options, **own))
        for name, model in models.items()
        for layout, (parallel, own) in (
            layouts | ({"ep": (FSDP2Config(), {"ep_size": 2})} if "moe" in name else {})
        ).items()
    ]
    found = run_ranks(4, train_all, [row for _, _, row in rows])[0]
    references = dict(zip(models, expected[0], strict=True))
    assert [
        (name, layout) for (name, layout, _), each in zip(rows, found, strict=True) if each != references[name]
    ] == []


def read_adapters(configs: list[Config]) -> list[dict[str, bytes]]:
    """The initial adapters of each run, in full."""
    return [
        {name: param.numpy().tobytes() for name, param in Trainer(each).strategy.full_parameters() if is_adapter(name)}
        for each in configs
    ]


@pytest.mark.usefixtures("unmeasured")
def test_runs_start_from_the_adapters_of_a_folder(tmp_path: Path) -> None:
    """Oracle: the adapters that were written."""
    with torch.device("meta"):
        model = tiny_model().build()
    shapes = {name: (param.shape, name.removesuffix(".weight")) for name, param in model.layers.named_parameters()}
    layers = {f"layers.{layer}": shape for shape, layer in shapes.values() if layer.endswith("_proj")}
    adapters = {f"{layer}.lora_a.weight": torch.randn(4, shape[1]) for layer, shape in layers.items()}
    adapters |= {f"{layer}.lora_b.weight": torch.randn(shape[0], 4) for layer, shape in layers.items()}
    write_adapter(tmp_path / "adapter", adapters, tiny_model(), rank=4, alpha=16.0, dropout=0.0)
    lora = LoRAConfig(rank=4, adapter=str(tmp_path / "adapter"))
    kinds = [kind() for name, kind in STRATEGIES.items() if not kind.single_process and name != "toy_ep"]
    runs = [config(kind, 2, tune=lora) for kind in kinds]
    for kind, found in zip(kinds, run_ranks(2, read_adapters, runs)[0], strict=True):
        assert found == {name: param.numpy().tobytes() for name, param in adapters.items()}, kind


def test_settings_that_adapters_rule_out_are_refused() -> None:
    """Oracle: the messages."""
    with pytest.raises(ConfigError, match=r"use_orig_params=false; set parallel.use_orig_params=true"):
        config(FSDP1Config(use_orig_params=False), 2)
    with pytest.raises(
        ConfigError, match=r"tune.targets names gate_proj, which is no linear .*gpt2.*targets=\[q_proj\]"
    ):
        config(SingleConfig(), 1, model=TINY["gpt2"], tune=LoRAConfig(targets=["q_proj", "gate_proj"]))
    with pytest.raises(ConfigError, match=r"tune.targets names c_attn, which is none of q_proj"):
        LoRAConfig(targets=["c_attn"])
