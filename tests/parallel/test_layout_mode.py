"""``train.deterministic=layout``: every layout of a global batch has the bits of one ordinary process."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.config.kernel_choice import Kernel, KernelConfig
from fsdptoys.config.saved import read_config
from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig, ToyDDPConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.fsdp1 import FSDP1
from fsdptoys.parallel.precision import DType, SumDType
from fsdptoys.report.setting_effects import bits_of
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import full_tensor, is_dtensor
from scripts.parity import Outcome, hash_parameters
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config, tiny_model
from tests.train.resumed import kept, run_to_the_end, run_until

BATCH = 4
"""Sequences of a global batch."""

EXPERTS: dict[str, Any] = {"n_experts": 4, "expert_ffn_dim": 24}
MODELS: dict[str, ModelConfig] = {
    "llama": tiny_model(),
    "llama tied": tiny_model(tie_embeddings=True),
    "qwen3": TINY["qwen3"],
    "qwen3_moe": dataclasses.replace(TINY["qwen3_moe"], **EXPERTS),
    # Chunks of two grains, so that ranks with parts of sequences have whole grains of them.
    "llama4": dataclasses.replace(TINY["llama4"], **EXPERTS, attention_chunk_len=12),
    "gpt2": TINY["gpt2"],
}

# FSDP2 of torch 2.7 only averages, which the mode refuses.
Sharded = FSDP2Config if fsdp2_can_sum() else FSDP1Config

FULL = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1)
SELECTIVE = MemoryConfig(gradient_checkpointing=GradientCheckpointing.selective)
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="20")
DOCUMENTS = SyntheticConfig(branching=60, mask_documents=True)


def config(parallel: ParallelConfig, ranks: int, model: str, dtype: DType, **more: Any) -> Config:
    """Two steps on the global batch, by four grains a sequence and micro-batches of one sequence unless given.

    Then an evaluation on as many held-out sequences.
    """
    shares = ranks // (more.get("cp_size", 1) * more.get("tp_size", 1) * more.get("pp_size", 1))
    size = more.setdefault("batch_size", 1)
    micro_batches = BATCH // shares // size
    settings = {"grad_accum": micro_batches, "steps": 2, "eval_every": 2, "eval_batches": micro_batches}
    more = settings | {"deterministic": "layout"} | more
    if more["deterministic"] == "layout":
        more.setdefault("grains", 4)
    return make_config(dataclasses.replace(parallel, param_dtype=dtype), ranks, model=MODELS[model], **more)


def train_with_gradients(configs: list[Config]) -> list[tuple[Outcome, dict[str, Any]]]:
    """Results of each run, held-out losses after the others, and all gradients of its first step before clipping."""
    results = []
    for each in configs:
        trainer = Trainer(each)
        kept_gradients: dict[str, Any] = {}
        trainer._clip = lambda *given, trainer=trainer, kept=kept_gradients, clip=trainer._clip: (  # type: ignore[method-assign]
            kept or kept.update(full_gradients(trainer)),
            clip(*given),
        )[1]
        trainer.train()
        losses, norms = ([getattr(step, name) for step in trainer.history] for name in ("loss", "grad_norm"))
        losses += [step.eval_loss for step in trainer.history if step.eval_loss is not None]
        results.append((Outcome(losses, norms, hash_parameters(trainer)), kept_gradients))
    return results


def full_gradients(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    if isinstance(strategy, FSDP1):
        with strategy.model.summon_full_params(strategy.model, with_grads=True):
            return {name: param.grad.numpy().copy() for name, param in strategy.named_parameters()}  # type: ignore[union-attr]
    grads = {name: strategy.spread(name, param.grad) for name, param in strategy.named_parameters()}  # type: ignore[arg-type]
    full = {name: (full_tensor(g) if is_dtensor(g) else g) for name, g in grads.items()}  # type: ignore[arg-type]
    named = full.items() if strategy.pipeline is None else strategy.pipeline.share_parameters(iter(full.items()))
    return {name: grad.numpy().copy() for name, grad in named}


Case = tuple[str, DType, dict[str, Any], dict[str, tuple[ParallelConfig, dict[str, Any]]]]
"""Model, dtype, settings that the reference shares, and layouts by name: strategy and settings of their own."""


def assert_bits_of_one_process(ranks: int, cases: list[Case], losses: int = 3) -> None:
    """Compare with one process that takes the global batch as one micro-batch."""
    plain = [config(SingleConfig(), 1, model, dtype, batch_size=BATCH, **shared) for model, dtype, shared, _ in cases]
    expected = run_ranks(1, train_with_gradients, plain)[0]
    rows = [
        (f"{model} {dtype.value} {name}", reference, config(parallel, ranks, model, dtype, **shared, **own))
        for (model, dtype, shared, layouts), reference in zip(cases, expected, strict=True)
        for name, (parallel, own) in layouts.items()
    ]
    found = run_ranks(ranks, train_with_gradients, [row for _, _, row in rows])[0]
    different = []
    for (name, (outcome, gradients), _), (outcome_found, gradients_found) in zip(rows, found, strict=True):
        assert gradients.keys() == gradients_found.keys() and gradients
        assert len(outcome.losses) == losses
        wrong = [key for key in gradients if not (gradients[key] == gradients_found[key]).all()]
        if wrong or outcome_found != outcome:
            different.append((name, wrong))
    assert different == []


@pytest.mark.usefixtures("unmeasured")
def test_micro_batches_change_no_bit_in_this_mode_alone() -> None:
    """Oracle: one micro-batch; the control is ``train.deterministic=true``, whose last bits change with them."""
    splits: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
        "1 x 4": (SingleConfig(), {}),
        "2 x 2": (SingleConfig(), {"batch_size": 2}),
        "2 x 2 of 2 ranks": (SingleConfig(simulated_ranks=2), {"batch_size": 2, "grad_accum": 1}),
    }
    assert_bits_of_one_process(1, [(name, DType.float32, {}, splits) for name in ("qwen3_moe", "gpt2")])
    control = {"deterministic": True, "steps": 2}
    configs = [config(SingleConfig(), 1, "llama", DType.float32, batch_size=size, **control) for size in (1, 4)]
    (one, _), (other, _) = run_ranks(1, train_with_gradients, configs)[0]
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    assert one.parameters != other.parameters


@pytest.mark.usefixtures("unmeasured")
def test_two_ranks_have_the_bits_of_one_process_with_every_switch() -> None:
    """Oracle: one process, one micro-batch, without checkpointing; two ranks have two micro-batches each.

    With the chunked loss, label smoothing and masked documents alike in both.
    """
    smooth = {"label_smoothing": 0.1, "z_loss_coef": 1e-3, "memory": CHUNKED}
    assert_bits_of_one_process(
        2,
        [
            ("llama tied", DType.float32, {}, {"ddp": (DDPConfig(), {"memory": SELECTIVE})}),
            ("llama tied", DType.bfloat16, smooth, {"fsdp1": (FSDP1Config(), {}), "fsdp2": (Sharded(), {})}),
            ("qwen3_moe", DType.bfloat16, {}, {"fsdp1": (FSDP1Config(), {"memory": FULL})}),
            ("llama4", DType.float32, {}, {"fsdp2": (Sharded(), {"memory": SELECTIVE, "batch_size": 2})}),
            ("gpt2", DType.bfloat16, {"data": DOCUMENTS}, {"ddp": (DDPConfig(), {"memory": FULL})}),
            ("qwen3", DType.float32, {"grains": 3, "data": DOCUMENTS}, {"fsdp2": (Sharded(), {})}),
        ],
    )


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("ranks", "families"), [(1, list(MODELS)), (2, ["llama4"])])
def test_checkpointing_changes_no_bit_of_any_family(ranks: int, families: list[str]) -> None:
    """Oracle: one process without checkpointing; of the masks of twelve grains, layers of chunks need half."""
    parallel = SingleConfig() if ranks == 1 else Sharded()
    layouts: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
        name: (parallel, {"memory": memory, "batch_size": 2}) for name, memory in (("full", FULL), ("some", SELECTIVE))
    }
    shared = {"steps": 1, "eval_every": 1}
    grains = {name: {"grains": 12} if name == "llama4" else {} for name in families}
    assert_bits_of_one_process(
        ranks, [(name, DType.float32, shared | grains[name], layouts) for name in families], losses=2
    )


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.skipif(not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients")
def test_four_ranks_have_the_bits_of_one_process_on_every_axis() -> None:
    """Oracle: one process, one micro-batch; replicas, shared sequences and split experts, alone and together."""
    ulysses, gathered = (FSDP2Config(context=form) for form in (ContextForm.ulysses, ContextForm.gathered))
    hsdp = {"fsdp_size": 2}
    assert_bits_of_one_process(
        4,
        [
            ("llama", DType.bfloat16, {"grains": 8}, {"hsdp": (FSDP2Config(), hsdp), "cp": (gathered, {"cp_size": 4})}),
            ("qwen3", DType.float32, {}, {"hsdp1": (FSDP1Config(), hsdp), "cp": (ulysses, {"cp_size": 2})}),
            ("gpt2", DType.float32, {"data": DOCUMENTS}, {"hsdp cp": (gathered, hsdp | {"cp_size": 2})}),
            (
                *("llama4", DType.bfloat16, {}),
                {"ep hsdp": (FSDP2Config(), hsdp | {"ep_size": 2}), "hsdp cp": (gathered, hsdp | {"cp_size": 2})},
            ),
            (
                *("qwen3_moe", DType.float32, {}),
                {"ep cp": (ulysses, {"cp_size": 2, "ep_size": 4}), "ep": (FSDP2Config(), {"ep_size": 2})},
            ),
        ],
    )


def resume(given: Config, killed_in: int | None) -> dict[str, str]:
    """Run until a step, or to the end; return the hashes of the parameters."""
    if killed_in is not None:
        run_until(given, killed_in)
        return {}
    return hash_parameters(run_to_the_end(given))


def test_a_run_resumed_on_other_layouts_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one process in one piece; the other run begins under FSDP2, goes on under DDP and ends in one process."""
    monkeypatch.setattr("fsdptoys.metrics.plots.draw_loss", lambda *_: None)  # most of the time of such small runs
    options: dict[str, Any] = {"steps": 4, "eval_every": 2, "eval_batches": 1}

    def part(parallel: ParallelConfig, ranks: int, **more: Any) -> Config:
        return kept(config(parallel, ranks, "gpt2", DType.float32, **options, **more), tmp_path / "run", every=1)

    whole = kept(config(SingleConfig(), 1, "gpt2", DType.float32, batch_size=BATCH, **options), tmp_path / "whole")
    (expected,) = run_ranks(1, resume, whole, None)
    run_ranks(2, resume, part(Sharded(), 2), 3)
    run_ranks(2, resume, part(DDPConfig(), 2, batch_size=2), 4)
    (found,) = run_ranks(1, resume, part(SingleConfig(), 1), None)
    assert found == expected


REFUSED: dict[str, dict[str, Any]] = {
    "parallel=toy_ddp": {"parallel": ToyDDPConfig()},
    "train.compile=true": {"compile": True},
    "train.float8=tensorwise": {"float8": Float8.tensorwise},
    "parallel.param_dtype=float16": {"parallel": SingleConfig(param_dtype=DType.float16)},
    "train.grains=5": {"grains": 5},
    "kernels.swiglu=compiled": {"kernels": KernelConfig(swiglu=Kernel.compiled)},
    "memory.optimizer_in_backward=true": {
        "memory": MemoryConfig(optimizer_in_backward=True),
        "max_grad_norm": None,
        "skip_nonfinite": False,
        "grad_accum": 1,
    },
    "train.sum_dtype=float32": {"sum_dtype": SumDType.float32},
    "model.tie_embeddings=true": {"parallel": FSDP1Config(), "tie_embeddings": True},
}


@pytest.mark.parametrize("named", REFUSED)
def test_settings_that_the_layout_would_show_in_are_refused_by_name(named: str) -> None:
    """Oracle: the key and its value in the message, with a fix; the same settings pass without the mode."""
    settings = dict(REFUSED[named])
    parallel = settings.pop("parallel", SingleConfig())
    with pytest.raises(ConfigError, match=rf"{re.escape(named)}.*; set "):
        make_config(parallel, 1, deterministic="layout", **settings)
    if named.startswith("train.grains"):
        settings.pop("grains")
    make_config(parallel, 1, deterministic=False, **settings)


def test_shared_sequences_need_whole_grains() -> None:
    """Oracle: eight pieces of four ranks, which six grains are no multiple of; chunks that end within a grain."""
    gathered = Sharded(context=ContextForm.gathered)
    with pytest.raises(ConfigError, match=r"train\.grains=6 must be a multiple of 8.*; set train.grains=24"):
        make_config(gathered, 4, cp_size=4, deterministic="layout", grains=6)
    with pytest.raises(ConfigError, match=r"parallel\.context=ring merges .*; set parallel\.context=gathered"):
        make_config(Sharded(context=ContextForm.ring), 2, cp_size=2, deterministic="layout")
    with pytest.raises(
        ConfigError, match=r"model\.attention_chunk_len=10 must be a multiple of the 3 tokens of a grain"
    ):
        make_config(gathered, 2, cp_size=2, deterministic="layout", model=TINY["llama4"])


def test_fsdp2_that_only_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message; FSDP1 sums in every version."""
    monkeypatch.setattr("fsdptoys.config.grain_checks.fsdp2_can_sum", lambda: False)
    with pytest.raises(ConfigError, match=r"FSDP2 of torch .* only averages; set parallel=ddp or parallel=fsdp1"):
        make_config(FSDP2Config(), 2, deterministic="layout")
    make_config(FSDP1Config(), 2, deterministic="layout")


def test_grains_without_the_mode_are_refused() -> None:
    """Oracle: the message; an option without effect is refused."""
    with pytest.raises(ConfigError, match=r"train\.grains=4 does nothing as set; set train.deterministic=layout"):
        make_config(SingleConfig(), 1, deterministic=True, grains=4)


@pytest.mark.parametrize("word, mode", [("false", False), ("true", True), ("on", True), ("layout", "layout")])
def test_words_and_saved_booleans_name_the_modes(word: str, mode: bool | str) -> None:
    """Oracle: the modes' values, which are what configurations of earlier versions say."""
    composed = compose_config(["model=llama_debug", f"train.deterministic={word}"])
    assert composed.train.deterministic is Deterministic(mode)
    tree = composed.to_dict()
    assert tree["train"]["deterministic"] == mode
    assert read_config(tree, "config.yaml").train.deterministic is Deterministic(mode)


def test_reports_expect_equal_bits_of_runs_with_the_same_global_batch() -> None:
    """Oracle: equal keys for other ranks and micro-batches in this mode alone, other keys for other grains."""
    one = config(SingleConfig(), 1, "llama", DType.float32, batch_size=BATCH)
    three = make_config(DDPConfig(), 3, model=MODELS["llama"], batch_size=1, deterministic="layout", grains=4)
    keys = [bits_of(each.to_dict(), ranks, "cpu") for each, ranks in ((one, 1), (three, 3))]
    assert keys[0] is not None and keys[0] == keys[1]
    fewer = config(SingleConfig(), 1, "llama", DType.float32, batch_size=BATCH, grains=3)
    assert bits_of(fewer.to_dict(), 1, "cpu") != keys[0]
    for mode in (True, False):
        trees = [
            dataclasses.replace(each, train=dataclasses.replace(each.train, deterministic=mode))
            for each in (one, three)
        ]
        keys = [bits_of(each.to_dict(), ranks, "cpu") for each, ranks in zip(trees, (1, 2), strict=True)]
        assert keys[0] != keys[1] or keys == [None, None]


def test_losses_and_gradients_are_close_to_those_of_the_default_mode() -> None:
    """Oracle: one process by default, every family; sums by grains are other roundings of the same training."""
    rows = [
        config(SingleConfig(), 1, model, DType.float32, batch_size=2, steps=1, grad_accum=1, deterministic=mode)
        for model in MODELS
        for mode in (False, "layout")
    ]
    found = iter(run_ranks(1, train_with_gradients, rows)[0])
    for model, (plain, gradients), (by_grains, gradients_found) in zip(MODELS, found, found, strict=True):
        assert by_grains.losses == pytest.approx(plain.losses, rel=2e-6), model
        assert by_grains.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5), model
        for name in gradients:
            torch.testing.assert_close(*(torch.from_numpy(g[name]) for g in (gradients_found, gradients)))
