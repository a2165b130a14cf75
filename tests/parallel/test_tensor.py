"""Tensor parallelism: ranks that split features, and tokens between layers, train like one process.

``test_layout_mode.py`` compares the bits.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing, MemoryConfig
from fsdptoys.models.generate import Draw, generate
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.train.trainer import Trainer
from tests.harness.folders import build, write
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import (
    DOCUMENTS,
    EVEN,
    TINY,
    make_config,
    supported,
    tiny_model,
    with_sizes,
)
from tests.parallel.numeric_outcomes import (
    SGD,
    Outcome,
    assert_close,
    initial_hashes,
    train_all,
)
from tests.parallel.split_models import (
    BIASED,
    FEATURES,
    SELECTIVE,
    SMOOTH,
    STAGES,
    needs_sums,
)

MODELS: dict[str, Any] = {
    "llama": with_sizes(tiny_model(), **EVEN),
    "llama tied": with_sizes(tiny_model(tie_embeddings=True), **EVEN),
    "qwen3": with_sizes(TINY["qwen3"], **EVEN),
    "biased": BIASED,
    "qwen2": with_sizes(TINY["qwen2"], **EVEN),
    "mistral": with_sizes(TINY["mistral"], **EVEN),
    **FEATURES,
}
GATHERED = FSDP2Config(context=ContextForm.gathered)
RING = FSDP2Config(context=ContextForm.ring, wrap=Wrap.block_attn_mlp)
CHUNKS_AND_OFFLOAD = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.full,
    activation_offload=True,
    chunk_loss=True,
    chunk_tokens="16",
)
OVERLAPPED = MemoryConfig(
    cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped
)

BY_SGD: dict[str, Any] = {"optim": SGD, "steps": 1, "deterministic": False}


def row(
    model: str,
    layout: dict[str, Any],
    parallel: FSDP2Config | None = None,
    **options: Any,
) -> Row:
    """Return a run on four ranks, two of them with features unless given."""
    layout = {"tp_size": 2, **layout}
    return Row(
        parallel or FSDP2Config(),
        4,
        layout,
        {"model": MODELS[model], **BY_SGD, **options},
    )


ROWS = supported(
    {
        "tied": row("llama tied", {"memory": SELECTIVE}, **SMOOTH),
        "chunks, documents": row(
            "llama4", {"memory": CHUNKS_AND_OFFLOAD}, data=DOCUMENTS, **SMOOTH
        ),
        "biases and positions": row("gpt2", {}, data=DOCUMENTS),
        "four ranks of features": row("four key heads", {"tp_size": 4}),
        "exchanged heads": row("qwen3_moe", {"cp_size": 2}),
        "gathered keys": row("llama4", {"cp_size": 2}, GATHERED, data=DOCUMENTS),
        "rings, units of parts": row("qwen3", {"cp_size": 2}, RING),
        "states on the host": row("llama", {"memory": OVERLAPPED}),
        "hsdp2": row("qwen3_moe", {"fsdp_size": 2}),
        "biases of all layers": row("biased", {"cp_size": 2}),
        "biases, tied": row("qwen2", {"memory": SELECTIVE}, **SMOOTH),
        "scaled rotations": row("mistral", {"cp_size": 2}, RING),
    }
)
SHORT = {"tied", "biases and positions", "exchanged heads", "states on the host"}
SHORT |= {"biases of all layers"}


def without_zeros(outcome: Outcome) -> Outcome:
    """Without the biases of keys, which no loss depends on: their gradients are rounding."""
    for tensors in (outcome.grads, outcome.parameters):
        for name in [name for name in tensors if name.endswith("k_proj.bias")]:
            del tensors[name]
    return outcome


trained = trained_rows(ROWS, train_all)


@needs_sums
@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_split_features_train_as_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process: losses, norms, every gradient and parameter; accumulation, ragged
    padding, clipping."""
    assert_close(*map(without_zeros, trained[row]))


def generated(config: Config) -> list[int]:
    trainer = Trainer(config)
    prompt_T = torch.tensor([3, 1, 4, 1, 5])
    return generate(
        trainer.strategy.full_model, prompt_T, 12, 12, Draw(0.0, None, 1.0, 0)
    ).tolist()


SPLITS: dict[str, tuple[Any, FSDP2Config, int, dict[str, int]]] = {
    "gpt2": (MODELS["gpt2"], FSDP2Config(), 2, {"tp_size": 2}),
    "llama4": (MODELS["llama4"], FSDP2Config(), 4, {"tp_size": 2}),
    "stages": (
        STAGES["llama4"],
        FSDP2Config(schedule=PipelineSchedule.interleaved),
        4,
        {"tp_size": 2, "pp_size": 2},
    ),
}
"""Label → model, strategy, ranks and mesh."""


@pytest.mark.parametrize("name", levels(SPLITS, {"gpt2"}))
@needs_sums
def test_split_models_begin_with_the_values_of_one_process(
    tmp_path: Path, name: str
) -> None:
    """Oracle: one process, from the seed and from a folder in Hugging Face format; and the tokens
    it generates."""
    model, parallel, ranks, mesh = SPLITS[name]
    write(tmp_path / "folder", build(model))
    models = [model, dataclasses.replace(model, init_from=str(tmp_path / "folder"))]
    options: dict[str, Any] = {"steps": 1, "deterministic": False}
    alone = [
        make_config(SingleConfig(), 1, model=model_config, **options)
        for model_config in models
    ]
    shared = [
        make_config(parallel, ranks, model=model_config, **mesh, **options)
        for model_config in models
    ]
    assert (
        run_ranks(ranks, initial_hashes, shared)[0]
        == run_ranks(1, initial_hashes, alone)[0]
    )
    assert (
        run_ranks(ranks, generated, shared[1])
        == run_ranks(1, generated, alone[1]) * ranks
    )
