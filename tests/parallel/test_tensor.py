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
from fsdptoys.optim import AdamWConfig, MuonConfig, OptimStateDType
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, SingleConfig, ToyFSDPConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from fsdptoys.utils.torchao import torchao_fault
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build, write
from tests.parallel.groups import Pairs, Row, levels, trained_rows
from tests.parallel.runs import DOCUMENTS, EVEN, TINY, make_config, refusal, supported, tiny_model, with_sizes
from tests.parallel.test_expert_parallelism import SGD, Outcome, assert_close, split, train_all
from tests.parallel.test_layout_mode import FEATURES, SELECTIVE, SMOOTH, STAGES, needs_sums

MODELS: dict[str, Any] = {
    "llama": with_sizes(tiny_model(), **EVEN),
    "llama tied": with_sizes(tiny_model(tie_embeddings=True), **EVEN),
    "qwen3": with_sizes(TINY["qwen3"], **EVEN),
    **FEATURES,
}
GATHERED = FSDP2Config(context=ContextForm.gathered)
RING = FSDP2Config(context=ContextForm.ring, wrap=Wrap.block_attn_mlp)
CHUNKS_AND_OFFLOAD = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.full, activation_offload=True, chunk_loss=True, chunk_tokens="16"
)
OVERLAPPED = MemoryConfig(cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped)

BY_SGD: dict[str, Any] = {"optim": SGD, "steps": 1, "deterministic": False}


def row(model: str, layout: dict[str, Any], parallel: FSDP2Config | None = None, **options: Any) -> Row:
    """Return a run on four ranks, two of them with features unless given."""
    layout = {"tp_size": 2, **layout}
    return Row(parallel or FSDP2Config(), 4, layout, {"model": MODELS[model], **BY_SGD, **options})


ROWS = supported(
    {
        "tied": row("llama tied", {"memory": SELECTIVE}, **SMOOTH),
        "chunks, documents": row("llama4", {"memory": CHUNKS_AND_OFFLOAD}, data=DOCUMENTS, **SMOOTH),
        "biases and positions": row("gpt2", {}, data=DOCUMENTS),
        "four ranks of features": row("four key heads", {"tp_size": 4}),
        "exchanged heads": row("qwen3_moe", {"cp_size": 2}),
        "gathered keys": row("llama4", {"cp_size": 2}, GATHERED, data=DOCUMENTS),
        "rings, units of parts": row("qwen3", {"cp_size": 2}, RING),
        "states on the host": row("llama", {"memory": OVERLAPPED}),
        "hsdp2": row("qwen3_moe", {"fsdp_size": 2}),
    }
)
SHORT = {"tied", "biases and positions", "exchanged heads", "states on the host"}


def without_zeros(outcome: Outcome) -> Outcome:
    """Without the biases of keys, which no loss depends on: their gradients are rounding."""
    for named in (outcome.grads, outcome.parameters):
        for name in [name for name in named if name.endswith("k_proj.bias")]:
            del named[name]
    return outcome


trained = trained_rows(ROWS, train_all)


@needs_sums
@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_split_features_train_as_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process: losses, norms, every gradient and parameter; accumulation, ragged padding, clipping."""
    assert_close(*map(without_zeros, trained[row]))


@pytest.mark.usefixtures("unmeasured")
def test_optimizer_steps_in_the_backward_count_norms_once() -> None:
    """Oracle: the same layout without them: losses and norms, in every bit."""
    common: dict[str, Any] = {"model": MODELS["llama"], "deterministic": True, "optim": AdamWConfig(lr=1e-2)}
    common |= {"grad_accum": 1, "max_grad_norm": None, "skip_nonfinite": False, "tp_size": 2}
    rows = [split(2, 1, **common, memory=MemoryConfig(optimizer_in_backward=within)) for within in (False, True)]
    after, within = run_ranks(2, train_all, rows)[0]
    assert (after.losses, after.norms) == (within.losses, within.norms)


def initial(configs: list[Config]) -> list[dict[str, str]]:
    return [hash_parameters(Trainer(config)) for config in configs]


def generated(config: Config) -> list[int]:
    trainer = Trainer(config)
    prompt_T = torch.tensor([3, 1, 4, 1, 5])
    return generate(trainer.strategy.full_model, prompt_T, 12, 12, Draw(0.0, None, 1.0, 0)).tolist()


SPLITS: dict[str, tuple[Any, FSDP2Config, int, dict[str, int]]] = {
    "gpt2": (MODELS["gpt2"], FSDP2Config(), 2, {"tp_size": 2}),
    "llama4": (MODELS["llama4"], FSDP2Config(), 4, {"tp_size": 2}),
    "stages": (
        *(STAGES["llama4"], FSDP2Config(schedule=PipelineSchedule.interleaved), 4),
        {"tp_size": 2, "pp_size": 2},
    ),
}
"""Label → model, strategy, ranks and mesh."""


@pytest.mark.parametrize("name", levels(SPLITS, {"gpt2"}))
@needs_sums
def test_split_models_begin_with_the_values_of_one_process(tmp_path: Path, name: str) -> None:
    """Oracle: one process, from the seed and from a folder in Hugging Face format; and the tokens it generates."""
    model, parallel, ranks, mesh = SPLITS[name]
    write(tmp_path / "folder", build(model))
    models = [model, dataclasses.replace(model, init_from=str(tmp_path / "folder"))]
    options: dict[str, Any] = {"steps": 1, "deterministic": False}
    alone = [make_config(SingleConfig(), 1, model=each, **options) for each in models]
    shared = [make_config(parallel, ranks, model=each, **mesh, **options) for each in models]
    assert run_ranks(ranks, initial, shared)[0] == run_ranks(1, initial, alone)[0]
    assert run_ranks(ranks, generated, shared[1]) == run_ranks(1, generated, alone[1]) * ranks


REFUSED: dict[str, dict[str, Any]] = {
    "mesh.tp_size=2 is not an option of parallel=single; set parallel=fsdp2 or mesh.tp_size=1": {
        "parallel": SingleConfig(),
        "ranks": 1,
    },
    "mesh.tp_size=2 is not an option of parallel=ddp; set parallel=fsdp2 or mesh.tp_size=1": {"parallel": DDPConfig()},
    "mesh.tp_size=2 is not an option of parallel=fsdp1; set parallel=fsdp2 or mesh.tp_size=1": {
        "parallel": FSDP1Config()
    },
    "mesh.tp_size=2 is not an option of parallel=toy_fsdp; set parallel=fsdp2 or mesh": {"parallel": ToyFSDPConfig()},
    "mesh.tp_size=3 must divide the 4 ranks that share a copy of the parameters; set mesh.tp_size=2": {"tp_size": 3},
    "mesh.cp_size=4 must divide the 2 ranks that share a copy of the parameters and features (mesh.tp_size=2); set": {
        "cp_size": 4
    },
    "mesh.tp_size=4 splits features, and must divide model.n_kv_heads=2; set mesh.tp_size=2": {"tp_size": 4},
    "mesh.tp_size=2 splits features, and must divide model.vocab_size=67; set mesh.tp_size=1 or model.vocab_size=68": {
        "model": with_sizes(MODELS["llama"], vocab_size=67)
    },
    "mesh.tp_size=2 splits features, and must divide model.ffn_dim=51; set mesh.tp_size=1": {
        "model": with_sizes(MODELS["llama"], ffn_dim=51)
    },
    "train.seq_len=23 must be a multiple of 2, the pieces into which mesh.tp_size=2 cuts a sequence between layers; ": {
        "seq_len": 23
    },
    "parallel.context=ulysses shares heads among mesh.cp_size=4 ranks, which does not divide the 2 heads of a rank of "
    "mesh.tp_size=2; set parallel.context=gathered": {
        "parallel": FSDP2Config(context=ContextForm.ulysses),
        "ranks": 8,
        "cp_size": 4,
        "model": MODELS["four key heads"],
    },
    "optim=muon orthogonalizes full matrices, which mesh.tp_size=2 splits; set optim=adamw or mesh.tp_size=1": {
        "optim": MuonConfig()
    },
    "train.float8=tensorwise scales by the largest number of a full matrix, which mesh.tp_size=2 splits; set": {
        "float8": Float8.tensorwise
    },
    "train.slices=1 must be a multiple of mesh.tp_size=2, whose ranks have whole slices with train.deterministic="
    "layout; set train.slices=2": {"deterministic": "layout"},
    "train.slices=4 must divide model.n_kv_heads=2; set train.slices=2": {"deterministic": "layout", "slices": 4},
    "train.grains=3 must be a multiple of 2, the pieces into which mesh.tp_size=2 cuts a sequence with mesh.cp_size=1; "
    "set train.grains=6": {"deterministic": "layout", "slices": 2, "grains": 3},
    "tune=lora adds to the layers that mesh.tp_size=2 splits; set mesh.tp_size=1 or tune=full": {"tune": LoRAConfig()},
    "tune=lora adds to the layers that train.slices=2 splits; set train.slices=1 or tune=full": {
        "tune": LoRAConfig(),
        "tp_size": 1,
        "deterministic": "layout",
        "slices": 2,
    },
    "train.slices=2 does nothing as set; set train.deterministic=layout or leave it out": {"slices": 2},
}
"""Beginning of the sentence → settings, on four ranks under FSDP2 with two ranks of features unless given."""


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_features_cannot_be_split_with_are_refused(message: str) -> None:
    """Oracle: the sentence, which names key, value and fix."""
    settings = {"parallel": FSDP2Config(), "ranks": 4, "model": MODELS["llama"], "tp_size": 2, **REFUSED[message]}
    if "deterministic" in settings and "tune" not in settings and not fsdp2_can_sum():
        pytest.skip("FSDP2 of this torch cannot sum gradients")
    assert refusal(**settings).startswith(message)


@pytest.mark.skipif(torchao_fault() is not None, reason=f"torchao {torchao_fault()}")
def test_states_of_few_bits_are_refused() -> None:
    """Oracle: the sentence."""
    optim = AdamWConfig(state_dtype=OptimStateDType.int8)
    found = refusal(FSDP2Config(), 4, tp_size=2, model=MODELS["llama"], optim=optim)
    assert found.startswith("optim.state_dtype=int8 keeps a scale for each part of a full row")
