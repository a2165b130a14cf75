"""Tensor parallelism: ranks that split features, and tokens between layers, train like one process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.models.generate import Draw, generate
from fsdptoys.optim import AdamWConfig, MuonConfig, OptimStateDType
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, SingleConfig, ToyFSDPConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp import TORCH, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from fsdptoys.utils.torchao import torchao_fault
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build, write
from tests.parallel import test_layout_mode
from tests.parallel.runs import TINY, make_config, tiny_model
from tests.parallel.test_expert_parallelism import Outcome, assert_close, single, split, train_all
from tests.parallel.test_layout_mode import CHUNKED, FULL, SELECTIVE, Case, assert_bits_of_one_process, resume
from tests.train.resumed import kept

EVEN: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "ffn_dim": 52, "vocab_size": 68, "dim": 40}
"""Sizes that two ranks divide; shards of what is left are still padded."""


def even(model: ModelConfig, **changes: Any) -> Any:
    known = {field.name for field in dataclasses.fields(model)}
    return dataclasses.replace(model, **{key: value for key, value in {**EVEN, **changes}.items() if key in known})


EXPERTS = {"n_experts": 4, "expert_ffn_dim": 24}
MODELS: dict[str, Any] = {
    "llama": even(tiny_model()),
    "llama tied": even(tiny_model(tie_embeddings=True)),
    "qwen3": even(TINY["qwen3"]),
    "qwen3_moe": even(TINY["qwen3_moe"], **EXPERTS),
    "llama4": even(TINY["llama4"], **EXPERTS, attention_chunk_len=12),
    "gpt2": even(TINY["gpt2"], ffn_dim=None),
}
FOUR_KEY_HEADS = even(tiny_model(), n_kv_heads=4)
DOCUMENTS = SyntheticConfig(branching=60, mask_documents=True)
GATHERED, RING = (
    FSDP2Config(context=ContextForm.gathered),
    FSDP2Config(context=ContextForm.ring, wrap=Wrap.block_attn_mlp),
)
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1, "z_loss_coef": 1e-3}

full, selective = GradientCheckpointing.full, GradientCheckpointing.selective
CHUNKS_AND_OFFLOAD = MemoryConfig(
    gradient_checkpointing=full, activation_offload=True, chunk_loss=True, chunk_tokens="16"
)
OVERLAPPED = MemoryConfig(cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped)

needs_sums = pytest.mark.skipif(not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients")

Row = tuple[str, dict[str, Any], dict[str, Any]]
"""Model, settings that one process shares, and settings of the layout."""
ROWS: dict[str, Row] = {
    "tied": ("llama tied", SMOOTH, {"tp_size": 2, "memory": MemoryConfig(gradient_checkpointing=selective)}),
    "chunks, documents": (
        *("llama4", SMOOTH | {"data": DOCUMENTS}),
        {"tp_size": 2, "memory": CHUNKS_AND_OFFLOAD},
    ),
    "biases and positions": ("gpt2", {"data": DOCUMENTS}, {"tp_size": 2}),
    "four ranks of features": ("llama", {"model": FOUR_KEY_HEADS}, {"tp_size": 4}),
    "exchanged heads": ("qwen3_moe", {}, {"tp_size": 2, "cp_size": 2}),
    "gathered keys": ("llama4", {"data": DOCUMENTS}, {"tp_size": 2, "cp_size": 2, "parallel": GATHERED}),
    "rings, units of parts": ("qwen3", {}, {"tp_size": 2, "cp_size": 2, "parallel": RING}),
    "states on the host": ("llama", {}, {"tp_size": 2, "memory": OVERLAPPED}),
}
if TORCH >= (2, 8):  # with which FSDP2 replicates on a CPU
    ROWS["replicas"] = ("qwen3_moe", {}, {"tp_size": 2, "fsdp_size": 2})


def without_zeros(outcome: Outcome) -> Outcome:
    """Without the biases of keys, which no loss depends on: their gradients are rounding."""
    for named in (outcome.grads, outcome.parameters):
        for name in [name for name in named if name.endswith("k_proj.bias")]:
            del named[name]
    return outcome


@pytest.mark.usefixtures("unmeasured")
@needs_sums
def test_split_features_train_as_one_process() -> None:
    """Oracle: one process: losses, norms, every gradient and parameter; accumulation, ragged padding, clipping."""
    alone, shared = [], []
    for name, options, layout in ROWS.values():
        common = {"model": MODELS[name], "steps": 1, **options}
        data_ranks = 4 // layout["tp_size"] // layout.get("cp_size", 1)
        alone.append(single(data_ranks, **common))
        shared.append(
            split(4, layout.get("ep_size", 1), **common, **{k: v for k, v in layout.items() if k != "ep_size"})
        )
    expected, found = run_ranks(1, train_all, alone)[0], run_ranks(4, train_all, shared)[0]
    for row, ours, theirs in zip(ROWS, found, expected, strict=True):
        try:
            assert_close(without_zeros(ours), without_zeros(theirs))
        except AssertionError as difference:
            raise AssertionError(row) from difference


@pytest.mark.usefixtures("unmeasured")
def test_optimizer_steps_in_the_backward_count_norms_once() -> None:
    """Oracle: the same layout without them: losses and norms, in every bit."""
    common: dict[str, Any] = {"model": MODELS["llama"], "deterministic": True, "optim": AdamWConfig(lr=1e-2)}
    common |= {"grad_accum": 1, "max_grad_norm": None, "skip_nonfinite": False, "tp_size": 2}
    rows = [split(2, 1, **common, memory=MemoryConfig(optimizer_in_backward=within)) for within in (False, True)]
    after, within = run_ranks(2, train_all, rows)[0]
    assert (after.losses, after.norms) == (within.losses, within.norms)


@pytest.mark.usefixtures("unmeasured")
@needs_sums
def test_layout_mode_has_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one process with as many slices, whose micro-batch is the global batch; held-out losses too."""
    monkeypatch.setattr(test_layout_mode, "MODELS", MODELS | {"four key heads": FOUR_KEY_HEADS})
    slices: dict[str, Any] = {"slices": 2}
    two = {"tp_size": 2}
    cases: list[Case] = [
        ("four key heads", DType.float32, {"slices": 4, "grains": 8}, {"tp 4": (FSDP2Config(), {"tp_size": 4})}),
        (
            *("qwen3_moe", DType.bfloat16, slices),
            {"cp": (GATHERED, two | {"cp_size": 2, "memory": SELECTIVE})},
        ),
        (
            *("llama4", DType.bfloat16, slices | SMOOTH | {"memory": CHUNKED}),
            {"ep": (FSDP2Config(), two | {"ep_size": 4})},
        ),
        (
            *("gpt2", DType.float32, slices | {"data": DOCUMENTS}),
            {"cp": (FSDP2Config(), two | {"cp_size": 2, "memory": FULL}), "fsdp1": (FSDP1Config(), {})},
        ),
    ]
    assert_bits_of_one_process(4, cases)


@needs_sums
def test_a_run_resumed_with_other_features_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one process in one piece; the other run begins with two ranks of features, goes on with none of them."""
    monkeypatch.setattr("fsdptoys.metrics.plots.draw_loss", lambda *_: None)  # most of the time of such small runs
    monkeypatch.setattr(test_layout_mode, "MODELS", MODELS)

    def part(parallel: Any, ranks: int, folder: str = "run", **more: Any) -> Config:
        made = test_layout_mode.config(parallel, ranks, "gpt2", DType.float32, steps=4, slices=2, eval_every=0, **more)
        return kept(made, tmp_path / folder, every=1)

    (expected,) = run_ranks(1, resume, part(SingleConfig(), 1, "whole", batch_size=4), None)
    run_ranks(4, resume, part(FSDP2Config(), 4, tp_size=2), 2)
    run_ranks(2, resume, part(FSDP2Config(), 2, batch_size=2), 3)
    run_ranks(2, resume, part(FSDP2Config(), 2, tp_size=2), 4)
    (found,) = run_ranks(1, resume, part(SingleConfig(), 1), None)
    assert found == expected


def initial(configs: list[Config]) -> list[dict[str, str]]:
    return [hash_parameters(Trainer(config)) for config in configs]


def generated(config: Config) -> list[int]:
    trainer = Trainer(config)
    prompt_T = torch.tensor([3, 1, 4, 1, 5])
    return generate(trainer.strategy.model, prompt_T, 12, 12, Draw(0.0, None, 1.0, 0)).tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama4"])
@needs_sums
def test_initial_values_of_shards_within_features_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    """Oracle: one process, from the seed and from a folder in Hugging Face format; and the tokens it generates."""
    model = MODELS[family]
    write(tmp_path / "folder", build(model))
    models = [model, dataclasses.replace(model, init_from=str(tmp_path / "folder"))]
    options: dict[str, Any] = {"steps": 1, "deterministic": False}
    alone = [make_config(SingleConfig(), 1, model=each, **options) for each in models]
    shared = [make_config(FSDP2Config(), 4, model=each, tp_size=2, **options) for each in models]
    assert run_ranks(4, initial, shared)[0] == run_ranks(1, initial, alone)[0]
    by_rank = run_ranks(4, generated, shared[1])
    assert by_rank == run_ranks(1, generated, alone[1]) * 4


REFUSED: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "mesh.tp_size=2 is not an option of parallel=single; set parallel=fsdp2 or mesh.tp_size=1": (SingleConfig(), 1, {}),
    "mesh.tp_size=2 is not an option of parallel=ddp; set parallel=fsdp2 or mesh.tp_size=1": (DDPConfig(), 4, {}),
    "mesh.tp_size=2 is not an option of parallel=fsdp1; set parallel=fsdp2 or mesh.tp_size=1": (FSDP1Config(), 4, {}),
    "mesh.tp_size=2 is not an option of parallel=toy_fsdp; set parallel=fsdp2 or mesh": (ToyFSDPConfig(), 4, {}),
    "mesh.tp_size=3 must divide the 4 ranks that share a copy of the parameters; set mesh.tp_size=2": (
        *(FSDP2Config(), 4),
        {"tp_size": 3},
    ),
    "mesh.cp_size=4 must divide the 2 ranks that share a copy of the parameters and features (mesh.tp_size=2); set": (
        *(FSDP2Config(), 4),
        {"cp_size": 4},
    ),
    "mesh.tp_size=4 splits features, and must divide model.n_kv_heads=2; set mesh.tp_size=2": (
        *(FSDP2Config(), 4),
        {"tp_size": 4},
    ),
    "mesh.tp_size=2 splits features, and must divide model.vocab_size=67; set mesh.tp_size=1 or model.vocab_size=68": (
        *(FSDP2Config(), 4),
        {"model": even(tiny_model(), vocab_size=67)},
    ),
    "mesh.tp_size=2 splits features, and must divide model.ffn_dim=51; set mesh.tp_size=1": (
        *(FSDP2Config(), 4),
        {"model": even(tiny_model(), ffn_dim=51)},
    ),
    "train.seq_len=23 must be a multiple of 2, the pieces into which mesh.tp_size=2 cuts a sequence between layers; ": (
        *(FSDP2Config(), 4),
        {"seq_len": 23},
    ),
    "parallel.context=ulysses shares heads among mesh.cp_size=4 ranks, which does not divide the 2 heads of a rank of "
    "mesh.tp_size=2; set parallel.context=gathered": (
        *(FSDP2Config(context=ContextForm.ulysses), 8),
        {"cp_size": 4, "model": FOUR_KEY_HEADS},
    ),
    "optim=muon orthogonalizes full matrices, which mesh.tp_size=2 splits; set optim=adamw or mesh.tp_size=1": (
        *(FSDP2Config(), 4),
        {"optim": MuonConfig()},
    ),
    "train.float8=tensorwise scales by the largest number of a full matrix, which mesh.tp_size=2 splits; set": (
        *(FSDP2Config(), 4),
        {"float8": Float8.tensorwise},
    ),
    "train.slices=1 must be a multiple of mesh.tp_size=2, whose ranks have whole slices with train.deterministic="
    "layout; set train.slices=2": (
        *(FSDP2Config(), 4),
        {"deterministic": "layout"},
    ),
    "train.slices=4 must divide model.n_kv_heads=2; set train.slices=2": (
        *(FSDP2Config(), 4),
        {"deterministic": "layout", "slices": 4},
    ),
    "train.grains=3 must be a multiple of 2, the pieces into which mesh.tp_size=2 cuts a sequence with mesh.cp_size=1; "
    "set train.grains=6": (
        *(FSDP2Config(), 4),
        {"deterministic": "layout", "slices": 2, "grains": 3},
    ),
    "tune=lora adds to the layers that mesh.tp_size=2 splits; set mesh.tp_size=1 or tune=full": (
        *(FSDP2Config(), 4),
        {"tune": LoRAConfig()},
    ),
    "tune=lora adds to the layers that train.slices=2 splits; set train.slices=1 or tune=full": (
        *(FSDP2Config(), 4),
        {"tune": LoRAConfig(), "tp_size": 1, "deterministic": "layout", "slices": 2},
    ),
    "train.slices=2 does nothing as set; set train.deterministic=layout or leave it out": (
        *(FSDP2Config(), 4),
        {"slices": 2},
    ),
}
"""Beginning of the sentence → strategy, ranks and settings, with two ranks of features unless given."""


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_features_cannot_be_split_with_are_refused(message: str) -> None:
    """Oracle: the sentence, which names key, value and fix."""
    parallel, ranks, settings = REFUSED[message]
    if "deterministic" in settings and "tune" not in settings and not fsdp2_can_sum():
        pytest.skip("FSDP2 of this torch cannot sum gradients")
    with pytest.raises(ConfigError) as refused:
        make_config(parallel, ranks, **{"model": MODELS["llama"], "tp_size": 2, **settings})
    assert str(refused.value).startswith(message)


@pytest.mark.skipif(torchao_fault() is not None, reason=f"torchao {torchao_fault()}")
def test_states_of_few_bits_are_refused() -> None:
    """Oracle: the sentence."""
    optim = AdamWConfig(state_dtype=OptimStateDType.int8)
    with pytest.raises(ConfigError, match=r"optim\.state_dtype=int8 keeps a scale for each part of a full row"):
        make_config(FSDP2Config(), 4, tp_size=2, model=MODELS["llama"], optim=optim)
