"""The toy's context parallelism in the trainer: ranks that share sequences train like one process."""

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import ParallelConfig, SingleConfig, ToyCPConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config, tiny_model

MODELS: dict[str, ModelConfig] = {"llama": tiny_model(), **TINY}
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True)

Losses = list[tuple[float, float]]


def config_of(parallel: ParallelConfig, ranks: int, name: str, cp_size: int = 1) -> Config:
    """A run of two steps and an evaluation."""
    # A simulated rank evaluates no batches of its own.
    options = {"steps": 2, "deterministic": False, "eval_every": 2}
    options["eval_batches"] = getattr(parallel, "simulated_ranks", 1)
    memory = CHECKPOINTED if name == "qwen3" else None
    return make_config(parallel, ranks, cp_size=cp_size, model=MODELS[name], memory=memory, **options)


def train(configs: list[Config]) -> list[Losses]:
    """Losses and gradient norms of each run, and its last held-out loss."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        held_out = trainer._evaluate(trainer.steps_done)
        results.append([*((step.loss, step.grad_norm) for step in trainer.history), (held_out, 1.0)])
    return results


@pytest.mark.parametrize(("ranks", "cp_size"), [(4, 2), (4, 4)])
def test_families_train_like_one_process(ranks: int, cp_size: int) -> None:
    """Oracle: losses, norms and held-out losses of one process; two micro-batches a step with ragged padding."""
    simulated = [config_of(SingleConfig(simulated_ranks=ranks // cp_size), 1, name) for name in MODELS]
    expected = dict(zip(MODELS, run_ranks(1, train, simulated)[0], strict=True))
    cases = [
        (attention, name)
        for attention in ToyCPConfig.context_forms
        for name in MODELS
        if can_share(attention, name, cp_size)
    ]
    assert {name for _, name in cases} >= {"llama", "qwen3_moe", "gpt2"}
    configs = [config_of(ToyCPConfig(context=attention), ranks, name, cp_size) for attention, name in cases]
    for of_rank in run_ranks(ranks, train, configs):
        for (attention, name), losses in zip(cases, of_rank, strict=True):
            for found, one_process in zip(losses, expected[name], strict=True):
                assert found == pytest.approx(one_process, rel=1e-5), (name, attention)


def can_share(attention: ContextForm, name: str, cp_size: int) -> bool:
    """Whether the ranks divide the heads (Ulysses), and attention has no chunks (the ring)."""
    return name != "llama4" if attention is ContextForm.ring else MODELS[name].n_heads % cp_size == 0


SHARED = ["parallel=toy_cp", "model=llama_debug", "mesh.cp_size=2"]
RING = [*SHARED, "parallel.context=ring"]
ODD = ["model.n_heads=3", "model.n_kv_heads=1", "model.dim=96"]
REFUSED: list[tuple[list[str], str]] = [
    ([*SHARED, "train.seq_len=65"], "train.seq_len=65 must be a multiple of 2,"),
    ([*RING, "train.seq_len=66"], "set train.seq_len=64"),
    ([*SHARED, "parallel.context=ulysses", *ODD], "set parallel.context=ring"),
    ([*SHARED, "parallel.context=gathered"], "parallel.context=gathered is not an option of parallel=toy_cp"),
    ([*SHARED, "train.compile=true"], "set train.compile=false"),
    (
        [*RING, "kernels.attention=math"],
        "kernels.attention=math is not an option of parallel=toy_cp",
    ),
    ([*RING, "data.mask_documents=true"], "parallel.context=ring does not keep documents apart"),
    ([*RING, "model=llama4_debug", "model.attention_chunk_len=16"], "model.attention_chunk_len=16 is not an option"),
    ([*SHARED, "mesh.ep_size=2"], "mesh.ep_size=2 is not an option of parallel=toy_cp"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_settings_that_cannot_share_sequences_are_refused(words: list[str], message: str) -> None:
    """Oracle: the expected message, before anything starts."""
    with pytest.raises(ConfigError) as raised:
        compose_config(words).validate(2, "cpu")
    assert message in str(raised.value)
